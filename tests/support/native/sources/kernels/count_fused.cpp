// One fused operator once over tokens of four streams, for a tool that counts instructions.
//
//   count_fused OPERATOR TOKENS DIM RUN      RUN = 0 does everything but the operator.
#include "instructions/instructions.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <stdlib.h>

namespace {

constexpr int64_t kStreams = 4;

float* numbers(int64_t count) {
  float* data = static_cast<float*>(aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
  for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 97) / 97 - 0.5f;
  return data;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const char* op = arguments[1];
  const int64_t tokens = std::atoll(arguments[2]), dim = std::atoll(arguments[3]), wide = tokens * kStreams;
  float* streams = numbers(wide * dim);
  float* other = numbers(wide * dim);
  float* mix = numbers(wide * kStreams);
  float* next_beta = numbers(wide);
  float* scale = numbers(2 * dim);
  float* weights = numbers(wide * kStreams);
  float* beta = numbers(wide);
  float* row = numbers(tokens * dim);
  float* columns = numbers((kStreams + 2) * dim);
  const localattn::Functions& functions = localattn::instructions();
  const bool run = std::atoi(arguments[4]) != 0;
  if (run && !std::strcmp(op, "read")) {
    localattn::ReadStreams call{streams, columns, columns, columns, row, weights, beta, kStreams, dim, dim, {}, {}};
    functions.read_streams(call, {0, tokens});
  } else if (run && !std::strcmp(op, "mix-read")) {
    functions.write_and_read_streams(
        {streams, weights, beta, row, other, kStreams, kStreams, false, dim},
        {other, columns, columns, columns, row, mix, next_beta, kStreams, dim, dim, scale, scale + dim}, {0, tokens});
  } else if (run && !std::strcmp(op, "mix")) {
    functions.write_streams({streams, weights, beta, row, other, kStreams, kStreams, false, dim}, {0, tokens});
  } else if (run && !std::strcmp(op, "rotate")) {
    functions.rotate({streams, row, row, other, localattn::Element::fp32, dim, tokens, kStreams, 0, false}, {0, wide});
  } else if (run && !std::strcmp(op, "gelu")) {
    functions.gated({streams, other, other, localattn::Element::fp32, localattn::Activation::gelu}, {0, wide * dim});
  }
  std::printf("%s\n", localattn::instruction_set());
}
