// The plugin of the attention nodes and of AFT-local: one class for all op types. What differs is asked of `OpType`.
#pragma once

#include "kernels/attributes.h"
#include "tensorrt/base.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace localattn {

class WindowedAttention final : public Plugin {
 public:
  WindowedAttention(OpType const& opType, Attributes const& attributes);

 private:
  Plugin* copy() const override;
  nvinfer1::DataType typeAt(int32_t pos, nvinfer1::DataType first) const override;
  std::vector<KernelKey> kernelsOf(Element element, nvinfer1::Dims const& first) const override;
  std::string whyUnfit(std::vector<nvinfer1::Dims> const& shapes) const override;
  std::string whyBeyond(std::vector<nvinfer1::Dims> const& largest) const override;
  bool run(nvinfer1::PluginTensorDesc const* descriptions, void const* const* inputs, void* const* outputs,
           void* workspace, Stream stream, std::string& why) const override;

  // The variant for the head size of the first input, with the options of this op type.
  KernelKey keyOf(Element element, nvinfer1::Dims const& query) const;
  // `key` is that of AFT-local's biases there.
  Sizes sizesOf(nvinfer1::Dims const& query, nvinfer1::Dims const& key) const;
  std::string whyAftUnfit(std::vector<nvinfer1::Dims> const& shapes) const;

  OpType const& mOpType;
  Attributes mAttributes;
};

}  // namespace localattn
