// Vectors of kLanes floats in GCC's and Clang's common notation. Included by the file of an instruction set, inside its
// namespace, after Vector, kLanes and the two conversions of vectors of fp16.

typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
// The same in memory that is accessed as floats, integers or bytes too; aligned, and not.
typedef float Aligned __attribute__((vector_size(4 * kLanes), may_alias));
typedef float Anywhere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t AlignedIntegers __attribute__((vector_size(4 * kLanes), may_alias));

#if defined(__clang__)
#define LOCALATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LOCALATTN_UNROLL _Pragma("GCC unroll 16")
#endif

// For functions of a few vectors: from some number of uses on, compilers make calls of them, and GatedGelu took two
// thirds more instructions.
#define LOCALATTN_INLINE inline __attribute__((always_inline))

inline Vector splat(float x) { return x - Vector{}; }
inline Vector load(const float* from) { return *reinterpret_cast<const Aligned*>(from); }
inline Integers load(const int32_t* from) { return *reinterpret_cast<const AlignedIntegers*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Aligned*>(to) = x; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }  // b if either is NaN

// 2^x for x ≤ 0, zero below 2^-126, NaN of NaN; relative error below 2e-7. 2^x = 2^n · 2^f with n the nearest whole
// number; for 2^f on [-1/2, 1/2] the polynomial of least relative error with p(0) = 1 (Remez). Adding 1.5 · 2^23 + 127
// rounds to n and leaves n + 127 in the lowest bits, the exponent of 2^n. That is a factor, not added to the exponent
// of 2^f: of a NaN the sum would be a number.
LOCALATTN_INLINE Vector exp2_of(Vector x) {
  const Vector rounding = splat(12583039.0f);
  const Vector shifted = x + rounding;
  const Vector f = x - (shifted - rounding);
  Vector p = splat(0x1.5bba14p-10f) * f + 0x1.3cea88p-7f;
  p = p * f + 0x1.c6b752p-5f;
  p = p * f + 0x1.ebf9bcp-3f;
  p = p * f + 0x1.62e42ap-1f;
  p = p * f + 1.0f;
  const Bits power = reinterpret_cast<Bits>(shifted) << 23;
  return x < -126.0f ? Vector{} : p * reinterpret_cast<Vector>(power);
}

// 2^x for x ≤ 127, and 2^127 above; as exact as exp2_of.
inline Vector power_of(Vector x) { return exp2_of(x < 127.0f ? x : splat(127.0f)); }

// tanh(x), relative error below 4e-7; NaN of NaN. Up to 1 a Padé approximant, from there on (1 - e^-2x) / (1 + e^-2x),
// where nothing cancels.
LOCALATTN_INLINE Vector relative_tanh_of(Vector x) {
  const Vector size = x < 0.0f ? -x : x;
  const Vector square = x * x;
  const Vector near = size * ((square + 105.0f) * square + 945.0f) / ((square * 15.0f + 420.0f) * square + 945.0f);
  const Vector power = exp2_of(size * -2.88539008177792681472f);
  const Vector result = size < 1.0f ? near : (1.0f - power) / (1.0f + power);
  return x < 0.0f ? -result : result;
}

// Lane l of the result is lane `l` of `a`, or of `b` from kLanes on, as the indices say.
#if defined(__clang__)
template <int... kIndex>
inline Vector shuffle(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, kIndex...);
}
#else
template <int... kIndex>
inline Vector shuffle(Vector a, Vector b) {
  return __builtin_shuffle(a, b, Integers{kIndex...});
}
#endif

// Neighbouring lanes change places.
template <int... kLane>
inline Vector swap_neighbours(Vector x, std::integer_sequence<int, kLane...>) {
  return shuffle<(kLane ^ 1)...>(x, x);
}
inline Vector swap_neighbours(Vector x) { return swap_neighbours(x, std::make_integer_sequence<int, kLanes>{}); }

// Exchanges the two off-diagonal quarters of every square of 2·kHalf rows and lanes.
template <int kHalf, int... kLane>
inline void exchange(Vector* rows, std::integer_sequence<int, kLane...>) {
  LOCALATTN_UNROLL
  for (int i = 0; i < kLanes; ++i) {
    if (i & kHalf) continue;
    const Vector a = rows[i];
    const Vector b = rows[i | kHalf];
    rows[i] = shuffle<(kLane & kHalf ? kLanes + kLane - kHalf : kLane)...>(a, b);
    rows[i | kHalf] = shuffle<(kLane & kHalf ? kLanes + kLane : kLane + kHalf)...>(a, b);
  }
}

// rows[i][j] and rows[j][i] change places.
inline void transpose(Vector* rows) {
  const std::make_integer_sequence<int, kLanes> lanes{};
  if constexpr (kLanes > 8) exchange<8>(rows, lanes);
  if constexpr (kLanes > 4) exchange<4>(rows, lanes);
  exchange<2>(rows, lanes);
  exchange<1>(rows, lanes);
}

// Lanes that lie kHalf apart are added up: those of `a` where the lane's bit kHalf is 0, of `b` where it is 1.
template <int kHalf, int... kLane>
inline Vector fold_pair(Vector a, Vector b, std::integer_sequence<int, kLane...>) {
  return shuffle<(kLane & kHalf ? kLanes + kLane - kHalf : kLane)...>(a, b) +
         shuffle<(kLane & kHalf ? kLanes + kLane : kLane + kHalf)...>(a, b);
}
template <int kHalf>
inline Vector fold_pair(Vector a, Vector b) {
  return fold_pair<kHalf>(a, b, std::make_integer_sequence<int, kLanes>{});
}

// The lanes of kCount vectors, added up until one vector is left: its lane l is part of the sum of vector l % kCount,
// and all of it if there are kLanes vectors.
template <int kCount>
inline Vector fold_lanes(Vector* rows) {
  if constexpr (kCount == 1) {
    return rows[0];
  } else {
    constexpr int kHalf = kCount / 2;
    LOCALATTN_UNROLL
    for (int i = 0; i < kHalf; ++i) rows[i] = fold_pair<kHalf>(rows[i], rows[i + kHalf]);
    return fold_lanes<kHalf>(rows);
  }
}

// All lanes added up.
inline float add_up(Vector x) {
  if constexpr (kLanes > 8) x = fold_pair<8>(x, x);
  if constexpr (kLanes > 4) x = fold_pair<4>(x, x);
  x = fold_pair<2>(x, x);
  return fold_pair<1>(x, x)[0];
}

// kLanes elements of a tensor as floats, and back.
inline Vector load_elements(const float* from) { return *reinterpret_cast<const Anywhere*>(from); }
inline Vector load_elements(const uint16_t* from) { return widen_vector(from); }
inline void store_elements(float* to, Vector x) { *reinterpret_cast<Anywhere*>(to) = x; }
inline void store_elements(uint16_t* to, Vector x) { narrow_vector(to, x); }
inline float widen_element(float x) { return x; }
inline float widen_element(uint16_t x) { return widen(x); }

// The first `count` ≤ kLanes of them; the rest are zeros, or stay as they are.
template <typename Number>
inline Vector load_some(const Number* from, int64_t count) {
  Number whole[kLanes] = {};
  std::memcpy(whole, from, static_cast<size_t>(count) * sizeof(Number));
  return load_elements(whole);
}
template <typename Number>
inline void store_some(Number* to, Vector x, int64_t count) {
  Number whole[kLanes];
  store_elements(whole, x);
  std::memcpy(to, whole, static_cast<size_t>(count) * sizeof(Number));
}

// Whether no number is infinite or NaN; `count` is a multiple of kLanes.
inline bool all_finite(const float* numbers, int64_t count) {
  Vector sums[4] = {};  // zero as long as they are
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    LOCALATTN_UNROLL
    for (int j = 0; j < 4; ++j) sums[j] += load_elements(numbers + i + j * kLanes) * 0.0f;
  }
  for (; i < count; i += kLanes) sums[0] += load_elements(numbers + i) * 0.0f;
  const Vector sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (sum[lane] != 0.0f) return false;
  }
  return true;
}

// A row of `count` elements as floats, then zeros up to `width`, a multiple of kLanes.
template <typename Number>
inline void copy_row(float* to, const Number* from, int64_t count, int64_t width) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) store(to + c, load_elements(from + c));
  if (c < count) {
    store(to + c, load_some(from + c, count - c));
    c += kLanes;
  }
  for (; c < width; c += kLanes) store(to + c, Vector{});
}
