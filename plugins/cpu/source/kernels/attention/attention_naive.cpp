// Windowed attention by its definition: one query after the other, in double, without allocating memory. It is the
// reference of the fast kernel, and its replacement if memory is short.
#include "kernels/half.h"
#include "kernels/attention/rows.h"
#include "kernels/attention/window.h"

#include <cmath>

namespace localattn {
namespace {

constexpr int64_t kChannels = 64;   // of the output at a time
constexpr int64_t kWeights = 1024;  // of a query, computed once for all channels if there are no more
constexpr double kNoWeight = -1;    // of a key that the mask hides

double element(const void* data, Element type, int64_t index) {
  if (type == Element::fp32) return static_cast<const float*>(data)[index];
  return widen(static_cast<const uint16_t*>(data)[index]);
}

void store(const Call& call, int64_t index, double value) {
  const float rounded = static_cast<float>(value);
  if (call.element == Element::fp32) {
    static_cast<float*>(call.output)[index] = rounded;
  } else {
    static_cast<uint16_t*>(call.output)[index] = narrow(rounded);
  }
}

// The score of a visible key; -inf if the mask does not keep it.
double score(const Call& call, const Rows& rows, int64_t query, int64_t key) {
  if (call.key_mask && !call.key_mask[rows.batch * call.length + key]) return -INFINITY;
  if (call.shared_qk && key == query) return kSelfScore;
  const int64_t query_row = rows.origin(call) + query * call.layout.row;
  const int64_t key_row = rows.key_origin(call) + key * call.key_layout.row;
  const double ahead = static_cast<double>(query - key + forward_reach(call.window));
  double product = 0;
  for (int64_t c = 0; c < call.head_dim; ++c) {
    double one = element(call.query, call.element, query_row + c) * element(call.key, call.element, key_row + c);
    if (call.xpos_scale_base != 0) one *= std::exp2(ahead * decay_rate(call, c));
    product += one;
  }
  product *= call.scale;
  if (call.softcap > 0) product = call.softcap * std::tanh(product / call.softcap);
  if (!call.attn_bias) return product;
  const int64_t bias = bias_row(call.window, rows.head, query) + key;
  const double given = element(call.attn_bias, call.bias_element, bias);
  return product + (given < kLowestBias ? kLowestBias : given);  // NaN stays NaN
}

}  // namespace

void attend_rows_naive(const Call& call, const Rows& rows) {
  for (int64_t query = rows.first; query < rows.end; ++query) {
    const Interval seen = visible_interval(call.window, query, call.length);
    const double sink = call.sinks ? call.sinks[rows.head] : -INFINITY;
    double top = sink;
    for (int64_t key = seen.first; key < seen.end; ++key) top = std::fmax(top, score(call, rows, query, key));
    const auto compute_weight = [&](int64_t key) {
      const double reached = score(call, rows, query, key);
      return reached == -INFINITY ? kNoWeight : std::exp(reached - top);
    };
    double weights[kWeights];
    const bool once = seen.end - seen.first <= kWeights;
    for (int64_t key = seen.first; once && key < seen.end; ++key) weights[key - seen.first] = compute_weight(key);
    for (int64_t from = 0; from < call.head_dim; from += kChannels) {
      const int64_t channels = std::min(kChannels, call.head_dim - from);
      double sums[kChannels] = {};
      double total = sink == -INFINITY ? 0 : std::exp(sink - top);
      for (int64_t key = seen.first; key < seen.end; ++key) {
        const double weight = once ? weights[key - seen.first] : compute_weight(key);
        if (weight == kNoWeight) continue;
        const int64_t row = rows.key_origin(call) + key * call.key_layout.row + from;
        total += weight;
        for (int64_t c = 0; c < channels; ++c) sums[c] += weight * element(call.value, call.element, row + c);
      }
      const int64_t row = rows.origin(call) + query * call.layout.row + from;
      for (int64_t c = 0; c < channels; ++c) store(call, row + c, total == 0 ? 0 : sums[c] / total);
    }
  }
}

void attention_naive(const Call& call) {
  for (int64_t batch = 0; batch < call.batch; ++batch) {
    for (int64_t head = 0; head < call.heads; ++head) attend_rows_naive(call, {batch, head, 0, call.length});
  }
}

}  // namespace localattn
