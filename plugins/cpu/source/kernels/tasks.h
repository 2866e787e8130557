// Sizes: what is a task, and rounding up.
#pragma once

#include <cstdint>

namespace localattn {

// Rows, or elements, or other parts [first, end) of a call.
struct Range {
  int64_t first;
  int64_t end;
};

// Tasks per thread: enough to balance faster and slower threads.
constexpr int64_t kTasksPerThread = 4;
// Numbers that are enough work for one task.
constexpr int64_t kSmallestTask = 16384;

inline int64_t divide_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }
inline int64_t align(int64_t size, int64_t unit) { return divide_up(size, unit) * unit; }

}  // namespace localattn
