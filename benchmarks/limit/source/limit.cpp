// The processor's own peak: independent multiply-adds that never leave the registers; and one pass over three arrays
// that are read and one that is written, as attention reads its inputs and writes its output.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define LIMIT_API extern "C" __attribute__((visibility("default")))

namespace {

struct Loops {
  int floats;  // that a round of multiply-adds computes
  float (*multiply_add)(int64_t rounds, float factor, float term);
  void (*pass)(const float* a, const float* b, const float* c, float* to, int64_t first, int64_t end);
};

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
constexpr int kLanes = 16, kSums = 24;
#include "loops.inl"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
constexpr int kLanes = 8, kSums = 12;
#include "loops.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#elif defined(__aarch64__)
namespace neon {
constexpr int kLanes = 4, kSums = 24;
#include "loops.inl"
}  // namespace neon
#endif
namespace baseline {
constexpr int kLanes = 4, kSums = 12;
#include "loops.inl"
}  // namespace baseline

const Loops* loops_of(const char* set) {
#if defined(__x86_64__)
  if (std::strcmp(set, "avx512") == 0) return &avx512::loops;
  if (std::strcmp(set, "avx2") == 0) return &avx2::loops;
#elif defined(__aarch64__)
  if (std::strcmp(set, "neon") == 0) return &neon::loops;
#endif
  return std::strcmp(set, "baseline") == 0 ? &baseline::loops : nullptr;
}

template <typename Work>
void on_threads(int count, const Work& work) {
  std::vector<std::thread> others;
  for (int i = 1; i < count; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& thread : others) thread.join();
}

volatile float kept;  // so that nothing is left out

}  // namespace

// Operations, a multiplication and an addition each, of `rounds` rounds on every thread; 0: no such instruction set.
LIMIT_API double localattn_multiply_add(const char* set, int64_t rounds, int threads) {
  const Loops* loops = loops_of(set);
  if (!loops) return 0;
  // Read at run time, lest the compiler computes the sums.
  volatile float factor = 0.999f, term = 0.001f;
  const float factors = factor, terms = term;
  on_threads(threads, [&](int) { kept = loops->multiply_add(rounds, factors, terms); });
  return 2.0 * static_cast<double>(loops->floats) * static_cast<double>(rounds) * threads;
}

// to = a + b + c, each of `count` floats, `times` times; every thread has a part of its own. 0: no such set.
LIMIT_API int localattn_pass(const char* set, const float* a, const float* b, const float* c, float* to, int64_t count,
                             int64_t times, int threads) {
  const Loops* loops = loops_of(set);
  if (!loops) return 0;
  on_threads(threads, [=](int thread) {
    for (int64_t i = 0; i < times; ++i)
      loops->pass(a, b, c, to, count * thread / threads, count * (thread + 1) / threads);
  });
  return 1;
}
