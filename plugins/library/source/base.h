// What the plugins of all nodes share: their place in the registry, their texts, and the fields that a plan stores.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace localattn {

constexpr char const* kNAMESPACE = "localattn";
constexpr char const* kPLUGIN_VERSION = "1";

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuild,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final;

  // IPluginV3OneCore
  nvinfer1::AsciiChar const* getPluginName() const noexcept final;
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept final;
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept final;

  // IPluginV3OneBuild
  char const* getTimingCacheID() noexcept final;
  char const* getMetadataString() noexcept final;

  // IPluginV3OneRuntime
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept final;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final;

 protected:
  // `opType` outlives the plugin.
  explicit Plugin(char const* opType);

  // To be called once: what tells two plugins apart, and fields, whose values lie in the plugin.
  void describe(std::string const& text, std::vector<nvinfer1::PluginField> fields);
  // Logs a reason and returns what TensorRT takes for a failure.
  int32_t fail(std::string const& why) const noexcept;

 private:
  char const* mOpType;
  std::string mDescription;
  std::vector<nvinfer1::PluginField> mFields;
  nvinfer1::PluginFieldCollection mCollection{};
};

}  // namespace localattn
