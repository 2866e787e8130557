// The kernels for x86-64 processors with AVX2, FMA and F16C.
#if defined(__x86_64__)

#include "instructions/before_kernels.h"

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace localattn {
namespace avx2 {

constexpr int kLanes = 8;
constexpr int kGroup = 6;   // times kWide sums, of 16 registers
constexpr int kSingle = 8;  // the same for one vector of queries
constexpr int kWide = 2;
constexpr int kNarrow = 2;
constexpr int kValueRows = 4;  // times kValueVectors sums of values
constexpr int kValueVectors = 3;

typedef float Vector __attribute__((vector_size(4 * kLanes)));

inline Vector widen_vector(const uint16_t* from) {
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void narrow_vector(uint16_t* to, Vector x) {
  const __m128i halves = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

#include "instructions/kernels.inl"

}  // namespace avx2
}  // namespace localattn

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
