// Which keys a query sees (core/geometry.py), and where its biases lie.
#pragma once

#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>

namespace localattn {

// core/nodes/attention.py: SELF_SCORE and LOWEST_BIAS.
constexpr float kSelfScore = -5e4f;
constexpr float kLowestBias = -1e30f;

// Positions [first, end).
struct Interval {
  int64_t first;
  int64_t end;
};

inline int64_t backward_reach(const Window& window) { return window.look_backward * window.window_size; }
inline int64_t forward_reach(const Window& window) { return window.look_forward * window.window_size; }
inline int64_t keys_per_window(const Window& window) {
  return backward_reach(window) + window.window_size + forward_reach(window);
}

// Channel c of a product of the query at t with the key at s is multiplied by 2^(rate_c (t - s + f w)): xpos' decay.
inline double decay_rate(const Call& call, int64_t channel) {
  const double width = static_cast<double>(call.head_dim);
  const double twice = static_cast<double>(2 * (channel % (call.head_dim / 2)));
  return std::log2((twice + 0.4 * width) / (1.4 * width)) / call.xpos_scale_base;
}

// The keys that a query sees whose window of window_size positions starts at `start`.
inline Interval visible_from(const Window& window, int64_t query, int64_t start, int64_t length) {
  const int64_t first = (window.exact_windowsize ? query : start) - backward_reach(window);
  int64_t end = (window.exact_windowsize ? query + 1 : start + window.window_size) + forward_reach(window);
  if (window.causal) end = query + 1;
  return {std::min(std::max<int64_t>(first, 0), length), std::min(std::max<int64_t>(end, 0), length)};
}

inline Interval visible_interval(const Window& window, int64_t query, int64_t length) {
  return visible_from(window, query, query - query % window.window_size, length);
}

// The same for queries one after the other, without a division for each.
class Windows {
 public:
  Windows(const Window& window, int64_t query) : start_(query - query % window.window_size) {}

  // `query` is that of the call before, or the next.
  Interval visible(const Window& window, int64_t query, int64_t length) {
    if (query == start_ + window.window_size) start_ = query;
    return visible_from(window, query, start_, length);
  }

 private:
  int64_t start_;
};

// The keys that an additive bias has an entry for, visible or not; not clipped to the sequence.
inline Interval gathered_interval(const Window& window, int64_t query) {
  const int64_t first = query - query % window.window_size - backward_reach(window);
  return {first, first + keys_per_window(window)};
}

// The index of a query's bias for key 0, if it had one: that of key s is s further on.
inline int64_t bias_row(const Window& window, int64_t head, int64_t query) {
  const int64_t row = head * window.window_size + query % window.window_size;
  return row * keys_per_window(window) - gathered_interval(window, query).first;
}

}  // namespace localattn
