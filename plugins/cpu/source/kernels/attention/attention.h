// The windowed attention of one node on the CPU: the arguments of a call, and two functions that compute it.
//
// A call is cut into independent tasks that the caller runs: on onnxruntime's thread pool in the operator library, in a
// plain loop in tests. The meaning of every field is that of the node's contract,
// core/nodes/attention.py.
#pragma once

#include <cstdint>

namespace localattn {

enum class Element { fp32, fp16 };

// Which keys a query sees; the interval is that of core/geometry.py.
struct Window {
  int64_t window_size;
  int64_t look_backward;
  int64_t look_forward;
  bool causal;
  bool exact_windowsize;
};

// Where row t of head h of batch entry b begins, in elements: data + b * batch + h * head + t * row.
// The channels of a row lie side by side.
struct Layout {
  int64_t batch;
  int64_t head;
  int64_t row;
};

struct Call {
  const void* query;
  const void* key;
  const void* value;
  void* output;
  Element element;    // of query, key, value and output
  Layout layout;      // of query and output
  Layout key_layout;  // of key and value
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;  // of keys and values; every one serves heads / kv_heads heads of queries, side by side
  int64_t length;
  int64_t head_dim;
  Window window;
  float scale;
  bool shared_qk;
  float softcap;            // scores become softcap * tanh(score / softcap); 0 without a cap
  float xpos_scale_base;    // of the decay by distance, 0 without
  const uint8_t* key_mask;  // [batch, length], nonzero = keep; null without a mask
  const void* attn_bias;    // [heads, window_size, keys_per_window]; null without a bias
  Element bias_element;
  const float* sinks;  // [heads], a logit that joins the sum of a row's weights; null without sinks
};

// How many tasks a call consists of; at least one unless the output is empty. It suits `threads` threads.
int64_t count_tasks(const Call& call, int64_t threads);

// Compute task `task` of `tasks` (what count_tasks said). Tasks write disjoint rows of the output and read no output.
void run_task(const Call& call, int64_t task, int64_t tasks);

// The same result as all tasks together, by the definition: one query after the other, in double.
void attention_naive(const Call& call);

// The instruction set that is used on this processor: "avx512", "avx2", "neon" or "baseline".
const char* instruction_set();

}  // namespace localattn
