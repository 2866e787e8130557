#include "tensorrt/base.h"

#include "kernels/launch.h"
#include "log.h"
#include "tensorrt/shapes.h"

#include <exception>
#include <utility>

namespace localattn {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

Plugin::Plugin(Signature signature) : mSignature(std::move(signature)) {}

void Plugin::describe(std::string const& text, std::vector<nvinfer1::PluginField> fields) {
  mDescription = text + "; localattn " + kVERSION;
  mFields = std::move(fields);
  mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
  try {
    return copy();
  } catch (std::exception const& error) {
    fail(error.what());
    return nullptr;
  }
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::AsciiChar const* Plugin::getPluginName() const noexcept { return mSignature.opType; }

nvinfer1::AsciiChar const* Plugin::getPluginVersion() const noexcept { return kPLUGIN_VERSION; }

nvinfer1::AsciiChar const* Plugin::getPluginNamespace() const noexcept { return kNAMESPACE; }

char const* Plugin::getTimingCacheID() noexcept { return mDescription.c_str(); }

char const* Plugin::getMetadataString() noexcept { return mDescription.c_str(); }

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

nvinfer1::PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept { return &mCollection; }

int32_t Plugin::getNbOutputs() const noexcept { return static_cast<int32_t>(mSignature.outputs.size()); }

int32_t Plugin::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                   int32_t nbInputs) const noexcept {
  if (nbInputs != mSignature.inputs || nbOutputs != getNbOutputs()) {
    return fail("its inputs and outputs must be " + std::to_string(mSignature.inputs) + " and " +
                std::to_string(getNbOutputs()) + ", not " + std::to_string(nbInputs) + " and " +
                std::to_string(nbOutputs));
  }
  for (int32_t i = 0; i < nbOutputs; ++i) {
    outputTypes[i] = typeAt(nbInputs + i, inputTypes[0]);
  }
  return 0;
}

int32_t Plugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*,
                                int32_t, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                                nvinfer1::IExprBuilder&) noexcept {
  if (nbInputs != mSignature.inputs || nbOutputs != getNbOutputs() || inputs[0].nbDims != mSignature.rank) {
    return fail("the first input must have " + std::to_string(mSignature.rank) + " dimensions, and there must be " +
                std::to_string(mSignature.inputs) + " inputs");
  }
  for (int32_t i = 0; i < nbOutputs; ++i) {
    outputs[i] = inputs[mSignature.outputs[static_cast<size_t>(i)]];
  }
  return 0;
}

bool Plugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                       int32_t nbOutputs) noexcept {
  if (nbInputs != mSignature.inputs || nbOutputs != getNbOutputs() || pos < 0 || pos >= nbInputs + nbOutputs ||
      inOut[pos].desc.format != nvinfer1::TensorFormat::kLINEAR) {
    return false;
  }
  PluginTensorDesc const& first = inOut[0].desc;
  if (pos != 0) {
    return inOut[pos].desc.type == typeAt(pos, first.type);
  }
  try {
    Element element{};
    if (!elementOf(first.type, element)) {
      sayOnce(Severity::kINFO, std::string(mSignature.opType) + ": TensorRT offers element type " +
                                   std::to_string(static_cast<int32_t>(first.type)) +
                                   "; the kernels take fp16, bf16, fp32 and, but for steps and chunks, fp8");
      return false;
    }
    for (KernelKey const& key : kernelsOf(element, first.dims)) {
      if (!haveKernel(key)) {
        sayOnce(Severity::kWARNING, std::string(mSignature.opType) + ": no kernel for " + describeKey(key) +
                                        " in this plugin library; build one that has it with: " + howToBuild(key, 0));
        return false;
      }
    }
    return true;
  } catch (std::exception const&) {
    return false;  // no memory for a message
  }
}

std::string Plugin::whyRefused(std::vector<Dims> const& shapes, std::vector<Dims> const& largest) const {
  if (static_cast<int32_t>(shapes.size()) != mSignature.inputs) {
    return "it takes " + std::to_string(mSignature.inputs) + " inputs, not " + std::to_string(shapes.size());
  }
  std::string const why = whyUnfit(shapes);
  return why.empty() && largest[0].nbDims == mSignature.rank ? whyBeyond(largest) : why;
}

int32_t Plugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const*,
                                int32_t) noexcept {
  try {
    std::vector<Dims> shapes, largest;  // of the profile: better now than when it runs
    for (int32_t i = 0; i < nbInputs; ++i) {
      shapes.push_back(in[i].desc.dims);
      largest.push_back(in[i].max);
    }
    std::string const why = whyRefused(shapes, largest);
    return why.empty() ? 0 : fail(why);
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

int32_t Plugin::onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const*, int32_t) noexcept {
  try {
    std::vector<Dims> shapes;
    for (int32_t i = 0; i < nbInputs; ++i) {
      shapes.push_back(in[i].dims);
    }
    std::string why = whyRefused(shapes, shapes);
    if (!why.empty()) {
      return fail(why);
    }
    // Loaded here already, so that the first call does not wait for it. What fails here is tried again by enqueue,
    // which then fails: without a GPU engines can still be built.
    Element element{};
    elementOf(in[0].type, element);
    for (KernelKey const& key : kernelsOf(element, in[0].dims)) {
      Loaded loaded;
      if (!load(key, nullptr, loaded, why)) {
        std::string missing;
        Severity const severity = driver(missing) == nullptr ? Severity::kINFO : Severity::kWARNING;
        sayOnce(severity, std::string(mSignature.opType) + ": no kernel is loaded yet: " + why);
        break;
      }
    }
    return 0;
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

int32_t Plugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*, void const* const* inputs,
                        void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  try {
    std::string why;
    return run(inputDesc, inputs, outputs, workspace, reinterpret_cast<Stream>(stream), why) ? 0 : fail(why);
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

int32_t Plugin::fail(std::string const& why) const noexcept {
  try {
    say(Severity::kERROR, std::string(mSignature.opType) + ": " + why);
  } catch (std::exception const&) {
    // No memory for a message.
  }
  return -1;
}

}  // namespace localattn
