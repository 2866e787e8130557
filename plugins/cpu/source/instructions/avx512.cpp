// The kernels for x86-64 processors with AVX-512.
#if defined(__x86_64__)

#include "instructions/before_kernels.h"

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace localattn {
namespace avx512 {

constexpr int kLanes = 16;
constexpr int kGroup = 8;    // times kWide sums, of 32 registers
constexpr int kSingle = 16;  // the same for one vector of queries
constexpr int kWide = 2;
constexpr int kNarrow = 1;
constexpr int kValueRows = 4;  // times kValueVectors sums of values
constexpr int kValueVectors = 4;

typedef float Vector __attribute__((vector_size(4 * kLanes)));

inline Vector widen_vector(const uint16_t* from) {
  return (Vector)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void narrow_vector(uint16_t* to, Vector x) {
  const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

#include "instructions/kernels.inl"

}  // namespace avx512
}  // namespace localattn

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
