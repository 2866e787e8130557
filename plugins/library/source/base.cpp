#include "base.h"

#include "kernels.h"
#include "log.h"

#include <exception>
#include <utility>

namespace localattn {

Plugin::Plugin(char const* opType) : mOpType(opType) {}

void Plugin::describe(std::string const& text, std::vector<nvinfer1::PluginField> fields) {
  mDescription = text + "; localattn " + kVERSION;
  mFields = std::move(fields);
  mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::AsciiChar const* Plugin::getPluginName() const noexcept { return mOpType; }

nvinfer1::AsciiChar const* Plugin::getPluginVersion() const noexcept { return kPLUGIN_VERSION; }

nvinfer1::AsciiChar const* Plugin::getPluginNamespace() const noexcept { return kNAMESPACE; }

char const* Plugin::getTimingCacheID() noexcept { return mDescription.c_str(); }

char const* Plugin::getMetadataString() noexcept { return mDescription.c_str(); }

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

nvinfer1::PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept { return &mCollection; }

int32_t Plugin::fail(std::string const& why) const noexcept {
  try {
    say(Severity::kERROR, std::string(mOpType) + ": " + why);
  } catch (std::exception const&) {
    // No memory for a message.
  }
  return -1;
}

}  // namespace localattn
