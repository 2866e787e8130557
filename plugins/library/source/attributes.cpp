#include "attributes.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace localattn {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

PluginField const* find(nvinfer1::PluginFieldCollection const& fields, char const* name) {
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    if (fields.fields[i].name != nullptr && std::strcmp(fields.fields[i].name, name) == 0) {
      return &fields.fields[i];
    }
  }
  return nullptr;
}

std::string ofField(char const* name) { return std::string("attribute ") + name; }

template <typename Value>
Value at(PluginField const& field, int32_t index) {
  Value value;
  std::memcpy(&value, static_cast<char const*>(field.data) + index * sizeof(Value), sizeof(Value));
  return value;
}

bool readIntegers(nvinfer1::PluginFieldCollection const& fields, char const* name, int32_t count, int32_t least,
                  int32_t most, int32_t* values, std::string& why) {
  PluginField const* field = find(fields, name);
  if (field == nullptr || field->data == nullptr) {
    why = ofField(name) + " is missing";
    return false;
  }
  bool const wide = field->type == PluginFieldType::kINT64;
  if ((!wide && field->type != PluginFieldType::kINT32) || field->length != count) {
    why = ofField(name) + " must be " + std::to_string(count) + " integer(s), int32 or int64";
    return false;
  }
  for (int32_t i = 0; i < count; ++i) {
    int64_t const value = wide ? at<int64_t>(*field, i) : at<int32_t>(*field, i);
    if (value < least || value > most) {
      why = ofField(name) + " is " + std::to_string(value) + "; it must lie in [" + std::to_string(least) + ", " +
            std::to_string(most) + "]";
      return false;
    }
    values[i] = static_cast<int32_t>(value);
  }
  return true;
}

bool readFloat(nvinfer1::PluginFieldCollection const& fields, char const* name, float& value, std::string& why) {
  PluginField const* field = find(fields, name);
  if (field == nullptr || field->data == nullptr) {
    why = ofField(name) + " is missing";
    return false;
  }
  bool const wide = field->type == PluginFieldType::kFLOAT64;
  if ((!wide && field->type != PluginFieldType::kFLOAT32) || field->length != 1) {
    why = ofField(name) + " must be one float";
    return false;
  }
  value = wide ? static_cast<float>(at<double>(*field, 0)) : at<float>(*field, 0);
  if (!std::isfinite(value)) {
    why = ofField(name) + " is not finite";
    return false;
  }
  return true;
}

}  // namespace

bool Attributes::read(nvinfer1::PluginFieldCollection const& fields, std::string& why) {
  constexpr int32_t kMOST = std::numeric_limits<int32_t>::max();
  if (!readIntegers(fields, "window_size", 1, 1, kMOST, &windowSize, why) ||
      !readIntegers(fields, "look_backward", 1, 0, kMOST, &lookBackward, why) ||
      !readIntegers(fields, "look_forward", 1, 0, kMOST, &lookForward, why) ||
      !readIntegers(fields, "causal", 1, 0, 1, &causal, why) ||
      !readIntegers(fields, "exact_windowsize", 1, 0, 1, &exactWindowsize, why) ||
      !readFloat(fields, "scale", scale, why) || !readIntegers(fields, "shared_qk", 1, 0, 1, &sharedQk, why) ||
      !readIntegers(fields, "perm", 4, 0, 3, perm.data(), why)) {
    return false;
  }
  if (causal != 0 && lookForward != 0) {
    why = "attribute look_forward is " + std::to_string(lookForward) + "; a causal window sees nothing ahead";
    return false;
  }
  if (perm != std::array<int32_t, 4>{{0, 2, 1, 3}} && perm != std::array<int32_t, 4>{{0, 1, 2, 3}}) {
    why = "attribute perm must be [0, 2, 1, 3] (inputs [B, N, H, D]) or [0, 1, 2, 3] (inputs [B, H, N, D])";
    return false;
  }
  if (keysPerWindow() + windowSize > kMOST) {
    why = "the window has " + std::to_string(keysPerWindow()) + " keys; positions are 32 bits wide";
    return false;
  }
  return true;
}

std::array<PluginField, kFIELD_COUNT> Attributes::fields() const {
  return {{
      {"window_size", &windowSize, PluginFieldType::kINT32, 1},
      {"look_backward", &lookBackward, PluginFieldType::kINT32, 1},
      {"look_forward", &lookForward, PluginFieldType::kINT32, 1},
      {"causal", &causal, PluginFieldType::kINT32, 1},
      {"exact_windowsize", &exactWindowsize, PluginFieldType::kINT32, 1},
      {"scale", &scale, PluginFieldType::kFLOAT32, 1},
      {"shared_qk", &sharedQk, PluginFieldType::kINT32, 1},
      {"perm", perm.data(), PluginFieldType::kINT32, 4},
  }};
}

int32_t Attributes::flags() const {
  return (causal != 0 ? kCAUSAL : 0) | (exactWindowsize != 0 ? kEXACT : 0) | (sharedQk != 0 ? kSHARED_QK : 0) |
         (sequenceFirst() ? kSEQUENCE_FIRST : 0);
}

int64_t Attributes::keysPerWindow() const { return (int64_t{lookBackward} + 1 + lookForward) * windowSize; }

std::string Attributes::describe() const {
  char text[256];
  std::snprintf(text, sizeof(text), "%s %s, window %d, %d back, %d forward, scale %.9g%s, %s",
                causal != 0 ? "causal" : "non-causal", exactWindowsize != 0 ? "exact" : "block-local", windowSize,
                lookBackward, lookForward, static_cast<double>(scale), sharedQk != 0 ? ", shared_qk" : "",
                sequenceFirst() ? "[B, N, H, D]" : "[B, H, N, D]");
  return text;
}

}  // namespace localattn
