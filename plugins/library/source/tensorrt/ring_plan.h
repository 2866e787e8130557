// How one call of a step or chunk node is cut: the same numbers as `plan` of plugins/kernel/ring.py.
#pragma once

#include <cstdint>

namespace localattn {

// Sizes of one call. Of a chunk, `tokens` may be more than one, and its own keys are attended to beside the slots.
struct RingSizes {
  int64_t batch;
  int64_t heads;
  int64_t kvHeads;
  int64_t tokens;
  int64_t slots;
  int64_t headDim;
  bool chunked;

  int64_t keys() const { return chunked ? slots + tokens : slots; }
  int64_t rows() const { return heads / kvHeads * tokens; }  // of one head of keys
  int64_t groups() const { return batch * kvHeads; }
};

struct RingPlan {
  int64_t span;  // keys of a split
  int64_t splits;
  int64_t blocks;  // programs a head of keys
};

// `blockRows`: rows of a program.
RingPlan planOf(RingSizes const& sizes, int64_t blockRows);

// Bytes that the parts of splits take at most, whatever the rows of a program, at these sizes and any smaller ones.
int64_t mostPartBytes(RingSizes const& sizes);

}  // namespace localattn
