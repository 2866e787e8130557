// The choice of the kernels for this processor.
//
// No source file of this folder needs more than `-std=c++17 -O3`: those for one instruction set turn it on themselves.
#include "instructions/instructions.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace localattn {
namespace {

#if defined(__x86_64__)
// The features that this processor has and the system saves for threads. Read from the processor, because the
// compiler's
// `__builtin_cpu_supports` answers no to everything where its runtime library has a stand-in for it, as Zig's has.
struct Features {
  bool avx2 = false;
  bool avx512 = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c & bit_FMA, f16c = c & bit_F16C, avx = c & bit_AVX;
    if (!(c & bit_OSXSAVE) || !avx || !fma || !f16c) return;
    const unsigned saved = saved_registers();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    avx2 = (saved & kYmm) == kYmm && b & bit_AVX2;
    avx512 = avx2 && (saved & kZmm) == kZmm && (b & kAvx512) == kAvx512;
  }

 private:
  static constexpr unsigned kYmm = 0x06;         // SSE's registers, and the upper halves of AVX's
  static constexpr unsigned kZmm = kYmm | 0xe0;  // and masks, and what AVX-512 adds

  // The lower half of XCR0.
  static unsigned saved_registers() {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
  }
};
#endif

struct InstructionSet {
  const char* name;
  const Functions* functions;
  bool usable;
};

const InstructionSet& choice() {
  static const InstructionSet& chosen = []() -> const InstructionSet& {
#if defined(__x86_64__)
    const Features has;
#endif
    static const InstructionSet sets[] = {
#if defined(__x86_64__)
        {"avx512", &avx512::functions, has.avx512},
        {"avx2", &avx2::functions, has.avx2},
#elif defined(__aarch64__)
        {"neon", &neon::functions, true},
#endif
        {"baseline", &baseline::functions, true},
    };
    const char* wanted = std::getenv("LOCALATTN_CPU_ISA");
    const InstructionSet* best = nullptr;
    for (const InstructionSet& candidate : sets) {
      if (!candidate.usable) continue;
      if (!best) best = &candidate;
      if (wanted && std::strcmp(wanted, candidate.name) == 0) best = &candidate;
    }
    return *best;
  }();
  return chosen;
}

}  // namespace

const Functions& instructions() { return *choice().functions; }

const char* instruction_set() { return choice().name; }

}  // namespace localattn
