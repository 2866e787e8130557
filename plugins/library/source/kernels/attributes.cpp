#include "kernels/attributes.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace localattn {
namespace {

// Below, the kernels' two halves of the decay could leave the range of fp32.
constexpr float kSMALLEST_XPOS_BASE = 1.F;

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

}  // namespace

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

bool readSoftcap(nvinfer1::PluginFieldCollection const& fields, float& value, std::string& why) {
  if (!readFloat(fields, "softcap", value, why)) {
    return false;
  }
  if (value <= 0) {
    why = "attribute softcap is " + std::to_string(value) + "; it must be above 0";
    return false;
  }
  return true;
}

std::vector<OpType> const& opTypes() {
  static std::vector<OpType> const all{
      {"WindowedAttention", Family::kWINDOWED, optionsOf(0)},
      {"WindowedAttentionMask", Family::kWINDOWED, optionsOf(kWITH_MASK)},
      {"WindowedAttentionBias", Family::kWINDOWED, optionsOf(kWITH_BIAS)},
      {"WindowedAttentionMaskBias", Family::kWINDOWED, optionsOf(kWITH_MASK | kWITH_BIAS)},
      {"WindowedAttentionXpos", Family::kWINDOWED, optionsOf(kWITH_XPOS)},
      {"WindowedAttentionMaskXpos", Family::kWINDOWED, optionsOf(kWITH_MASK | kWITH_XPOS)},
      {"WindowedAttentionBiasXpos", Family::kWINDOWED, optionsOf(kWITH_BIAS | kWITH_XPOS)},
      {"WindowedAttentionMaskBiasXpos", Family::kWINDOWED, optionsOf(kWITH_MASK | kWITH_BIAS | kWITH_XPOS)},
      {"GroupedWindowedAttention", Family::kGROUPED, optionsOf(0)},
      {"GroupedWindowedAttentionMask", Family::kGROUPED, optionsOf(kWITH_MASK)},
      {"GroupedWindowedAttentionSoftcap", Family::kGROUPED, optionsOf(kWITH_SOFTCAP)},
      {"GroupedWindowedAttentionMaskSoftcap", Family::kGROUPED, optionsOf(kWITH_MASK | kWITH_SOFTCAP)},
      {"GroupedWindowedAttentionSinks", Family::kGROUPED, optionsOf(kWITH_SINKS)},
      {"GroupedWindowedAttentionMaskSinks", Family::kGROUPED, optionsOf(kWITH_MASK | kWITH_SINKS)},
      {"GlobalAttention", Family::kGLOBAL, optionsOf(0)},
      {"GlobalAttentionMask", Family::kGLOBAL, optionsOf(kWITH_MASK)},
      {"GlobalAttentionSoftcap", Family::kGLOBAL, optionsOf(kWITH_SOFTCAP)},
      {"GlobalAttentionMaskSoftcap", Family::kGLOBAL, optionsOf(kWITH_MASK | kWITH_SOFTCAP)},
      {"GlobalAttentionSinks", Family::kGLOBAL, optionsOf(kWITH_SINKS)},
      {"GlobalAttentionMaskSinks", Family::kGLOBAL, optionsOf(kWITH_MASK | kWITH_SINKS)},
      {"AFTLocal", Family::kAFT, optionsOf(kOF_AFT)},
      {"AFTLocalMask", Family::kAFT, optionsOf(kWITH_MASK | kOF_AFT)},
      {"AFTLocalCausal", Family::kAFT, optionsOf(kOF_AFT | kCAUSAL_AFT)},
      {"AFTLocalCausalMask", Family::kAFT, optionsOf(kWITH_MASK | kOF_AFT | kCAUSAL_AFT)},
  };
  return all;
}

bool Attributes::read(OpType const& opType, nvinfer1::PluginFieldCollection const& fields, std::string& why) {
  if (opType.options.aft) {
    return true;  // it has none
  }
  constexpr int32_t kMOST = std::numeric_limits<int32_t>::max();
  bool const windowed = opType.seesAll() || (readIntegers(fields, "window_size", 1, 1, kMOST, &windowSize, why) &&
                                             readIntegers(fields, "look_backward", 1, 0, kMOST, &lookBackward, why) &&
                                             readIntegers(fields, "look_forward", 1, 0, kMOST, &lookForward, why));
  if (!windowed || !readIntegers(fields, "causal", 1, 0, 1, &causal, why) ||
      (!opType.seesAll() && !readIntegers(fields, "exact_windowsize", 1, 0, 1, &exactWindowsize, why)) ||
      !readFloat(fields, "scale", scale, why) ||
      (!opType.grouped() && !readIntegers(fields, "shared_qk", 1, 0, 1, &sharedQk, why)) ||
      !readIntegers(fields, "perm", 4, 0, 3, perm.data(), why) ||
      (opType.options.softcap && !readSoftcap(fields, softcap, why)) ||
      (opType.options.xpos && !readFloat(fields, "xpos_scale_base", xposScaleBase, why))) {
    return false;
  }
  if (opType.options.xpos && xposScaleBase < kSMALLEST_XPOS_BASE) {
    why = "attribute xpos_scale_base is " + std::to_string(xposScaleBase) + "; the kernels need 1 or more";
    return false;
  }
  if (causal != 0 && lookForward != 0) {
    why = "attribute look_forward is " + std::to_string(lookForward) + "; a causal window sees no later key";
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
  if (opType.options.bias && keysPerWindow() * windowSize > kMOST) {
    why = "attn_bias has " + std::to_string(keysPerWindow() * windowSize) +
          " numbers a head; their positions are 32 bits wide";
    return false;
  }
  return true;
}

std::vector<PluginField> Attributes::fields(OpType const& opType) const {
  std::vector<PluginField> all;
  if (opType.options.aft) {
    return all;
  }
  auto const integer = [&](char const* name, int32_t const* value, int32_t count = 1) {
    all.emplace_back(name, value, PluginFieldType::kINT32, count);
  };
  if (!opType.seesAll()) {
    integer("window_size", &windowSize);
    integer("look_backward", &lookBackward);
    integer("look_forward", &lookForward);
  }
  integer("causal", &causal);
  if (!opType.seesAll()) {
    integer("exact_windowsize", &exactWindowsize);
  }
  all.emplace_back("scale", &scale, PluginFieldType::kFLOAT32, 1);
  if (!opType.grouped()) {
    integer("shared_qk", &sharedQk);
  }
  integer("perm", perm.data(), 4);
  if (opType.options.softcap) {
    all.emplace_back("softcap", &softcap, PluginFieldType::kFLOAT32, 1);
  }
  if (opType.options.xpos) {
    all.emplace_back("xpos_scale_base", &xposScaleBase, PluginFieldType::kFLOAT32, 1);
  }
  return all;
}

int32_t Attributes::flags() const {
  return (causal != 0 ? kCAUSAL : 0) | (exactWindowsize != 0 ? kEXACT : 0) | (sequenceFirst() ? kSEQUENCE_FIRST : 0);
}

int64_t Attributes::keysPerWindow() const { return (int64_t{lookBackward} + 1 + lookForward) * windowSize; }

std::string Attributes::describe() const {
  char window[128] = "all keys";
  if (!seesAll()) {
    std::snprintf(window, sizeof(window), "%s, window %d, %d back, %d forward",
                  exactWindowsize != 0 ? "exact" : "block-local", windowSize, lookBackward, lookForward);
  }
  char extra[96] = "";
  if (softcap != 0) {
    std::snprintf(extra, sizeof(extra), ", softcap %.9g", static_cast<double>(softcap));
  } else if (xposScaleBase != 0) {
    std::snprintf(extra, sizeof(extra), ", xpos base %.9g", static_cast<double>(xposScaleBase));
  }
  char text[384];
  std::snprintf(text, sizeof(text), "%s %s, scale %.9g%s%s, %s", causal != 0 ? "causal" : "non-causal", window,
                static_cast<double>(scale), sharedQk != 0 ? ", shared_qk" : "", extra,
                sequenceFirst() ? "[B, N, H, D]" : "[B, H, N, D]");
  return text;
}

}  // namespace localattn
