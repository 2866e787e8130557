#include "plugin.h"

#include "log.h"
#include "shapes.h"

#include <exception>
#include <new>
#include <vector>

namespace localattn {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

// Of a kernel's output.
DataType outputOf(DataType query) { return query == DataType::kFP8 ? DataType::kHALF : query; }

}  // namespace

WindowedAttention::WindowedAttention(OpType const& opType, Attributes const& attributes)
    : Plugin(opType.name), mOpType(opType), mAttributes(attributes) {
  describe(opType.options.aft ? std::string(opType.name) : attributes.describe(), mAttributes.fields(opType));
}

nvinfer1::IPluginV3* WindowedAttention::clone() noexcept {
  try {
    return new WindowedAttention(mOpType, mAttributes);
  } catch (std::exception const& error) {
    fail(error.what());
    return nullptr;
  }
}

int32_t WindowedAttention::getNbOutputs() const noexcept { return 1; }

int32_t WindowedAttention::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                              int32_t nbInputs) const noexcept {
  if (nbInputs != mOpType.inputs() || nbOutputs != 1) {
    return fail("it takes " + std::to_string(mOpType.inputs()) + " inputs and gives one output, not " +
                std::to_string(nbInputs) + " and " + std::to_string(nbOutputs));
  }
  outputTypes[0] = outputOf(inputTypes[0]);
  return 0;
}

int32_t WindowedAttention::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs,
                                           nvinfer1::DimsExprs const*, int32_t, nvinfer1::DimsExprs* outputs,
                                           int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (nbInputs != mOpType.inputs() || nbOutputs != 1 || inputs[0].nbDims != mOpType.rank()) {
    return fail("the first input must have " + std::to_string(mOpType.rank()) + " dimensions, and there must be " +
                std::to_string(mOpType.inputs()) + " inputs");
  }
  outputs[0] = inputs[0];
  return 0;
}

bool WindowedAttention::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                                  int32_t nbOutputs) noexcept {
  if (nbInputs != mOpType.inputs() || nbOutputs != 1 || pos < 0 || pos > nbInputs ||
      inOut[pos].desc.format != nvinfer1::TensorFormat::kLINEAR) {
    return false;
  }
  PluginTensorDesc const& query = inOut[0].desc;
  if (pos != 0) {
    bool const isMask = mOpType.options.mask && pos == mOpType.maskAt();
    DataType const own = pos == nbInputs ? outputOf(query.type) : query.type;
    return inOut[pos].desc.type == (isMask ? DataType::kBOOL : own);
  }
  Element element{};
  if (!elementOf(query.type, element)) {
    try {
      sayOnce(Severity::kINFO, std::string(mOpType.name) + ": TensorRT offers element type " +
                                   std::to_string(static_cast<int32_t>(query.type)) +
                                   "; the kernels take fp16, bf16, fp32 and fp8");
    } catch (std::exception const&) {
      // No memory for a message.
    }
    return false;
  }
  KernelKey const key = keyOf(element, query.dims);
  if (haveKernel(key)) {
    return true;
  }
  try {
    sayOnce(Severity::kWARNING, std::string(mOpType.name) + ": no kernel for " + describeKey(key) +
                                    " in this plugin library; build one that has it with: " + howToBuild(key, 0));
  } catch (std::exception const&) {
    // No memory for a message.
  }
  return false;
}

int32_t WindowedAttention::configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                           DynamicPluginTensorDesc const*, int32_t) noexcept {
  try {
    if (nbInputs != mOpType.inputs()) {
      return fail("it takes " + std::to_string(mOpType.inputs()) + " inputs, not " + std::to_string(nbInputs));
    }
    std::vector<Dims> shapes;
    for (int32_t i = 0; i < nbInputs; ++i) {
      shapes.push_back(in[i].desc.dims);
    }
    std::string why = whyUnfit(shapes.data(), nbInputs);
    if (why.empty() && in[0].max.nbDims == mOpType.rank()) {
      why = whyTooLarge(mAttributes,
                        sizesOf(in[0].max, in[mOpType.sizedBy()].max));  // of the profile: better now than when it runs
    }
    return why.empty() ? 0 : fail(why);
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

int32_t WindowedAttention::onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const*,
                                         int32_t) noexcept {
  try {
    if (nbInputs != mOpType.inputs()) {
      return fail("it takes " + std::to_string(mOpType.inputs()) + " inputs, not " + std::to_string(nbInputs));
    }
    std::vector<Dims> shapes;
    for (int32_t i = 0; i < nbInputs; ++i) {
      shapes.push_back(in[i].dims);
    }
    std::string why = whyUnfit(shapes.data(), nbInputs);
    if (why.empty()) {
      why = whyTooLarge(mAttributes, sizesOf(in[0].dims, in[mOpType.sizedBy()].dims));
    }
    if (!why.empty()) {
      return fail(why);
    }
    // Loaded here already, so that the first call does not wait for it. What fails here is tried again by enqueue,
    // which then fails: without a GPU engines can still be built.
    Loaded loaded;
    if (!load(keyOf(in[0]), nullptr, loaded, why)) {
      std::string missing;
      Severity const severity = driver(missing) == nullptr ? Severity::kINFO : Severity::kWARNING;
      sayOnce(severity, std::string(mOpType.name) + ": no kernel is loaded yet: " + why);
    }
    return 0;
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

int32_t WindowedAttention::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*,
                                   void const* const* inputs, void* const* outputs, void*,
                                   cudaStream_t stream) noexcept {
  try {
    Sizes const sizes = sizesOf(inputDesc[0].dims, inputDesc[mOpType.sizedBy()].dims);
    if (sizes.batch == 0 || sizes.length == 0 || sizes.heads == 0) {
      return 0;
    }
    std::string why = whyTooLarge(mAttributes, sizes);
    if (!why.empty() ||
        !run(keyOf(inputDesc[0]), mAttributes, sizes, inputs, outputs[0], reinterpret_cast<Stream>(stream), why)) {
      return fail(why);
    }
    return 0;
  } catch (std::exception const& error) {
    return fail(error.what());
  }
}

KernelKey WindowedAttention::keyOf(PluginTensorDesc const& query) const {
  Element element = Element::kFP32;
  elementOf(query.type, element);
  return keyOf(element, query.dims);
}

KernelKey WindowedAttention::keyOf(Element element, Dims const& query) const {
  if (mOpType.options.aft) {
    return {element, 0, mOpType.options};
  }
  Options options = mOpType.options;
  options.sharedQk = mAttributes.sharedQk != 0;
  return {element, query.nbDims == 4 ? static_cast<int32_t>(query.d[3]) : -1, options};
}

Sizes WindowedAttention::sizesOf(Dims const& query, Dims const& key) const {
  if (mOpType.options.aft) {
    int64_t const groups = (query.d[2] + kAFT_CHANNELS - 1) / kAFT_CHANNELS;
    int64_t const reach = mOpType.options.causal ? key.d[1] - 1 : (key.d[1] - 1) / 2;
    return {query.d[1], query.d[0], groups, groups, query.d[2], reach};
  }
  int32_t const lengthAxis = mAttributes.sequenceFirst() ? 1 : 2;
  return {query.d[0], query.d[lengthAxis], query.d[3 - lengthAxis], key.d[3 - lengthAxis]};
}

std::string WindowedAttention::whyUnfit(Dims const* shapes, int32_t nbInputs) const {
  if (mOpType.options.aft) {
    return whyAftUnfit(shapes);
  }
  static char const* const kNAMES[] = {"query", "key", "value"};
  Dims const& query = shapes[0];
  if (query.nbDims != 4) {
    return "query is " + shapeText(query) + "; it must have 4 dimensions";
  }
  int32_t const lengthAxis = mAttributes.sequenceFirst() ? 1 : 2;
  int64_t const length = query.d[lengthAxis];
  int64_t const heads = query.d[3 - lengthAxis];
  // Grouped nodes have fewer heads of keys and values, in equal groups.
  bool const shared = mOpType.grouped && shapes[1].nbDims == 4;
  int64_t const kvHeads = shared ? shapes[1].d[3 - lengthAxis] : heads;
  std::vector<int64_t> same(query.d, query.d + 4);
  same[3 - lengthAxis] = kvHeads;
  for (int32_t i = 1; i < 3; ++i) {
    if (!fits(shapes[i], same)) {
      return std::string(kNAMES[i]) + " is " + shapeText(shapes[i]) + " and query " + shapeText(query) +
             "; they must be equal" + (mOpType.grouped ? " but for the heads, and key and value alike" : "");
    }
  }
  if (kvHeads == 0 || (kvHeads > 0 && heads > 0 && heads % kvHeads != 0)) {
    return std::to_string(heads) + " heads of queries cannot share " + std::to_string(kvHeads) + " of keys";
  }
  int32_t next = 3;
  if (mOpType.options.mask && !fits(shapes[next++], {query.d[0], length})) {
    return "key_mask is " + shapeText(shapes[next - 1]) + "; it must be [batch, length] of query " + shapeText(query);
  }
  if (mOpType.options.sinks && !fits(shapes[next++], {heads})) {
    return "sinks is " + shapeText(shapes[next - 1]) + "; it must be [heads] = [" + std::to_string(heads) + "]";
  }
  if (mOpType.options.bias && !fits(shapes[next++], {heads, mAttributes.windowSize, mAttributes.keysPerWindow()})) {
    return "attn_bias is " + shapeText(shapes[next - 1]) + "; it must be [heads, window_size, keys] = [" +
           std::to_string(heads) + ", " + std::to_string(mAttributes.windowSize) + ", " +
           std::to_string(mAttributes.keysPerWindow()) + "]";
  }
  return next == nbInputs ? "" : "it has " + std::to_string(nbInputs) + " inputs";
}

std::string WindowedAttention::whyAftUnfit(Dims const* shapes) const {
  Dims const& gate = shapes[0];
  if (gate.nbDims != 3) {
    return "gate is " + shapeText(gate) + "; it must have 3 dimensions";
  }
  for (int32_t i = 1; i < 3; ++i) {
    if (!fits(shapes[i], {gate.d[0], gate.d[1], gate.d[2]})) {
      return std::string(i == 1 ? "key" : "value") + " is " + shapeText(shapes[i]) + " and gate " + shapeText(gate) +
             "; they must be equal";
    }
  }
  bool const odd = shapes[3].nbDims == 2 && shapes[3].d[1] % 2 == 1;
  if (!fits(shapes[3], {gate.d[0], -1}) || shapes[3].d[1] < 1 || !(odd || mOpType.options.causal)) {
    return "position_bias is " + shapeText(shapes[3]) + "; it must be [length, columns] of gate " + shapeText(gate) +
           (mOpType.options.causal ? "" : ", with an odd number of columns");
  }
  if (mOpType.options.mask && !fits(shapes[4], {gate.d[1], gate.d[0]})) {
    return "key_mask is " + shapeText(shapes[4]) + "; it must be [batch, length] of gate " + shapeText(gate);
  }
  return "";
}

}  // namespace localattn
