// The attributes of a node, read from TensorRT's plugin fields, checked, and written back as fields.
#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <string>

namespace localattn {

constexpr int32_t kFIELD_COUNT = 8;

// Bits of the kernel's argument `flags`.
constexpr int32_t kCAUSAL = 1;
constexpr int32_t kEXACT = 2;
constexpr int32_t kSHARED_QK = 4;
constexpr int32_t kSEQUENCE_FIRST = 8;

// Kept in the types that the fields have, so that serialising hands out pointers to them.
struct Attributes {
  int32_t windowSize{0};
  int32_t lookBackward{0};
  int32_t lookForward{0};
  int32_t causal{0};
  int32_t exactWindowsize{0};
  float scale{0.F};
  int32_t sharedQk{0};
  std::array<int32_t, 4> perm{{0, 2, 1, 3}};  // to [B, H, N, D]

  // Reads all fields; fields of other names are passed over. False, with the reason in `why`, if one is missing or
  // has a value that the node's definition does not allow.
  bool read(nvinfer1::PluginFieldCollection const& fields, std::string& why);

  // Fields that point into this object.
  std::array<nvinfer1::PluginField, kFIELD_COUNT> fields() const;

  bool sequenceFirst() const { return perm[1] == 2; }
  int32_t flags() const;
  int64_t keysPerWindow() const;
  std::string describe() const;
};

}  // namespace localattn
