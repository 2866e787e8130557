// One head of a step or a chunk that goes on from a full ring, for a tool that counts instructions.
//
//   count_ring ROWS SLOTS DIM RUN      RUN = 0 does everything but the attention; 2 raises SIGUSR1 around it; 3 prints
//                                      how far it is from the formula in double, 4 the same with a cap and a sink.
#include "instructions/instructions.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

std::vector<float> numbers(int64_t count) {
  std::vector<float> data(count);
  for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 97) / 97 - 0.5f;
  return data;
}

// The largest difference of the outputs from the formula; the caches are those after the call.
double error_of(const localattn::Ring& call, const std::vector<float>& keys, const std::vector<float>& values) {
  const auto* query = static_cast<const float*>(call.query);
  const auto* output = static_cast<const float*>(call.output);
  double worst = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    std::vector<double> weights(call.keys()), right(call.dim);
    double total = call.sinks ? std::exp(static_cast<double>(*call.sinks)) : 0;
    for (int64_t at = 0; at < call.keys(); ++at) {
      if (call.bias[row * call.keys() + at] != 0) continue;
      double score = 0;
      for (int64_t c = 0; c < call.dim; ++c)
        score += static_cast<double>(query[row * call.dim + c]) * keys[at * call.dim + c];
      score *= call.scale;
      if (call.softcap > 0) score = call.softcap * std::tanh(score / call.softcap);
      total += weights[at] = std::exp(score);
    }
    for (int64_t at = 0; at < call.keys(); ++at)
      for (int64_t c = 0; c < call.dim; ++c) right[c] += weights[at] / total * values[at * call.dim + c];
    for (int64_t c = 0; c < call.dim; ++c)
      worst = std::max(worst, std::fabs(right[c] - static_cast<double>(output[row * call.dim + c])));
  }
  return worst;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  localattn::Ring call{};
  call.rows = std::atoll(arguments[1]);
  call.slots = std::atoll(arguments[2]);
  call.dim = std::atoll(arguments[3]);
  call.batch = call.heads = call.kv_heads = 1;
  call.scale = 0.125f;
  call.chunked = call.rows > 1;
  const std::vector<float> query = numbers(call.rows * call.dim), key = query, value = query;
  std::vector<float> keys = numbers(call.slots * call.dim), values = keys, output(query.size());
  // The ring's oldest key is in its first slot; every query sees as many keys as there are slots.
  std::vector<float> bias(call.rows * call.keys(), 0.0f);
  for (int64_t row = 0; call.chunked && row < call.rows; ++row) {
    for (int64_t at = 0; at < call.keys(); ++at) {
      if (at <= row || at > row + call.slots) bias[row * call.keys() + at] = -2e30f;
    }
  }
  const int64_t place[3] = {0, 0, 3};
  call.query = query.data();
  call.key = key.data();
  call.value = value.data();
  call.key_cache = call.next_key = keys.data();
  call.value_cache = call.next_value = values.data();
  call.output = output.data();
  call.bias = bias.data();
  call.write_index = place;
  const localattn::Functions& functions = localattn::instructions();
  const int64_t tiles = (call.rows + functions.ring_rows - 1) / functions.ring_rows;
  std::vector<float> memory(tiles * call.keys() * functions.ring_rows + 16);
  float* aligned = memory.data();
  while (reinterpret_cast<uintptr_t>(aligned) % 64) ++aligned;
  localattn::RingPieces pieces(call);
  std::vector<float> sums(pieces.count * pieces.row_floats() + 16);
  pieces.data = sums.data();
  while (reinterpret_cast<uintptr_t>(pieces.data) % 64) ++pieces.data;
  std::vector<uint8_t> seen(tiles * call.keys());
  const localattn::RingBiases biases{aligned, seen.data(), tiles};
  const int run = std::atoi(arguments[4]);
  const float sink = 1.5f;
  if (run == 4) {
    call.softcap = 0.5f;
    call.sinks = &sink;
  }
  if (run == 2) std::raise(SIGUSR1);
  if (run != 0) {
    if (call.chunked) {
      functions.ring_biases(call, biases, {0, tiles});
      functions.ring_chunk(call, biases, {0, 0, {0, tiles}});
    } else {
      functions.ring_step(call, pieces, {0, pieces.count});
      if (pieces.count > 1) functions.ring_merge(call, pieces, {0, 1});
    }
  }
  if (run == 2) std::raise(SIGUSR1);
  std::printf("%s\n", localattn::instruction_set());
  if (run > 2) {
    if (call.chunked) {  // the new keys come behind the ring's
      keys.insert(keys.end(), key.begin(), key.end());
      values.insert(values.end(), value.begin(), value.end());
    }
    std::printf("%g\n", error_of(call, keys, values));
  }
}
