#include "scratch.h"

#include <stdlib.h>

namespace localattn {
namespace {

// Floats that a thread keeps: heads of up to 512 channels need no more.
constexpr size_t kMostKept = size_t{1} << 18;

float* allocate(size_t floats) {
  return static_cast<float*>(aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
}

struct Memory {
  float* data = nullptr;
  size_t size = 0;
  ~Memory() { free(data); }
};

float* kept(size_t floats) {
  static thread_local Memory memory;
  if (floats > memory.size) {
    free(memory.data);
    memory.data = allocate(floats);
    memory.size = memory.data ? floats : 0;
  }
  return memory.data;
}

}  // namespace

Scratch::Scratch(size_t floats) : kept_(floats <= kMostKept), data_(kept_ ? kept(floats) : allocate(floats)) {}

Scratch::~Scratch() {
  if (!kept_) free(data_);
}

}  // namespace localattn
