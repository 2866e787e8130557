// The common part of all plugins: registration, texts, the fields that a plan stores, and TensorRT's interface. A
// subclass defines a node's types, shapes and kernels.
#pragma once

#include "kernels/driver.h"
#include "kernels/kernels.h"

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace localattn {

constexpr char const* kNAMESPACE = "localattn";
constexpr char const* kPLUGIN_VERSION = "1";

// Inputs and outputs of an op type.
struct Signature {
  char const* opType;  // outlives the plugin
  int32_t inputs;
  int32_t rank;                  // of the first input
  std::vector<int32_t> outputs;  // of each the input whose shape it has
};

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuild,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  // IPluginV3
  nvinfer1::IPluginV3* clone() noexcept final;
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final;

  // IPluginV3OneCore
  nvinfer1::AsciiChar const* getPluginName() const noexcept final;
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept final;
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept final;

  // IPluginV3OneBuild
  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept final;
  int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
                             int32_t nbInputs) const noexcept final;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept final;
  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                 int32_t nbOutputs) noexcept final;
  int32_t getNbOutputs() const noexcept final;
  char const* getTimingCacheID() noexcept final;
  char const* getMetadataString() noexcept final;

  // IPluginV3OneRuntime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
                        int32_t nbOutputs) noexcept final;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                  void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept final;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept final;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final;

 protected:
  explicit Plugin(Signature signature);

  // To be called once: what tells two plugins apart, and fields, whose values lie in the plugin.
  void describe(std::string const& text, std::vector<nvinfer1::PluginField> fields);

  virtual Plugin* copy() const = 0;
  // The type of an input or output, by its place, where that of the first input is known.
  virtual nvinfer1::DataType typeAt(int32_t pos, nvinfer1::DataType first) const = 0;
  // Those that a call may launch, by the element type and shape of the first input.
  virtual std::vector<KernelKey> kernelsOf(Element element, nvinfer1::Dims const& first) const = 0;
  // Why the inputs' shapes do not fit together; sizes not known yet (-1) fit. Empty if they do.
  virtual std::string whyUnfit(std::vector<nvinfer1::Dims> const& shapes) const = 0;
  // Why the kernels cannot compute shapes of which these are the largest. Empty if they can.
  virtual std::string whyBeyond(std::vector<nvinfer1::Dims> const& largest) const = 0;
  virtual bool run(nvinfer1::PluginTensorDesc const* descriptions, void const* const* inputs, void* const* outputs,
                   void* workspace, Stream stream, std::string& why) const = 0;

 private:
  std::string whyRefused(std::vector<nvinfer1::Dims> const& shapes, std::vector<nvinfer1::Dims> const& largest) const;
  // Logs a reason and returns TensorRT's code for a failure.
  int32_t fail(std::string const& why) const noexcept;

  Signature mSignature;
  std::string mDescription;
  std::vector<nvinfer1::PluginField> mFields;
  nvinfer1::PluginFieldCollection mCollection{};
};

}  // namespace localattn
