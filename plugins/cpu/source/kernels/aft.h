// The mean of an AFT-local node: for every position and channel over all keys it sees, with learned biases near it.
// The caller runs the parts of its two steps on threads, one step after the other. The meaning of every tensor is
// that of the node's contract, core/nodes/aft.py.
#pragma once

#include "kernels/fused.h"

namespace localattn {

// Keys whose state is computed once for all rows that see all of them with bias 0.
constexpr int64_t kAftBlock = 16;
// Rows, and channels of one sequence, that are a part of the second step.
constexpr int64_t kAftRows = 96;
constexpr int64_t kAftChannels = 32;

struct Aft {
  const float* gate;  // [length, batch, dim], as key, value and output
  const float* key;   // the logits
  const float* value;
  float* output;
  const float* bias;    // [length, columns]: of the keys from `reach` positions before the row on
  const uint8_t* mask;  // [batch, length], nonzero = keep; null without a mask
  int64_t length;
  int64_t batch;
  int64_t dim;
  int64_t columns;
  int64_t reach;
  bool causal;
  float* states;  // aft_floats(call)

  int64_t width() const { return align(dim, kAftChannels); }
  int64_t blocks() const { return divide_up(length, kAftBlock); }
  // Largest logit, and the sums of values and weights below it, of the keys before block `at` (ahead: from it on).
  float* state(int64_t at, bool ahead, int64_t sequence) const {
    return states + (((ahead ? blocks() + 1 : 0) + at) * batch + sequence) * 3 * width();
  }
};

inline int64_t aft_floats(const Aft& call) {
  return (call.causal ? 1 : 2) * (call.blocks() + 1) * call.batch * 3 * call.width();
}

// Rows [first, first + kAftRows) and parts [parts.first, parts.end) of kAftChannels; sequences come first.
struct AftPart {
  int64_t first;
  Range parts;
};

}  // namespace localattn
