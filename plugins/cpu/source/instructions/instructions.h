// The functions that are compiled once for each instruction set, and the choice of the set for this processor.
#pragma once

#include "kernels/aft.h"
#include "kernels/fused.h"
#include "kernels/ring.h"
#include "kernels/attention/rows.h"

namespace localattn {

// The functions of one instruction set; they return false if there is no memory, and then all outputs are invalid.
struct Functions {
  // `first` must be a multiple of 64. False also if it takes more floats of scratch than it may.
  bool (*attend_rows)(const Call&, const Rows&, int64_t most_floats);
  bool (*read_streams)(const ReadStreams&, Range rows);
  bool (*write_streams)(const WriteStreams&, Range rows);
  // `reading.streams` is `writing.written`, which does not add up, of as many streams as before.
  bool (*write_and_read_streams)(const WriteStreams& writing, const ReadStreams& reading, Range rows);
  bool (*rotate)(const Rotate&, Range rows);
  bool (*gated)(const Gated&, Range elements);
  bool (*aft_states)(const Aft&, Range parts);
  bool (*aft_mean)(const Aft&, const AftPart&);
  bool (*ring_step)(const Ring&, const RingPieces&, Range parts);
  bool (*ring_merge)(const Ring&, const RingPieces&, Range heads);
  int64_t ring_rows;  // queries of a chunk's tile
  void (*ring_biases)(const Ring&, const RingBiases&, Range tiles);
  bool (*ring_chunk)(const Ring&, const RingBiases&, const RingPart&);
};

// The fastest that this processor has; LOCALATTN_CPU_ISA names a slower one, to test it or to compare.
const Functions& instructions();

// Each defined by the file of its name.
#if defined(__x86_64__)
namespace avx512 {
extern const Functions functions;
}
namespace avx2 {
extern const Functions functions;
}
#elif defined(__aarch64__)
namespace neon {
extern const Functions functions;
}
#endif
namespace baseline {
extern const Functions functions;
}

}  // namespace localattn
