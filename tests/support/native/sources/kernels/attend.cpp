// Runs the CPU kernel on the cases of a file, on threads of its own, and writes what it made.
//
//   attend CASES OUTPUTS    every case: a Header, then query, key, value, mask, bias and sinks as it has them
//   attend --half IN OUT    all halves as floats, and then the floats of a file as halves
//
// Outputs begin as NaN. What it prints, `runCases` says.
#include "kernels/attention/attention.h"
#include "cases.h"
#include "kernels/half.h"

#include <string>

namespace {

struct Header {
  int64_t element, sequenceFirst, batch, heads, kvHeads, length, headDim;
  int64_t window, backward, forward, causal, exact;
  int64_t shared, mask, bias, biasElement, sinks, threads, naive;
  double scale, softcap, xposBase;
};

size_t sizeOf(int64_t element) { return element == 0 ? 4 : 2; }

localattn::Layout layoutOf(Header const& h, int64_t heads) {
  int64_t const head = h.headDim;
  if (h.sequenceFirst) {
    return {heads * h.length * head, head, heads * head};
  }
  return {heads * h.length * head, h.length * head, head};
}

int64_t run(localattn::Call const& call, int64_t threads) {
  int64_t const tasks = localattn::count_tasks(call, threads);
  onThreads(threads, tasks, [&](int64_t task) { localattn::run_task(call, task, tasks); });
  return tasks;
}

int64_t attend(Header const& h, std::ifstream& in, std::ofstream& out) {
  size_t const count = static_cast<size_t>(h.batch * h.heads * h.length * h.headDim);
  size_t const bytes = count * sizeOf(h.element);
  int64_t const width = (h.backward + 1 + h.forward) * h.window;
  auto const query = read(in, bytes);
  size_t const keyBytes = static_cast<size_t>(h.batch * h.kvHeads * h.length * h.headDim) * sizeOf(h.element);
  auto const key = read(in, keyBytes);
  auto const value = read(in, keyBytes);
  auto const mask = read(in, h.mask ? static_cast<size_t>(h.batch * h.length) : 0);
  auto const bias = read(in, h.bias ? static_cast<size_t>(h.heads * h.window * width) * sizeOf(h.biasElement) : 0);
  auto const sinks = read(in, h.sinks ? static_cast<size_t>(h.heads) * sizeof(float) : 0);
  auto const output = nothing(bytes);

  localattn::Call call{};
  call.query = query.get();
  call.key = key.get();
  call.value = value.get();
  call.output = output.get();
  call.element = static_cast<localattn::Element>(h.element);
  call.layout = layoutOf(h, h.heads);
  call.key_layout = layoutOf(h, h.kvHeads);
  call.batch = h.batch;
  call.heads = h.heads;
  call.kv_heads = h.kvHeads;
  call.length = h.length;
  call.head_dim = h.headDim;
  call.window = {h.window, h.backward, h.forward, h.causal != 0, h.exact != 0};
  call.scale = static_cast<float>(h.scale);
  call.shared_qk = h.shared != 0;
  call.key_mask = h.mask ? reinterpret_cast<uint8_t const*>(mask.get()) : nullptr;
  call.attn_bias = h.bias ? bias.get() : nullptr;
  call.sinks = h.sinks ? reinterpret_cast<float const*>(sinks.get()) : nullptr;
  call.softcap = static_cast<float>(h.softcap);
  call.xpos_scale_base = static_cast<float>(h.xposBase);
  call.bias_element = static_cast<localattn::Element>(h.biasElement);
  int64_t tasks = 0;
  if (h.naive) {
    localattn::attention_naive(call);
  } else {
    tasks = run(call, h.threads);
  }
  out.write(output.get(), static_cast<std::streamsize>(bytes));
  return tasks;
}

int convertHalves(char const* from, char const* to) {
  std::ifstream in(from, std::ios::binary);
  std::ofstream out(to, std::ios::binary);
  for (uint32_t half = 0; half < 65536; ++half) {
    float const wide = localattn::widen(static_cast<uint16_t>(half));
    out.write(reinterpret_cast<char const*>(&wide), sizeof wide);
  }
  float wide = 0;
  while (in.read(reinterpret_cast<char*>(&wide), sizeof wide)) {
    uint16_t const half = localattn::narrow(wide);
    out.write(reinterpret_cast<char const*>(&half), sizeof half);
  }
  return out.flush() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--half") {
    return convertHalves(argv[2], argv[3]);
  }
  if (argc != 3) {
    return 2;
  }
  return runCases<Header>(argv[1], argv[2], attend);
}
