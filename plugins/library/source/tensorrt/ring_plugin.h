// The plugin of the step and chunk nodes (core/nodes/step.py): one class for all their op types.
#pragma once

#include "tensorrt/base.h"
#include "kernels/kernels.h"
#include "tensorrt/ring_plan.h"

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace localattn {

struct RingOpType {
  char const* name;
  bool grouped;
  Options options;

  // Of keys, and of a chunk's queries.
  int32_t scales() const { return !options.xpos ? 0 : options.chunked ? 2 : 1; }
  int32_t inputs() const { return 7 + scales() + (options.sinks ? 1 : 0); }
  std::vector<char const*> inputNames() const;
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

  // IPluginV3OneBuild
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) const noexcept override;

 private:
  Plugin* copy() const override;
  nvinfer1::DataType typeAt(int32_t pos, nvinfer1::DataType first) const override;
  std::vector<KernelKey> kernelsOf(Element element, nvinfer1::Dims const& first) const override;
  std::string whyUnfit(std::vector<nvinfer1::Dims> const& shapes) const override;
  std::string whyBeyond(std::vector<nvinfer1::Dims> const& largest) const override;
  bool run(nvinfer1::PluginTensorDesc const* descriptions, void const* const* inputs, void* const* outputs,
           void* workspace, Stream stream, std::string& why) const override;

  KernelKey keyOf(Element element, nvinfer1::Dims const& query) const;
  RingSizes sizesOf(nvinfer1::Dims const& query, nvinfer1::Dims const& cache) const;
  // The shapes that the inputs must have, in order; `keys` are those attended to, -1 if not known.
  std::vector<std::vector<int64_t>> shapesOf(RingSizes const& sizes, int64_t keys, int32_t biasAxes) const;

  RingOpType const& mOpType;
  RingAttributes mAttributes;
};

}  // namespace localattn
