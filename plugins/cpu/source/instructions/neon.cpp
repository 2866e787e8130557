// The kernels for 64-bit ARM processors, all of which have NEON.
#if defined(__aarch64__)

#include "instructions/before_kernels.h"

#include <arm_neon.h>

namespace localattn {
namespace neon {

constexpr int kLanes = 4;
constexpr int kGroup = 6;   // times kWide sums, of 32 registers
constexpr int kSingle = 6;  // the same for one vector of queries
constexpr int kWide = 4;
constexpr int kNarrow = 4;
constexpr int kValueRows = 4;  // times kValueVectors sums of values
constexpr int kValueVectors = 4;

typedef float Vector __attribute__((vector_size(4 * kLanes)));

inline Vector widen_vector(const uint16_t* from) { return (Vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
inline void narrow_vector(uint16_t* to, Vector x) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x))); }

#include "instructions/kernels.inl"

}  // namespace neon
}  // namespace localattn
#endif
