#include "tensorrt/ring_plugin.h"

#include "kernels/attributes.h"
#include "kernels/launch.h"
#include "tensorrt/shapes.h"

#include <algorithm>
#include <cstdio>
#include <limits>

namespace localattn {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

// Places of inputs.
constexpr int32_t kKEY_CACHE = 3;
constexpr int32_t kBIAS = 5;
constexpr int32_t kINDEX = 6;

size_t sizeOf(DataType type) {
  switch (type) {
    case DataType::kHALF:
    case DataType::kBF16: return 2;
    case DataType::kINT64: return 8;
    default: return 4;
  }
}

size_t bytesOf(PluginTensorDesc const& desc) {
  size_t bytes = sizeOf(desc.type);
  for (int32_t i = 0; i < desc.dims.nbDims; ++i) {
    bytes *= static_cast<size_t>(desc.dims.d[i]);
  }
  return bytes;
}

// The kernel's code for the biases: 0 common to all, 1 per head of keys, 2 per sequence.
int64_t biasesOf(Dims const& bias) {
  switch (bias.nbDims) {
    case 3: return 1;
    case 4: return 2;
    default: return 0;
  }
}

// Of what joins the splits of a call.
KernelKey joinsKeyOf(Element element) { return {element, 0, optionsOf(kOF_RING | kJOINS)}; }

}  // namespace

std::vector<char const*> RingOpType::inputNames() const {
  std::vector<char const*> names{"query", "key", "value", "key_cache", "value_cache", "score_bias", "write_index"};
  if (options.xpos && options.chunked) {
    names.push_back("query_scale");
  }
  if (options.xpos) {
    names.push_back("key_scale");
  }
  if (options.sinks) {
    names.push_back("sinks");
  }
  return names;
}

std::vector<RingOpType> const& ringOpTypes() {
  static std::vector<RingOpType> const all{
      {"WindowedAttentionStep", false, optionsOf(kOF_RING)},
      {"WindowedAttentionStepXpos", false, optionsOf(kOF_RING | kWITH_XPOS)},
      {"WindowedAttentionChunk", false, optionsOf(kOF_RING | kCHUNKED)},
      {"WindowedAttentionChunkXpos", false, optionsOf(kOF_RING | kCHUNKED | kWITH_XPOS)},
      {"GroupedWindowedAttentionStep", true, optionsOf(kOF_RING)},
      {"GroupedWindowedAttentionStepSoftcap", true, optionsOf(kOF_RING | kWITH_SOFTCAP)},
      {"GroupedWindowedAttentionStepSinks", true, optionsOf(kOF_RING | kWITH_SINKS)},
      {"GroupedWindowedAttentionChunk", true, optionsOf(kOF_RING | kCHUNKED)},
      {"GroupedWindowedAttentionChunkSoftcap", true, optionsOf(kOF_RING | kCHUNKED | kWITH_SOFTCAP)},
      {"GroupedWindowedAttentionChunkSinks", true, optionsOf(kOF_RING | kCHUNKED | kWITH_SINKS)},
  };
  return all;
}

bool RingAttributes::read(RingOpType const& opType, nvinfer1::PluginFieldCollection const& given, std::string& why) {
  return readFloat(given, "scale", scale, why) && (!opType.options.softcap || readSoftcap(given, softcap, why));
}

std::vector<PluginField> RingAttributes::fields(RingOpType const& opType) const {
  std::vector<PluginField> all;
  all.emplace_back("scale", &scale, PluginFieldType::kFLOAT32, 1);
  if (opType.options.softcap) {
    all.emplace_back("softcap", &softcap, PluginFieldType::kFLOAT32, 1);
  }
  return all;
}

RingAttention::RingAttention(RingOpType const& opType, RingAttributes const& attributes)
    : Plugin({opType.name, opType.inputs(), 4, {0, kKEY_CACHE, kKEY_CACHE + 1}}),
      mOpType(opType),
      mAttributes(attributes) {
  char text[96];
  std::snprintf(text, sizeof(text), ", scale %.9g", static_cast<double>(mAttributes.scale));
  std::string description = std::string(opType.name) + text;
  if (opType.options.softcap) {
    std::snprintf(text, sizeof(text), ", softcap %.9g", static_cast<double>(mAttributes.softcap));
    description += text;
  }
  describe(description, mAttributes.fields(opType));
}

Plugin* RingAttention::copy() const { return new RingAttention(mOpType, mAttributes); }

DataType RingAttention::typeAt(int32_t pos, DataType first) const {
  int32_t const inputs = mOpType.inputs();
  bool const isSinks = mOpType.options.sinks && pos == inputs - 1;
  if (pos == 0 || pos == inputs || isSinks) {
    return first;
  }
  if (pos == kINDEX) {
    return DataType::kINT64;
  }
  if (pos >= kBIAS && pos < inputs) {
    return DataType::kFLOAT;
  }
  // The keys, values and caches of a bf16 file are fp32.
  return first == DataType::kHALF ? DataType::kHALF : DataType::kFLOAT;
}

size_t RingAttention::getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                       DynamicPluginTensorDesc const*, int32_t) const noexcept {
  if (nbInputs != mOpType.inputs() || in[0].max.nbDims != 4 || in[kKEY_CACHE].max.nbDims != 4) {
    return 0;
  }
  RingSizes const largest = sizesOf(in[0].max, in[kKEY_CACHE].max);
  return largest.kvHeads > 0 ? static_cast<size_t>(mostPartBytes(largest)) : 0;
}

bool RingAttention::run(PluginTensorDesc const* descriptions, void const* const* inputs, void* const* outputs,
                        void* workspace, Stream stream, std::string& why) const {
  RingSizes const sizes = sizesOf(descriptions[0].dims, descriptions[kKEY_CACHE].dims);
  if (sizes.groups() == 0 || sizes.tokens == 0 || sizes.heads == 0) {
    return true;
  }
  Element element{};
  elementOf(descriptions[0].type, element);
  RingPlan plan{};
  Operand const output{"output", bytesOf(descriptions[0]), outputs[0]};
  Operand parts{"parts", 0, workspace};
  auto const callOf = [&](Kernel const& kernel) {
    plan = planOf(sizes, kernel.blockQueries);
    Call call{{}, {}, {}, plan.blocks, sizes.groups()};
    std::vector<char const*> const names = mOpType.inputNames();
    for (size_t i = 0; i < names.size(); ++i) {
      call.inputs.push_back({names[i], bytesOf(descriptions[i]), inputs[i]});
    }
    for (int64_t size : {sizes.tokens, sizes.slots, sizes.kvHeads, sizes.heads / sizes.kvHeads,
                         biasesOf(descriptions[kBIAS].dims), plan.span, plan.splits}) {
      call.scalars.push_back(static_cast<int32_t>(size));
    }
    call.scalars.push_back(bitsOf(mAttributes.scale));
    call.scalars.push_back(bitsOf(mAttributes.softcap));
    parts.bytes = static_cast<size_t>(sizes.rows() * sizes.groups() * plan.splits * (sizes.headDim + 2) * 4);
    // Without splits none are written, and there is no workspace.
    call.outputs = {plan.splits > 1 ? parts : output,
                    output,
                    {"next_key_cache", bytesOf(descriptions[kKEY_CACHE]), outputs[1]},
                    {"next_value_cache", bytesOf(descriptions[kKEY_CACHE + 1]), outputs[2]}};
    return call;
  };
  if (!launch(keyOf(element, descriptions[0].dims), callOf, stream, why)) {
    return false;
  }
  if (plan.splits == 1) {
    return true;
  }
  auto const joinOf = [&](Kernel const&) {
    std::vector<int32_t> const scalars{static_cast<int32_t>(sizes.rows()), static_cast<int32_t>(plan.splits),
                                       static_cast<int32_t>(sizes.headDim)};
    return Call{{parts}, scalars, {output}, sizes.rows(), sizes.groups()};
  };
  return launch(joinsKeyOf(element), joinOf, stream, why);
}

std::vector<KernelKey> RingAttention::kernelsOf(Element element, Dims const& first) const {
  return {keyOf(element, first), joinsKeyOf(element)};
}

KernelKey RingAttention::keyOf(Element element, Dims const& query) const {
  return {element, query.nbDims == 4 ? static_cast<int32_t>(query.d[3]) : -1, mOpType.options};
}

RingSizes RingAttention::sizesOf(Dims const& query, Dims const& cache) const {
  return {query.d[0], query.d[1], cache.d[1], query.d[2], cache.d[2], query.d[3], mOpType.options.chunked};
}

std::vector<std::vector<int64_t>> RingAttention::shapesOf(RingSizes const& sizes, int64_t keys,
                                                          int32_t biasAxes) const {
  std::vector<int64_t> const given{sizes.batch, sizes.kvHeads, sizes.tokens, sizes.headDim};
  std::vector<int64_t> const ring{sizes.batch, sizes.kvHeads, sizes.slots, sizes.headDim};
  std::vector<int64_t> bias{sizes.tokens, keys};
  if (biasAxes == 3 && !mOpType.grouped) {
    bias = {sizes.heads, sizes.tokens, keys};
  } else if (biasAxes == 4 && mOpType.grouped) {
    bias = {sizes.batch, 1, sizes.tokens, keys};
  }
  std::vector<int64_t> index{sizes.batch, sizes.kvHeads, 1, 3};
  if (mOpType.options.chunked) {
    index = {sizes.slots};
  }
  std::vector<std::vector<int64_t>> shapes{
      {sizes.batch, sizes.heads, sizes.tokens, sizes.headDim}, given, given, ring, ring, bias, index};
  if (mOpType.options.xpos && mOpType.options.chunked) {
    shapes.push_back({sizes.tokens, sizes.headDim});
  }
  if (mOpType.options.xpos) {
    shapes.push_back({keys, sizes.headDim});
  }
  if (mOpType.options.sinks) {
    shapes.push_back({sizes.heads});
  }
  return shapes;
}

std::string RingAttention::whyBeyond(std::vector<Dims> const& largest) const { return whyUnfit(largest); }

std::string RingAttention::whyUnfit(std::vector<Dims> const& shapes) const {
  Dims const& query = shapes[0];
  Dims const& cache = shapes[kKEY_CACHE];
  if (query.nbDims != 4 || cache.nbDims != 4) {
    return "query is " + shapeText(query) + " and key_cache " + shapeText(cache) + "; both must have 4 dimensions";
  }
  RingSizes const sizes = sizesOf(query, cache);
  bool const known = std::min({sizes.heads, sizes.kvHeads, sizes.tokens, sizes.slots}) >= 0;
  if (sizes.kvHeads == 0 || sizes.slots == 0 || (known && sizes.heads % sizes.kvHeads != 0)) {
    return std::to_string(sizes.heads) + " heads of queries cannot share " + std::to_string(sizes.kvHeads) +
           " of keys in " + std::to_string(sizes.slots) + " slots";
  }
  if (!mOpType.grouped && known && sizes.heads != sizes.kvHeads) {
    return "query is " + shapeText(query) + " and key_cache " + shapeText(cache) + "; they must have the same heads";
  }
  if (!mOpType.options.chunked && sizes.tokens > 1) {
    return "query is " + shapeText(query) + "; a step has one token";
  }
  std::vector<std::vector<int64_t>> const wanted = shapesOf(sizes, known ? sizes.keys() : -1, shapes[kBIAS].nbDims);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!fits(shapes[i], wanted[i])) {
      return std::string(mOpType.inputNames()[i]) + " is " + shapeText(shapes[i]) + ", which does not fit query " +
             shapeText(query) + " and key_cache " + shapeText(cache);
    }
  }
  if (sizes.batch > 0 && known && sizes.batch > kMOST_GROUPS / sizes.kvHeads) {
    return "batch times heads of keys is " + std::to_string(sizes.groups()) + ", above " + std::to_string(kMOST_GROUPS);
  }
  int64_t const most = std::numeric_limits<int32_t>::max();
  int64_t const factor = known ? std::max({sizes.tokens, sizes.heads / sizes.kvHeads, int64_t{1}}) : 1;
  if (known && sizes.slots + sizes.tokens > (most - 64) / factor) {
    return std::to_string(sizes.tokens) + " tokens and " + std::to_string(sizes.slots) +
           " slots overflow 32-bit positions";
  }
  return "";
}

}  // namespace localattn
