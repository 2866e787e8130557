#include "nodes/attention_node.h"

#include "nodes/attributes.h"

namespace localattn {
namespace {

// The longest window and sequence; products of a few of these fit in 64 bits.
constexpr int64_t kLongest = int64_t{1} << 31;

int64_t integer(const OrtApi* api, const Signature& op, const OrtKernelInfo* info, const char* name, int64_t least,
                int64_t most) {
  int64_t value = 0;
  demand(api, op.op_type.c_str(), ort::KernelInfoGetAttribute_int64(api, info, name, &value), name, "an integer");
  if (value < least || value > most)
    refuse(op.op_type, ": attribute ", name, " is ", value, "; it must lie in [", least, ", ", most, "]");
  return value;
}

Window window_of(const OrtApi* api, const Signature& op, const OrtKernelInfo* info) {
  Window window{};
  window.causal = integer(api, op, info, "causal", 0, 1) != 0;
  window.window_size = kLongest;
  if (op.sees_all) return window;
  window.window_size = integer(api, op, info, "window_size", 1, kLongest);
  const int64_t most_windows = kLongest / window.window_size;
  window.look_backward = integer(api, op, info, "look_backward", 0, most_windows);
  window.look_forward = integer(api, op, info, "look_forward", 0, most_windows);
  window.exact_windowsize = integer(api, op, info, "exact_windowsize", 0, 1) != 0;
  return window;
}

bool is_heads_first(const OrtApi* api, const Signature& op, const OrtKernelInfo* info) {
  size_t count = 0;
  demand(api, op.op_type.c_str(), ort::KernelInfoGetAttributeArray_int64(api, info, "perm", nullptr, &count), "perm",
         "a list of integers");
  std::vector<int64_t> perm(count);
  if (count == 4) check(ort::KernelInfoGetAttributeArray_int64(api, info, "perm", perm.data(), &count));
  if (perm == std::vector<int64_t>{0, 1, 2, 3}) return true;
  if (perm != std::vector<int64_t>{0, 2, 1, 3}) refuse(op.op_type, ": attribute perm is neither 0,1,2,3 nor 0,2,1,3");
  return false;
}

}  // namespace

AttentionNode::AttentionNode(const OrtApi* api, const Signature& signature, const OrtKernelInfo* info)
    : Node(api), signature_(signature) {
  window_ = window_of(api, signature, info);
  if (!signature.is_grouped) shared_qk_ = integer(api, signature, info, "shared_qk", 0, 1) != 0;
  const char* op = signature.op_type.c_str();
  scale_ = number_attribute(api, op, info, "scale");
  if (signature.has_softcap) softcap_ = softcap_attribute(api, op, info);
  if (signature.has_xpos) {
    xpos_scale_base_ = number_attribute(api, op, info, "xpos_scale_base");
    if (xpos_scale_base_ == 0) refuse(op, ": attribute xpos_scale_base is 0");
  }
  heads_first_ = is_heads_first(api, signature, info);
}

Layout AttentionNode::layout_of(const Call& call, int64_t heads) const {
  const int64_t row = heads * call.head_dim;
  if (heads_first_) return {row * call.length, call.length * call.head_dim, call.head_dim};
  return {row * call.length, call.head_dim, row};
}

void AttentionNode::compute(OrtKernelContext* context) const {
  const Tensor query = input(api(), context, 0), key = input(api(), context, 1), value = input(api(), context, 2);
  if (query.dims.size() != 4)
    refuse(signature_.op_type, ": query has shape ", text(query.dims), "; it has 4 dimensions");
  const char* name = signature_.op_type.c_str();
  const size_t head_axis = heads_first_ ? 1 : 2;
  Dims keys = query.dims;
  if (signature_.is_grouped && key.dims.size() == 4) keys[head_axis] = key.dims[head_axis];
  require(name, "key", key.dims, keys);
  require(name, "value", value.dims, keys);

  Call call{};
  call.query = query.data;
  call.key = key.data;
  call.value = value.data;
  call.element = signature_.element;
  call.batch = query.dims[0];
  call.heads = query.dims[head_axis];
  call.kv_heads = keys[head_axis];
  if (call.heads != 0 && (call.kv_heads == 0 || call.heads % call.kv_heads != 0))
    refuse(name, ": key has ", call.kv_heads, " heads; they must divide the ", call.heads, " of query");
  call.length = query.dims[heads_first_ ? 2 : 1];
  call.head_dim = query.dims[3];
  if (signature_.has_xpos && call.head_dim % 2 != 0)
    refuse(name, ": heads are ", call.head_dim, " wide; xpos scales channels in pairs");
  if (call.length > kLongest) refuse(signature_.op_type, ": ", call.length, " tokens are too many");
  call.window = window_;
  call.scale = scale_;
  call.shared_qk = shared_qk_;
  call.softcap = softcap_;
  call.xpos_scale_base = xpos_scale_base_;
  call.bias_element = signature_.bias_element;
  size_t next = 3;
  if (signature_.has_mask) {
    const Tensor mask = input(api(), context, next++);
    require(name, "key_mask", mask.dims, {call.batch, call.length});
    call.key_mask = static_cast<const uint8_t*>(mask.data);
  }
  if (signature_.has_bias) {
    const Tensor bias = input(api(), context, next++);
    const int64_t keys = (window_.look_backward + 1 + window_.look_forward) * window_.window_size;
    require(name, "attn_bias", bias.dims, {call.heads, window_.window_size, keys});
    call.attn_bias = bias.data;
  }
  std::vector<float> sinks;
  if (signature_.has_sinks) {
    const Tensor given = input(api(), context, next++);
    require(name, "sinks", given.dims, {call.heads});
    sinks = as_floats(given, signature_.element);
    call.sinks = sinks.data();
  }

  call.output = output(api(), context, 0, query.dims);
  if (is_empty(query.dims)) return;
  call.layout = layout_of(call, call.heads);
  call.key_layout = layout_of(call, call.kv_heads);
  const int64_t tasks = count_tasks(call, processors());
  run_on_threads(api(), context, name, tasks, [&](int64_t task) {
    run_task(call, task, tasks);
    return true;
  });
}

}  // namespace localattn
