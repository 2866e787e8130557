// The plugin of the attention nodes and of AFT-local: one class for all op types. What differs is asked of `OpType`.
#pragma once

#include "attributes.h"
#include "kernels.h"
#include "launch.h"

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace localattn {

constexpr char const* kNAMESPACE = "localattn";
constexpr char const* kPLUGIN_VERSION = "1";

class WindowedAttention final : public nvinfer1::IPluginV3,
                                public nvinfer1::IPluginV3OneCore,
                                public nvinfer1::IPluginV3OneBuild,
                                public nvinfer1::IPluginV3OneRuntime {
 public:
  WindowedAttention(OpType const& opType, Attributes const& attributes);

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  // IPluginV3OneCore
  nvinfer1::AsciiChar const* getPluginName() const noexcept override;
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

  // IPluginV3OneBuild
  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
                             int32_t nbInputs) const noexcept override;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;
  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                 int32_t nbOutputs) noexcept override;
  int32_t getNbOutputs() const noexcept override;
  char const* getTimingCacheID() noexcept override;
  char const* getMetadataString() noexcept override;

  // IPluginV3OneRuntime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
                        int32_t nbOutputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

 private:
  KernelKey keyOf(nvinfer1::PluginTensorDesc const& query) const;
  // What is the head size of the first input, with the options of this op type.
  KernelKey keyOf(Element element, nvinfer1::Dims const& query) const;
  // `key` is that of AFT-local's biases there.
  Sizes sizesOf(nvinfer1::Dims const& query, nvinfer1::Dims const& key) const;
  // Why shapes do not fit together; sizes not known yet (-1) fit. Empty if they do.
  std::string whyUnfit(nvinfer1::Dims const* shapes, int32_t nbInputs) const;
  std::string whyAftUnfit(nvinfer1::Dims const* shapes) const;
  int32_t fail(std::string const& why) const noexcept;

  OpType const& mOpType;
  Attributes mAttributes;
  std::string mDescription;
  std::vector<nvinfer1::PluginField> mFields;
  nvinfer1::PluginFieldCollection mCollection;
};

}  // namespace localattn
