// The plugin of the attention nodes and of AFT-local: one class for all op types. What differs is asked of `OpType`.
#pragma once

#include "attributes.h"
#include "base.h"
#include "kernels.h"
#include "launch.h"

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace localattn {

class WindowedAttention final : public Plugin {
 public:
  WindowedAttention(OpType const& opType, Attributes const& attributes);

  // IPluginV3
  nvinfer1::IPluginV3* clone() noexcept override;

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

  // IPluginV3OneRuntime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
                        int32_t nbOutputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;

 private:
  KernelKey keyOf(nvinfer1::PluginTensorDesc const& query) const;
  // What is the head size of the first input, with the options of this op type.
  KernelKey keyOf(Element element, nvinfer1::Dims const& query) const;
  // `key` is that of AFT-local's biases there.
  Sizes sizesOf(nvinfer1::Dims const& query, nvinfer1::Dims const& key) const;
  // Why shapes do not fit together; sizes not known yet (-1) fit. Empty if they do.
  std::string whyUnfit(nvinfer1::Dims const* shapes, int32_t nbInputs) const;
  std::string whyAftUnfit(nvinfer1::Dims const* shapes) const;

  OpType const& mOpType;
  Attributes mAttributes;
};

}  // namespace localattn
