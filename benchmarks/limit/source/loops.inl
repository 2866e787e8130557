// The two loops for one instruction set. Included inside its namespace, after kLanes and kSums: so many independent
// sums as keep every multiply-add unit busy for its latency, and still fit into registers.

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float Anywhere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

#if defined(__clang__)
#define LIMIT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LIMIT_UNROLL _Pragma("GCC unroll 32")
#endif

// sum = sum · factor + term, `rounds` times for each of kSums vectors. Returns something of all sums.
inline float multiply_add(int64_t rounds, float factor, float term) {
  const Vector factors = factor - Vector{}, terms = term - Vector{};
  Vector sums[kSums];
  LIMIT_UNROLL
  for (int i = 0; i < kSums; ++i) sums[i] = static_cast<float>(i) - Vector{};
  for (int64_t round = 0; round < rounds; ++round) {
    LIMIT_UNROLL
    for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * factors + terms;
  }
  Vector all = {};
  LIMIT_UNROLL
  for (int i = 0; i < kSums; ++i) all += sums[i];
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += all[lane];
  return total;
}

// to = a + b + c, elements [first, end).
inline void pass(const float* a, const float* b, const float* c, float* to, int64_t first, int64_t end) {
  const auto at = [](const float* data) { return *reinterpret_cast<const Anywhere*>(data); };
  int64_t i = first;
  for (; i + kLanes <= end; i += kLanes) *reinterpret_cast<Anywhere*>(to + i) = at(a + i) + at(b + i) + at(c + i);
  for (; i < end; ++i) to[i] = a[i] + b[i] + c[i];
}

#undef LIMIT_UNROLL

constexpr Loops loops = {kLanes * kSums, multiply_add, pass};
