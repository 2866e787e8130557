#include "attention_node.h"

#include <cmath>

namespace localattn {
namespace {

// No window and no sequence is longer; products of a few of these stay within 64 bits.
constexpr int64_t kLongest = int64_t{1} << 31;

// onnxruntime's own message would not name the attribute.
void demand(const OrtApi* api, const Signature& op, OrtStatus* status, const char* name, const char* what) {
  if (status == nullptr) return;
  ort::ReleaseStatus(api, status);
  refuse(op.op_type, ": attribute ", name, " is missing or is not ", what);
}

int64_t integer(const OrtApi* api, const Signature& op, const OrtKernelInfo* info, const char* name, int64_t least,
                int64_t most) {
  int64_t value = 0;
  demand(api, op, ort::KernelInfoGetAttribute_int64(api, info, name, &value), name, "an integer");
  if (value < least || value > most)
    refuse(op.op_type, ": attribute ", name, " is ", value, "; it must lie in [", least, ", ", most, "]");
  return value;
}

bool is_heads_first(const OrtApi* api, const Signature& op, const OrtKernelInfo* info) {
  size_t count = 0;
  demand(api, op, ort::KernelInfoGetAttributeArray_int64(api, info, "perm", nullptr, &count), "perm",
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
  window_.window_size = integer(api, signature, info, "window_size", 1, kLongest);
  const int64_t most_windows = kLongest / window_.window_size;
  window_.look_backward = integer(api, signature, info, "look_backward", 0, most_windows);
  window_.look_forward = integer(api, signature, info, "look_forward", 0, most_windows);
  window_.causal = integer(api, signature, info, "causal", 0, 1) != 0;
  window_.exact_windowsize = integer(api, signature, info, "exact_windowsize", 0, 1) != 0;
  shared_qk_ = integer(api, signature, info, "shared_qk", 0, 1) != 0;
  demand(api, signature, ort::KernelInfoGetAttribute_float(api, info, "scale", &scale_), "scale", "a number");
  if (!std::isfinite(scale_)) refuse(signature.op_type, ": attribute scale is not finite");
  heads_first_ = is_heads_first(api, signature, info);
}

void AttentionNode::compute(OrtKernelContext* context) const {
  const Tensor query = input(api(), context, 0), key = input(api(), context, 1), value = input(api(), context, 2);
  if (query.dims.size() != 4)
    refuse(signature_.op_type, ": query has shape ", text(query.dims), "; it has 4 dimensions");
  require(signature_.op_type, "key", key.dims, query.dims);
  require(signature_.op_type, "value", value.dims, query.dims);

  Call call{};
  call.query = query.data;
  call.key = key.data;
  call.value = value.data;
  call.element = signature_.element;
  call.batch = query.dims[0];
  call.heads = query.dims[heads_first_ ? 1 : 2];
  call.length = query.dims[heads_first_ ? 2 : 1];
  call.head_dim = query.dims[3];
  if (call.length > kLongest) refuse(signature_.op_type, ": ", call.length, " tokens are too many");
  call.window = window_;
  call.scale = scale_;
  call.shared_qk = shared_qk_;
  call.bias_element = signature_.bias_element;
  size_t next = 3;
  if (signature_.has_mask) {
    const Tensor mask = input(api(), context, next++);
    require(signature_.op_type, "key_mask", mask.dims, {call.batch, call.length});
    call.key_mask = static_cast<const uint8_t*>(mask.data);
  }
  if (signature_.has_bias) {
    const Tensor bias = input(api(), context, next++);
    const int64_t keys = (window_.look_backward + 1 + window_.look_forward) * window_.window_size;
    require(signature_.op_type, "attn_bias", bias.dims, {call.heads, window_.window_size, keys});
    call.attn_bias = bias.data;
  }

  call.output = output(api(), context, 0, query.dims);
  if (is_empty(query.dims)) return;
  const int64_t rows = call.heads * call.head_dim;
  call.layout = heads_first_ ? Layout{rows * call.length, call.length * call.head_dim, call.head_dim}
                             : Layout{rows * call.length, call.head_dim, rows};
  const int64_t tasks = count_tasks(call, processors());
  run_on_threads(api(), context, signature_.op_type, tasks, [&](int64_t task) {
    run_task(call, task, tasks);
    return true;
  });
}

}  // namespace localattn
