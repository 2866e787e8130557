// Cutting a call of the attention into tasks.
#include "instructions/instructions.h"
#include "kernels/tasks.h"
#include "kernels/attention/window.h"

namespace localattn {
namespace {

// Tasks begin at multiples of this, so that the rows that are computed together, and with them the numbers, do not
// depend on how many tasks there are.
constexpr int64_t kAlignment = 64;
// A task's queries and sums have to stay in the second level cache beside the keys it is at: in elements.
constexpr int64_t kLargestTask = 512 * 64;
// Scratch that a task may take however small the tensors are: 4 MiB.
constexpr int64_t kFreeFloats = int64_t{1} << 20;

// The scratch of a task in floats: beyond what is free, all tasks together may take twice the tensors' size.
int64_t most_floats(const Call& call, int64_t tasks) {
  const int64_t elements = 4 * call.batch * call.heads * call.length * call.head_dim;
  return kFreeFloats + (call.element == Element::fp32 ? 2 : 1) * elements / tasks;
}

}  // namespace

int64_t count_tasks(const Call& call, int64_t threads) {
  if (call.batch == 0 || call.heads == 0 || call.length == 0 || call.head_dim == 0) return 0;
  const int64_t heads = call.batch * call.heads;
  const int64_t wanted =
      align(divide_up(heads * call.length, kTasksPerThread * std::max<int64_t>(threads, 1)), kAlignment);
  const int64_t most = std::max(kLargestTask / call.head_dim / kAlignment, int64_t{1}) * kAlignment;
  return heads * divide_up(call.length, std::min(wanted, most));
}

void run_task(const Call& call, int64_t task, int64_t tasks) {
  const int64_t parts = tasks / (call.batch * call.heads);
  const int64_t size = align(divide_up(call.length, parts), kAlignment);
  // Heads come first: in [B, N, H, D] those of one row share pages of memory, whose addresses are then still known.
  const int64_t first = task / call.heads % parts * size;
  const Rows rows{task / call.heads / parts, task % call.heads, first, std::min(first + size, call.length)};
  if (rows.first >= rows.end) return;
  if (!instructions().attend_rows(call, rows, most_floats(call, tasks))) attend_rows_naive(call, rows);
}

}  // namespace localattn
