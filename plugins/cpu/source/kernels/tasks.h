// Sizes: how much is a task, and rounding up.
#pragma once

#include <cstdint>

namespace localattn {

// So many tasks a thread even out what one thread is slower than another.
constexpr int64_t kTasksPerThread = 4;

inline int64_t divide_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }
inline int64_t align(int64_t size, int64_t unit) { return divide_up(size, unit) * unit; }

}  // namespace localattn
