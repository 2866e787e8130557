// The kernels for any processor: vectors of four floats, which every 64-bit one has.
#include "instructions/before_kernels.h"

namespace localattn {
namespace baseline {

constexpr int kLanes = 4;
constexpr int kGroup = 4;   // times kWide sums, of 16 registers
constexpr int kSingle = 8;  // the same for one vector of queries
constexpr int kWide = 2;
constexpr int kNarrow = 2;
constexpr int kValueRows = 4;  // times kValueVectors sums of values
constexpr int kValueVectors = 2;

typedef float Vector __attribute__((vector_size(4 * kLanes)));

inline Vector widen_vector(const uint16_t* from) {
  return Vector{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}
inline void narrow_vector(uint16_t* to, Vector x) {
  for (int i = 0; i < kLanes; ++i) to[i] = narrow(x[i]);
}

#include "instructions/kernels.inl"

}  // namespace baseline
}  // namespace localattn
