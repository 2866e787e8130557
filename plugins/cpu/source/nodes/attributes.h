// A node's attributes, and small inputs that are read as floats.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/half.h"
#include "onnxruntime/tensors.h"

namespace localattn {

// Throws if an attribute was not there. onnxruntime's own message would not name it.
inline void demand(const OrtApi* api, const char* op, OrtStatus* status, const char* name, const char* what) {
  if (status == nullptr) return;
  ort::ReleaseStatus(api, status);
  refuse(op, ": attribute ", name, " is missing or is not ", what);
}

inline float number_attribute(const OrtApi* api, const char* op, const OrtKernelInfo* info, const char* name) {
  float value = 0;
  demand(api, op, ort::KernelInfoGetAttribute_float(api, info, name, &value), name, "a number");
  if (!std::isfinite(value)) refuse(op, ": attribute ", name, " is not finite");
  return value;
}

inline float softcap_attribute(const OrtApi* api, const char* op, const OrtKernelInfo* info) {
  const float softcap = number_attribute(api, op, info, "softcap");
  if (softcap <= 0) refuse(op, ": attribute softcap is ", softcap, "; it must be above 0");
  return softcap;
}

inline std::vector<float> as_floats(const Tensor& tensor, Element element) {
  std::vector<float> floats(static_cast<size_t>(elements(tensor.dims)));
  for (size_t i = 0; i < floats.size(); ++i) {
    floats[i] = element == Element::fp32 ? tensor.floats()[i] : widen(static_cast<const uint16_t*>(tensor.data)[i]);
  }
  return floats;
}

}  // namespace localattn
