// Cutting a call into tasks, and the choice of the kernel for this processor.
//
// No source file of this folder needs more than `-std=c++17 -O3`: those for one instruction set turn it on themselves.
#include "rows.h"
#include "window.h"

#include <cstdlib>
#include <cstring>

namespace localattn {
namespace {

// Tasks begin at multiples of this, so that the rows that are computed together, and with them the numbers, do not
// depend on how many tasks there are.
constexpr int64_t kAlignment = 64;
// A task's queries and sums have to stay in the second level cache beside the keys it is at: in elements.
constexpr int64_t kLargestTask = 512 * 64;
// So many tasks a thread even out what one thread is slower than another.
constexpr int64_t kTasksPerThread = 4;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t align(int64_t rows) { return divide_up(rows, kAlignment) * kAlignment; }

struct Kernel {
  const char* name;
  bool (*attend_rows)(const Call&, const Rows&);
  bool usable;
};

// The fastest that this processor has; LOCALATTN_CPU_ISA names a slower one, to test it or to compare.
const Kernel& kernel() {
  static const Kernel& chosen = []() -> const Kernel& {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    static const Kernel kernels[] = {
#if defined(__x86_64__)
        {"avx512", avx512::attend_rows, has_avx512},
        {"avx2", avx2::attend_rows, has_avx2},
#elif defined(__aarch64__)
        {"neon", neon::attend_rows, true},
#endif
        {"baseline", baseline::attend_rows, true},
    };
    const char* wanted = std::getenv("LOCALATTN_CPU_ISA");
    const Kernel* best = nullptr;
    for (const Kernel& candidate : kernels) {
      if (!candidate.usable) continue;
      if (!best) best = &candidate;
      if (wanted && std::strcmp(wanted, candidate.name) == 0) best = &candidate;
    }
    return *best;
  }();
  return chosen;
}

}  // namespace

int64_t count_tasks(const Call& call, int64_t threads) {
  const int64_t heads = call.batch * call.heads;
  if (heads == 0 || call.length == 0 || call.head_dim == 0) return 0;
  const int64_t wanted = align(divide_up(heads * call.length, kTasksPerThread * std::max<int64_t>(threads, 1)));
  const int64_t most = std::max(kLargestTask / call.head_dim / kAlignment, int64_t{1}) * kAlignment;
  return heads * divide_up(call.length, std::min(wanted, most));
}

void run_task(const Call& call, int64_t task, int64_t tasks) {
  const int64_t parts = tasks / (call.batch * call.heads);
  const int64_t size = align(divide_up(call.length, parts));
  // Heads come first: in [B, N, H, D] those of one row share pages of memory, whose addresses are then still known.
  const int64_t first = task / call.heads % parts * size;
  const Rows rows{task / call.heads / parts, task % call.heads, first, std::min(first + size, call.length)};
  if (rows.first >= rows.end) return;
  if (!kernel().attend_rows(call, rows)) attend_rows_naive(call, rows);
}

const char* instruction_set() { return kernel().name; }

}  // namespace localattn
