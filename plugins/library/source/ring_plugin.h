// The plugin of the step and chunk nodes (core/nodes/step.py): one class for all their op types.
#pragma once

#include "base.h"
#include "kernels.h"
#include "ring_plan.h"

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace localattn {

struct RingOpType {
  char const* name;
  bool chunked;
  bool grouped;
  bool xpos;
  bool softcap;
  bool sinks;

  // query, key, value, two caches, biases and places; then scales and sinks.
  int32_t inputs() const { return 7 + (xpos ? (chunked ? 2 : 1) : 0) + (sinks ? 1 : 0); }
};

// Every op type that the kernels compute.
std::vector<RingOpType> const& ringOpTypes();

// What the mathematics needs of a node's attributes.
struct RingAttributes {
  float scale{0.F};
  float softcap{0.F};

  // As `Attributes`.
  bool read(RingOpType const& opType, nvinfer1::PluginFieldCollection const& fields, std::string& why);
  std::vector<nvinfer1::PluginField> fields(RingOpType const& opType) const;
};

class RingAttention final : public Plugin {
 public:
  RingAttention(RingOpType const& opType, RingAttributes const& attributes);

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
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) const noexcept override;

  // IPluginV3OneRuntime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
                        int32_t nbOutputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;

 private:
  KernelKey keyOf(Element element, nvinfer1::Dims const& query) const;
  RingSizes sizesOf(nvinfer1::Dims const& query, nvinfer1::Dims const& cache) const;
  // The type of an input or output, by its place, where the query's is known.
  nvinfer1::DataType typeAt(int32_t pos, nvinfer1::DataType query) const;
  // Why shapes do not fit together, or are too large; sizes not known yet (-1) fit. Empty if they do.
  std::string whyUnfit(std::vector<nvinfer1::Dims> const& shapes) const;
  bool run(nvinfer1::PluginTensorDesc const* descriptions, void const* const* inputs, void* const* outputs,
           void* workspace, cudaStream_t stream, std::string& why) const;

  RingOpType const& mOpType;
  RingAttributes mAttributes;
};

}  // namespace localattn
