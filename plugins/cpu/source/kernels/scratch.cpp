#include "kernels/scratch.h"

#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
#else
#include <sys/mman.h>
#endif

namespace localattn {
namespace {

// Floats that a thread keeps, 1 MiB: heads of up to 1000 channels need no more.
constexpr size_t kMostKept = size_t{1} << 18;

#if defined(_WIN32)
// Windows' C library gives blocks of this size back to the system as they are freed.
float* allocate(size_t floats) { return static_cast<float*>(_aligned_malloc(floats * sizeof(float), 64)); }
void release(float* data) { _aligned_free(data); }
float* map(size_t bytes) { return allocate(bytes / sizeof(float)); }
void unmap(float* data, size_t) { release(data); }
#else
float* allocate(size_t floats) {
  return static_cast<float*>(aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
}
void release(float* data) { free(data); }

// From the system itself: the C library would keep what is freed, for the next call.
float* map(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : static_cast<float*>(pages);
}
void unmap(float* data, size_t bytes) { munmap(data, bytes); }
#endif

struct Kept {
  float* data = nullptr;
  size_t size = 0;
  ~Kept() { release(data); }
};

float* keep(size_t floats) {
  static thread_local Kept kept;
  if (floats > kept.size) {
    release(kept.data);
    kept.data = allocate(floats);
    kept.size = kept.data ? floats : 0;
  }
  return kept.data;
}

}  // namespace

Memory::Memory(size_t floats)
    : mapped_(floats > kMostKept ? floats * sizeof(float) : 0),
      data_(mapped_  ? map(mapped_)
            : floats ? allocate(floats)
                     : nullptr) {}

Memory::~Memory() {
  if (!mapped_) {
    release(data_);
  } else if (data_) {
    unmap(data_, mapped_);
  }
}

Scratch::Scratch(size_t floats)
    : own_(floats > kMostKept ? floats : 0), data_(floats > kMostKept ? own_.data() : keep(floats)) {}

}  // namespace localattn
