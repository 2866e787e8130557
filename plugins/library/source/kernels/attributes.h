// The op types, and the attributes of a node: read from TensorRT's plugin fields, checked, and written back as fields.
#pragma once

#include "kernels/kernels.h"

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace localattn {

// Nodes of core/nodes/attention.py, of core/nodes/grouped.py with a window or without, and of core/nodes/aft.py.
enum class Family : int32_t { kWINDOWED, kGROUPED, kGLOBAL, kAFT };

// One op type, with the options of its kernels but shared_qk, which an attribute tells.
struct OpType {
  char const* name;
  Family family;
  Options options;

  // Heads share heads of keys, and there is no shared_qk.
  bool grouped() const { return family == Family::kGROUPED || seesAll(); }
  // There is no window.
  bool seesAll() const { return family == Family::kGLOBAL; }
  int32_t inputs() const { return options.inputs(); }
  // Dimensions of the first input; which input tells the sizes that the first does not; which one is the mask.
  int32_t rank() const { return options.aft ? 3 : 4; }
  int32_t sizedBy() const { return options.aft ? 3 : 1; }
  int32_t maskAt() const { return options.aft ? 4 : 3; }
};

// Every op type that the kernels compute.
std::vector<OpType> const& opTypes();

// Reads a finite float from the fields; false, with the reason in `why`, if there is none.
bool readFloat(nvinfer1::PluginFieldCollection const& fields, char const* name, float& value, std::string& why);
// The same of the softcap, which must be above 0.
bool readSoftcap(nvinfer1::PluginFieldCollection const& fields, float& value, std::string& why);

// Bits of the kernel's argument `flags`.
constexpr int32_t kCAUSAL = 1;
constexpr int32_t kEXACT = 2;
constexpr int32_t kSEQUENCE_FIRST = 4;

// Kept in the types that the fields have, so that serialising hands out pointers to them.
struct Attributes {
  int32_t windowSize{0};  // 0: as long as the sequence
  int32_t lookBackward{0};
  int32_t lookForward{0};
  int32_t causal{0};
  int32_t exactWindowsize{0};
  float scale{0.F};
  int32_t sharedQk{0};
  std::array<int32_t, 4> perm{{0, 2, 1, 3}};  // to [B, H, N, D]
  float softcap{0.F};
  float xposScaleBase{0.F};

  // Reads the fields of an op type; fields of other names are passed over. False, with the reason in `why`, if one is
  // missing or has a value that the node's definition does not allow.
  bool read(OpType const& opType, nvinfer1::PluginFieldCollection const& fields, std::string& why);

  // The fields of an op type; they point into this object.
  std::vector<nvinfer1::PluginField> fields(OpType const& opType) const;

  bool seesAll() const { return windowSize == 0; }
  bool sequenceFirst() const { return perm[1] == 2; }
  int32_t flags() const;
  int64_t keysPerWindow() const;
  std::string describe() const;
};

}  // namespace localattn
