// Attention that continues from a ring of keys and values: one call of a step node or of a chunk node. The caller runs
// its tasks on threads. The meaning of every tensor is that of the node's contract, core/nodes/step.py.
#pragma once

#include "kernels/fused.h"

namespace localattn {

struct Ring {
  const void* query;  // [batch, heads, rows, dim], as the output
  const void* key;    // [batch, kv_heads, rows, dim], as the value
  const void* value;
  const void* key_cache;  // [batch, kv_heads, slots, dim], as the other caches
  const void* value_cache;
  void* output;
  void* next_key;  // may be the cache itself, as may the other
  void* next_value;
  Element element;             // of all of them
  const float* bias;           // [rows, keys()], one for each sequence, for each head, or for all
  const int64_t* write_index;  // step: [batch, kv_heads, 3]; chunk: [slots]
  const float* query_scale;    // [rows, dim]; null without xpos, and for a step
  const float* key_scale;      // [keys(), dim]; null without xpos
  const float* sinks;          // [heads], a logit that joins the sum of a row's weights; null without sinks
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;  // every one serves heads / kv_heads heads of queries, side by side
  int64_t rows;      // new tokens
  int64_t slots;
  int64_t dim;
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0 without a cap
  bool chunked;
  bool bias_by_head;
  bool bias_by_batch;

  int64_t keys() const { return chunked ? slots + rows : slots; }
  int64_t group() const { return heads / kv_heads; }
  // Which of the biases a head has.
  int64_t bias_of(int64_t sequence, int64_t head) const { return bias_by_batch ? sequence : bias_by_head ? head : 0; }
  int64_t biases() const { return bias_by_batch ? batch : bias_by_head ? heads : 1; }
};

// A step's ring, cut into pieces of `slots` slots. The pieces, and so the order of sums, depend only on the shapes.
struct RingPieces {
  int64_t slots;
  int64_t count;
  int64_t dim;
  float* data;  // [batch, heads, count, row_floats()] if there are several

  // Keys and values in one piece, as numbers: several pieces fit in L2, and each is enough work for a thread.
  static constexpr int64_t kNumbers = 65536;

  explicit RingPieces(const Ring& call) : dim(call.dim), data(nullptr) {
    slots = align(divide_up(call.slots, divide_up(2 * call.slots * call.dim, kNumbers)), kMostLanes);
    count = divide_up(call.slots, slots);
  }
  // A row: weighted values, the largest score, the sum of weights.
  int64_t width() const { return align(dim, kMostLanes); }
  int64_t row_floats() const { return width() + kMostLanes; }
};

// The biases as a chunk's tiles take them, in the order of biases, tiles and keys.
struct RingBiases {
  float* data;    // [biases, tiles, keys, queries of a tile]; any content where a tile sees none of some keys
  uint8_t* seen;  // [biases, tiles, keys]: 1 for a key that one of the tile's queries takes
  int64_t tiles;
};

// The tiles [first, first + count) of all heads of a group of a chunk: head after head.
struct RingPart {
  int64_t sequence;
  int64_t kv_head;
  Range tiles;
};

}  // namespace localattn
