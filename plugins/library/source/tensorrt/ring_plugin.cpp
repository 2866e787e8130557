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
// Of the launch grid's second axis.
constexpr int64_t kMAX_GROUPS = 65535;

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

// Of what joins the splits of a call.
KernelKey joinsKeyOf(Element element) {
  Options joins{};
  joins.ring = joins.joins = true;
  return {element, 0, joins};
}

}  // namespace

std::vector<RingOpType> const& ringOpTypes() {
  // Chunk, grouped, xpos, softcap, sinks.
  static std::vector<RingOpType> const all{
      {"WindowedAttentionStep", false, false, false, false, false},
      {"WindowedAttentionStepXpos", false, false, true, false, false},
      {"WindowedAttentionChunk", true, false, false, false, false},
      {"WindowedAttentionChunkXpos", true, false, true, false, false},
      {"GroupedWindowedAttentionStep", false, true, false, false, false},
      {"GroupedWindowedAttentionStepSoftcap", false, true, false, true, false},
      {"GroupedWindowedAttentionStepSinks", false, true, false, false, true},
      {"GroupedWindowedAttentionChunk", true, true, false, false, false},
      {"GroupedWindowedAttentionChunkSoftcap", true, true, false, true, false},
      {"GroupedWindowedAttentionChunkSinks", true, true, false, false, true},
  };
  return all;
}

bool RingAttributes::read(RingOpType const& opType, nvinfer1::PluginFieldCollection const& given, std::string& why) {
  if (!readFloat(given, "scale", scale, why) || (opType.softcap && !readFloat(given, "softcap", softcap, why))) {
    return false;
  }
  if (opType.softcap && softcap <= 0) {
    why = "attribute softcap is " + std::to_string(softcap) + "; it must be above 0";
    return false;
  }
  return true;
}

std::vector<PluginField> RingAttributes::fields(RingOpType const& opType) const {
  std::vector<PluginField> all;
  all.emplace_back("scale", &scale, PluginFieldType::kFLOAT32, 1);
  if (opType.softcap) {
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
  if (opType.softcap) {
    std::snprintf(text, sizeof(text), ", softcap %.9g", static_cast<double>(mAttributes.softcap));
    description += text;
  }
  describe(description, mAttributes.fields(opType));
}

Plugin* RingAttention::copy() const { return new RingAttention(mOpType, mAttributes); }

DataType RingAttention::typeAt(int32_t pos, DataType first) const {
  int32_t const inputs = mOpType.inputs();
  bool const isSinks = mOpType.sinks && pos == inputs - 1;
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
  static char const* const kNAMES[] = {"query",       "key",        "value",      "key_cache",
                                       "value_cache", "score_bias", "write_index"};
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
    for (int32_t i = 0; i < mOpType.inputs(); ++i) {
      bool const isSinks = mOpType.sinks && i == mOpType.inputs() - 1;
      char const* const name = i <= kINDEX ? kNAMES[i] : isSinks ? "sinks" : "scales";
      call.inputs.push_back({name, bytesOf(descriptions[i]), inputs[i]});
    }
    int32_t const biasAxes = descriptions[kBIAS].dims.nbDims;
    for (int64_t size : {sizes.tokens, sizes.slots, sizes.kvHeads, sizes.heads / sizes.kvHeads,
                         int64_t{biasAxes == 3   ? 1
                                 : biasAxes == 4 ? 2
                                                 : 0},
                         plan.span, plan.splits}) {
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
  Options options{};
  options.xpos = mOpType.xpos;
  options.softcap = mOpType.softcap;
  options.sinks = mOpType.sinks;
  options.ring = true;
  options.chunked = mOpType.chunked;
  return {element, query.nbDims == 4 ? static_cast<int32_t>(query.d[3]) : -1, options};
}

RingSizes RingAttention::sizesOf(Dims const& query, Dims const& cache) const {
  return {query.d[0], query.d[1], cache.d[1], query.d[2], cache.d[2], query.d[3], mOpType.chunked};
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
  if (!mOpType.chunked && sizes.tokens > 1) {
    return "query is " + shapeText(query) + "; a step has one token";
  }
  std::vector<int64_t> const given{sizes.batch, sizes.kvHeads, sizes.tokens, sizes.headDim};
  std::vector<int64_t> const ring{sizes.batch, sizes.kvHeads, sizes.slots, sizes.headDim};
  int64_t const keys = known ? sizes.keys() : -1;
  std::vector<int64_t> bias{sizes.tokens, keys};
  if (shapes[kBIAS].nbDims == 3 && !mOpType.grouped) {
    bias = {sizes.heads, sizes.tokens, keys};
  } else if (shapes[kBIAS].nbDims == 4 && mOpType.grouped) {
    bias = {sizes.batch, 1, sizes.tokens, keys};
  }
  std::vector<int64_t> const index =
      mOpType.chunked ? std::vector<int64_t>{sizes.slots} : std::vector<int64_t>{sizes.batch, sizes.kvHeads, 1, 3};
  std::vector<std::pair<char const*, std::vector<int64_t>>> wanted{
      {"query", {sizes.batch, sizes.heads, sizes.tokens, sizes.headDim}},
      {"key", given},
      {"value", given},
      {"key_cache", ring},
      {"value_cache", ring},
      {"score_bias", bias},
      {"write_index", index}};
  if (mOpType.xpos && mOpType.chunked) {
    wanted.push_back({"query_scale", {sizes.tokens, sizes.headDim}});
  }
  if (mOpType.xpos) {
    wanted.push_back({"key_scale", {keys, sizes.headDim}});
  }
  if (mOpType.sinks) {
    wanted.push_back({"sinks", {sizes.heads}});
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!fits(shapes[i], wanted[i].second)) {
      return std::string(wanted[i].first) + " is " + shapeText(shapes[i]) + ", which does not fit query " +
             shapeText(query) + " and key_cache " + shapeText(cache);
    }
  }
  if (sizes.batch > 0 && known && sizes.batch > kMAX_GROUPS / sizes.kvHeads) {
    return "batch times heads of keys is " + std::to_string(sizes.groups()) + ", above " + std::to_string(kMAX_GROUPS);
  }
  int64_t const most = std::numeric_limits<int32_t>::max();
  if (known && (sizes.slots + sizes.tokens) > (most - 64) / std::max(sizes.tokens, sizes.heads / sizes.kvHeads)) {
    return std::to_string(sizes.tokens) + " tokens and " + std::to_string(sizes.slots) +
           " slots overflow 32-bit positions";
  }
  return "";
}

}  // namespace localattn
