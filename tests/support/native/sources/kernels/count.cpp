// Attention of one head once, for a tool that counts instructions.
//
//   count LENGTH WINDOW EXACT RUN      RUN = 0 does everything but the attention; 2 raises SIGUSR1 around it.
#include "kernels/attention/attention.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const int64_t length = std::atoll(arguments[1]), window = std::atoll(arguments[2]), channels = 64;
  std::vector<float> data[4];
  for (auto& array : data) {
    array.resize(length * channels);
    for (size_t i = 0; i < array.size(); ++i) array[i] = static_cast<float>(i % 97) / 97 - 0.5f;
  }
  localattn::Call call{};
  call.query = data[0].data();
  call.key = data[1].data();
  call.value = data[2].data();
  call.output = data[3].data();
  call.element = localattn::Element::fp32;
  call.layout = call.key_layout = {length * channels, length * channels, channels};
  call.batch = call.heads = call.kv_heads = 1;
  call.length = length;
  call.head_dim = channels;
  call.window = {window, 1, 0, true, std::atoi(arguments[3]) != 0};
  call.scale = 0.125f;
  const int64_t tasks = localattn::count_tasks(call, 1);
  const int run = std::atoi(arguments[4]);
  if (run == 2) std::raise(SIGUSR1);
  for (int64_t task = 0; run && task < tasks; ++task) localattn::run_task(call, task, tasks);
  if (run == 2) std::raise(SIGUSR1);
  std::printf("%s\n", localattn::instruction_set());
}
