#include "scratch.h"

#include <stdlib.h>

namespace localattn {
namespace {

struct Memory {
  float* data = nullptr;
  size_t size = 0;
  ~Memory() { free(data); }
};

}  // namespace

float* scratch(size_t floats) {
  static thread_local Memory memory;
  if (floats > memory.size) {
    free(memory.data);
    memory.data = static_cast<float*>(aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
    memory.size = memory.data ? floats : 0;
  }
  return memory.data;
}

}  // namespace localattn
