#include "tensorrt/plugin.h"

#include "tensorrt/shapes.h"

#include <vector>

namespace localattn {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

// Of a kernel's output.
DataType outputOf(DataType query) { return query == DataType::kFP8 ? DataType::kHALF : query; }

}  // namespace

WindowedAttention::WindowedAttention(OpType const& opType, Attributes const& attributes)
    : Plugin({opType.name, opType.inputs(), opType.rank(), {0}}), mOpType(opType), mAttributes(attributes) {
  describe(opType.options.aft ? std::string(opType.name) : attributes.describe(), mAttributes.fields(opType));
}

Plugin* WindowedAttention::copy() const { return new WindowedAttention(mOpType, mAttributes); }

DataType WindowedAttention::typeAt(int32_t pos, DataType first) const {
  if (pos == mOpType.inputs()) {
    return outputOf(first);
  }
  return mOpType.options.mask && pos == mOpType.maskAt() ? DataType::kBOOL : first;
}

std::vector<KernelKey> WindowedAttention::kernelsOf(Element element, Dims const& first) const {
  return {keyOf(element, first)};
}

std::string WindowedAttention::whyBeyond(std::vector<Dims> const& largest) const {
  return whyTooLarge(mAttributes, sizesOf(largest[0], largest[static_cast<size_t>(mOpType.sizedBy())]));
}

bool WindowedAttention::run(PluginTensorDesc const* descriptions, void const* const* inputs, void* const* outputs,
                            void*, Stream stream, std::string& why) const {
  Sizes const sizes = sizesOf(descriptions[0].dims, descriptions[mOpType.sizedBy()].dims);
  if (sizes.batch == 0 || sizes.length == 0 || sizes.heads == 0) {
    return true;
  }
  Element element = Element::kFP32;
  elementOf(descriptions[0].type, element);
  why = whyTooLarge(mAttributes, sizes);
  return why.empty() &&
         localattn::run(keyOf(element, descriptions[0].dims), mAttributes, sizes, inputs, outputs[0], stream, why);
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

std::string WindowedAttention::whyUnfit(std::vector<Dims> const& shapes) const {
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
  bool const shared = mOpType.grouped() && shapes[1].nbDims == 4;
  int64_t const kvHeads = shared ? shapes[1].d[3 - lengthAxis] : heads;
  std::vector<int64_t> same(query.d, query.d + 4);
  same[3 - lengthAxis] = kvHeads;
  for (int32_t i = 1; i < 3; ++i) {
    if (!fits(shapes[i], same)) {
      return std::string(kNAMES[i]) + " is " + shapeText(shapes[i]) + " and query " + shapeText(query) +
             "; they must be equal" + (mOpType.grouped() ? " but for the heads, and key and value alike" : "");
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
  return "";
}

std::string WindowedAttention::whyAftUnfit(std::vector<Dims> const& shapes) const {
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
