// AFT-local's kernel over the arrays of a folder, one call.
//
//   mean FOLDER LENGTH BATCH DIM COLUMNS CAUSAL MASKED RUN      RUN = 0 does everything but the call.
#include "instructions/instructions.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

// Exactly as large as they are, so that a sanitizer sees every access outside.
template <typename Number>
Number* read(const std::string& path, int64_t count) {
  Number* data = static_cast<Number*>(std::malloc(count * sizeof(Number)));
  FILE* file = std::fopen(path.c_str(), "rb");
  if (!data || !file || std::fread(data, sizeof(Number), count, file) != static_cast<size_t>(count)) std::exit(3);
  std::fclose(file);
  return data;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 9) return 2;
  const std::string folder = std::string(arguments[1]) + "/";
  const auto number = [&](int at) { return std::atoll(arguments[at]); };
  localattn::Aft call{};
  call.length = number(2);
  call.batch = number(3);
  call.dim = number(4);
  call.columns = number(5);
  call.causal = number(6) != 0;
  call.reach = call.causal ? call.columns - 1 : call.columns / 2;
  const int64_t elements = call.length * call.batch * call.dim;
  float* gate = read<float>(folder + "gate", elements);
  float* key = read<float>(folder + "key", elements);
  float* value = read<float>(folder + "value", elements);
  float* bias = read<float>(folder + "position_bias", call.length * call.columns);
  uint8_t* mask = number(7) ? read<uint8_t>(folder + "key_mask", call.batch * call.length) : nullptr;
  float* output = static_cast<float*>(std::malloc(elements * sizeof(float)));
  float* states = static_cast<float*>(aligned_alloc(64, localattn::aft_floats(call) * sizeof(float)));
  std::memset(output, 0xff, elements * sizeof(float));
  call.gate = gate;
  call.key = key;
  call.value = value;
  call.bias = bias;
  call.mask = mask;
  call.output = output;
  call.states = states;
  const localattn::Functions& functions = localattn::instructions();
  const int64_t parts = call.batch * (call.width() / localattn::kAftChannels);
  bool done = true;
  if (number(8)) {
    done = functions.aft_states(call, {0, parts});
    for (int64_t first = 0; first < call.length; first += localattn::kAftRows) {
      done = functions.aft_mean(call, {first, {0, parts}}) && done;
    }
  }
  FILE* file = std::fopen((folder + "output").c_str(), "wb");
  std::fwrite(output, sizeof(float), elements, file);
  std::fclose(file);
  for (void* data :
       {static_cast<void*>(gate), static_cast<void*>(key), static_cast<void*>(value), static_cast<void*>(bias),
        static_cast<void*>(mask), static_cast<void*>(output), static_cast<void*>(states)}) {
    std::free(data);
  }
  std::printf("%s\n", localattn::instruction_set());
  return done ? 0 : 1;
}
