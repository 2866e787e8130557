// One head of a step or a chunk that goes on from a full ring, for a tool that counts instructions.
//
//   count_ring ROWS SLOTS DIM RUN      RUN = 0 does everything but the attention.
#include "instructions.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

std::vector<float> numbers(int64_t count) {
  std::vector<float> data(count);
  for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 97) / 97 - 0.5f;
  return data;
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
  const localattn::RingBiases biases{aligned, functions.ring_rows, tiles};
  if (std::atoi(arguments[4]) != 0) {
    if (call.chunked) {
      functions.ring_biases(call, biases, {0, tiles});
      functions.ring_chunk(call, biases, {0, 0, {0, tiles}});
    } else {
      functions.ring_step(call, {0, 1});
    }
  }
  std::printf("%s\n", localattn::instruction_set());
}
