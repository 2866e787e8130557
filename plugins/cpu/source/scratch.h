// Memory that a thread keeps from one task to the next, and gives back when it ends.
#pragma once

#include <cstddef>

namespace localattn {

// This thread's memory: at least so many floats, from a multiple of 64 bytes on, with any content. Null if there is
// none to be had.
float* scratch(size_t floats);

}  // namespace localattn
