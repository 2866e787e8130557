// Sizes: what is a task, and rounding up.
#pragma once

#include <cstdint>

namespace localattn {

// Rows, or elements, or other parts [first, end) of a call.
struct Range {
  int64_t first;
  int64_t end;
};

// So many tasks a thread even out what one thread is slower than another.
constexpr int64_t kTasksPerThread = 4;
// So many numbers are worth a task of their own.
constexpr int64_t kSmallestTask = 16384;

inline int64_t divide_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }
inline int64_t align(int64_t size, int64_t unit) { return divide_up(size, unit) * unit; }

}  // namespace localattn
