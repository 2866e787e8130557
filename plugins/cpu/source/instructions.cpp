// The choice of the kernels for this processor.
//
// No source file of this folder needs more than `-std=c++17 -O3`: those for one instruction set turn it on themselves.
#include "instructions.h"

#include <cstdlib>
#include <cstring>

namespace localattn {
namespace {

struct InstructionSet {
  const char* name;
  const Functions* functions;
  bool usable;
};

const InstructionSet& choice() {
  static const InstructionSet& chosen = []() -> const InstructionSet& {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    static const InstructionSet sets[] = {
#if defined(__x86_64__)
        {"avx512", &avx512::functions, has_avx512},
        {"avx2", &avx2::functions, has_avx2},
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
