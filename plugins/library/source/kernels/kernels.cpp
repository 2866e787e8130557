#include "kernels/kernels.h"

namespace localattn {

char const* elementName(Element element) {
  switch (element) {
    case Element::kFP16: return "fp16";
    case Element::kBF16: return "bf16";
    case Element::kFP32: return "fp32";
    case Element::kFP8: return "fp8";
  }
  return "?";
}

Options optionsOf(int32_t bits) {
  auto const has = [bits](int32_t bit) { return (bits & bit) != 0; };
  return {has(kWITH_MASK), has(kWITH_BIAS),  has(kWITH_XPOS), has(kWITH_SOFTCAP), has(kWITH_SINKS), has(kSHARED_QK),
          has(kOF_AFT),    has(kCAUSAL_AFT), has(kOF_RING),   has(kCHUNKED),      has(kJOINS)};
}

Kernel const* chooseKernel(KernelKey const& key, int32_t capability, int32_t rank) {
  for (size_t i = 0; i < kKERNEL_COUNT; ++i) {
    Kernel const& kernel = kKERNELS[i];
    if (kernel.key == key && !kernel.isPtx && kernel.capability == capability && rank-- == 0) {
      return &kernel;
    }
  }
  // PTX, from the newest that the GPU takes downwards.
  for (int32_t below = capability; below > 0;) {
    Kernel const* newest = nullptr;
    for (size_t i = 0; i < kKERNEL_COUNT; ++i) {
      Kernel const& kernel = kKERNELS[i];
      if (kernel.key == key && kernel.isPtx && kernel.capability <= below &&
          (newest == nullptr || kernel.capability > newest->capability)) {
        newest = &kernel;
      }
    }
    if (newest == nullptr || rank-- == 0) {
      return newest;
    }
    below = newest->capability - 1;
  }
  return nullptr;
}

bool haveKernel(KernelKey const& key) {
  for (size_t i = 0; i < kKERNEL_COUNT; ++i) {
    KernelKey const& own = kKERNELS[i].key;
    if (own == KernelKey{key.element, key.headDim < 0 ? own.headDim : key.headDim, key.options}) {
      return true;
    }
  }
  return false;
}

std::string describeKey(KernelKey const& key) {
  Options const& has = key.options;
  if (has.aft) {
    return std::string(elementName(key.element)) + ", AFT-local" + (has.causal ? ", causal" : "") +
           (has.mask ? ", key mask" : "");
  }
  if (has.joins) {
    return std::string(elementName(key.element)) + ", joining splits of steps";
  }
  char const* const node = !has.ring ? "" : has.chunked ? ", chunk" : ", step";
  std::string const headSize = key.headDim < 0 ? "any head size" : "head size " + std::to_string(key.headDim);
  return std::string(elementName(key.element)) + node + ", " + headSize + (has.mask ? ", key mask" : "") +
         (has.bias ? ", additive bias" : "") + (has.xpos ? ", xpos" : "") + (has.softcap ? ", softcap" : "") +
         (has.sinks ? ", sinks" : "") + (has.sharedQk ? ", shared_qk" : "");
}

std::string howToBuild(KernelKey const& key, int32_t capability) {
  std::string command = "localattn plugin build";
  if (capability > 0) {
    command += " --target sm_" + std::to_string(capability);
  }
  if (key.options.aft || key.options.joins) {
    return command;
  }
  command += std::string(" --dtype ") + elementName(key.element);
  return key.headDim < 0 ? command : command + " --head-dim " + std::to_string(key.headDim);
}

}  // namespace localattn
