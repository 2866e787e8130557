// The operators registered with onnxruntime, and the function that registers them.
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "nodes/aft_node.h"
#include "nodes/attention_node.h"
#include "nodes/fused_nodes.h"
#include "nodes/ring_node.h"

#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

namespace localattn {
namespace {

constexpr Element kHalf = Element::fp16, kSingle = Element::fp32;
using Elements = std::vector<OrtElement>;

OrtElement onnx_element(Element element) { return element == kHalf ? kFloat16 : kFloat; }

// One operator of a domain for one set of element types.
struct Operator : OrtCustomOp {
  std::string op_type;
  Elements inputs, outputs;
  std::vector<size_t> shape_of;  // the inputs whose shapes the first outputs have
  std::function<Node*(const OrtApi*, const OrtKernelInfo*)> make;
  const OrtApi* api;
};

const Operator& of(const OrtCustomOp* op) { return *static_cast<const Operator*>(op); }

// The names are those of core/nodes/aft.py.
void add_aft_operators(std::vector<Operator>& operators) {
  const auto add = [&](const char* op_type, bool causal, bool has_mask) {
    Operator op{};
    op.op_type = op_type;
    op.inputs = Elements(4, kFloat);
    if (has_mask) op.inputs.push_back(kBool);
    op.outputs = {kFloat};
    op.shape_of = {0};
    op.make = [=](const OrtApi* api, const OrtKernelInfo*) -> Node* {
      return new AftNode(api, op_type, causal, has_mask);
    };
    operators.push_back(op);
  };
  add("AFTLocal", false, false);
  add("AFTLocalMask", false, true);
  add("AFTLocalCausal", true, false);
  add("AFTLocalCausalMask", true, true);
}

// The names are those of core/nodes/attention.py.
std::vector<Signature> windowed_signatures() {
  std::vector<Signature> signatures;
  for (int i = 0; i < 8; ++i) {
    Signature op{};
    op.has_mask = i & 1;
    op.has_bias = i & 2;
    op.has_xpos = i & 4;
    op.op_type = std::string("WindowedAttention") + (op.has_mask ? "Mask" : "") + (op.has_bias ? "Bias" : "") +
                 (op.has_xpos ? "Xpos" : "");
    signatures.push_back(op);
  }
  return signatures;
}

// The names are those of core/nodes/grouped.py.
std::vector<Signature> grouped_signatures() {
  std::vector<Signature> signatures;
  for (int i = 0; i < 16; ++i) {
    Signature op{};
    op.is_grouped = true;
    op.has_mask = i & 1;
    op.has_softcap = i & 2;
    op.has_sinks = i & 4;
    op.sees_all = i & 8;
    op.op_type = std::string(op.sees_all ? "GlobalAttention" : "GroupedWindowedAttention") +
                 (op.has_mask ? "Mask" : "") + (op.has_softcap ? "Softcap" : "") + (op.has_sinks ? "Sinks" : "");
    signatures.push_back(op);
  }
  return signatures;
}

// An operator for each pair of element types: of halves with a bias, the bias may be single.
void add_operators(std::vector<Operator>& operators, Signature signature) {
  for (const Element element : {kSingle, kHalf}) {
    for (const Element bias_element : {element, kSingle}) {
      signature.element = element;
      signature.bias_element = bias_element;
      Operator op{};
      op.op_type = signature.op_type;
      op.inputs = Elements(3, onnx_element(element));
      if (signature.has_mask) op.inputs.push_back(kBool);
      if (signature.has_bias) op.inputs.push_back(onnx_element(bias_element));
      if (signature.has_sinks) op.inputs.push_back(onnx_element(element));
      op.outputs = {onnx_element(element)};
      op.shape_of = {0};
      op.make = [signature](const OrtApi* api, const OrtKernelInfo* info) {
        return new AttentionNode(api, signature, info);
      };
      operators.push_back(op);
      if (!signature.has_bias || element == kSingle) break;
    }
  }
}

// The names are those of core/nodes/step.py.
void add_ring_operators(std::vector<Operator>& operators) {
  const auto add = [&](RingSignature signature) {
    for (const Element element : {kSingle, kHalf}) {
      signature.element = element;
      Operator op{};
      op.op_type = signature.op_type;
      op.inputs = Elements(5, onnx_element(element));
      op.inputs.insert(op.inputs.end(), {kFloat, kInt64});
      if (signature.has_xpos) op.inputs.insert(op.inputs.end(), signature.chunked ? 2 : 1, kFloat);
      if (signature.has_sinks) op.inputs.push_back(onnx_element(element));
      op.outputs = Elements(3, onnx_element(element));
      op.shape_of = {0, 3, 4};
      op.make = [signature](const OrtApi* api, const OrtKernelInfo* info) {
        return new RingNode(api, signature, info);
      };
      operators.push_back(op);
    }
  };
  for (const bool chunked : {false, true}) {
    const std::string name = chunked ? "WindowedAttentionChunk" : "WindowedAttentionStep";
    for (const bool xpos : {false, true}) add({name + (xpos ? "Xpos" : ""), kSingle, chunked, xpos, false, false});
    for (int i = 0; i < 4; ++i) {
      const bool softcap = i & 1, sinks = i & 2;
      const std::string op_type = "Grouped" + name + (softcap ? "Softcap" : "") + (sinks ? "Sinks" : "");
      add({op_type, kSingle, chunked, false, softcap, sinks});
    }
  }
}

std::vector<Operator> attention_operators() {
  std::vector<Operator> operators;
  for (const Signature& signature : windowed_signatures()) add_operators(operators, signature);
  for (const Signature& signature : grouped_signatures()) add_operators(operators, signature);
  add_aft_operators(operators);
  add_ring_operators(operators);
  return operators;
}

// The names are those of core/nodes/fused.py.
std::vector<Operator> fused_operators() {
  std::vector<Operator> operators;
  const auto add = [&](const char* op_type, Elements inputs, Elements outputs, auto make, bool same_shape = true) {
    Operator op{};
    op.op_type = op_type;
    op.inputs = std::move(inputs);
    op.outputs = std::move(outputs);
    if (same_shape) op.shape_of = {0};
    op.make = [make](const OrtApi* api, const OrtKernelInfo*) -> Node* { return make(api); };
    operators.push_back(op);
  };
  const auto add_reading = [&](const char* op_type, bool mixes, bool has_norm) {
    add(
        op_type, Elements(4 + 3 * mixes + 2 * has_norm, kFloat), Elements(3 + mixes, kFloat),
        [=](auto* api) { return new ReadStreamsNode(api, op_type, mixes, has_norm); }, mixes);
  };
  add_reading("ReadStreams", false, false);
  add_reading("ReadStreamsNorm", false, true);
  add_reading("MixReadStreamsNorm", true, true);
  const auto add_writing = [&](const char* op_type, Writing writing) {
    add(
        op_type, Elements(writing == Writing::add ? 3 : 4, kFloat), {kFloat},
        [=](auto* api) { return new WriteStreamsNode(api, op_type, writing); },
        writing == Writing::mix || writing == Writing::add);
  };
  add_writing("MixStreams", Writing::mix);
  add_writing("AddToStreams", Writing::add);
  add_writing("BeginStreams", Writing::begin);
  add_writing("EndStreams", Writing::end);
  for (const Element element : {kSingle, kHalf}) {
    const OrtElement type = onnx_element(element);
    const auto add_rotation = [&](const char* op_type, bool pairs) {
      add(op_type, Elements(3, type), {type}, [=](auto* api) { return new RotateNode(api, op_type, pairs, element); });
    };
    add_rotation("RotateHeads", false);
    add_rotation("RotatePairs", true);
    const auto add_gate = [&](const char* op_type, Activation activation) {
      add(op_type, Elements(2, type), {type},
          [=](auto* api) { return new GatedNode(api, op_type, activation, element); });
    };
    add_gate("GatedGelu", Activation::gelu);
    add_gate("GatedGeluTanh", Activation::gelu_tanh);
    add_gate("GatedSilu", Activation::silu);
  }
  return operators;
}

OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  return guarded(api, [&] { *kernel = of(op).make(api, info); });
}

OrtStatus* compute(void* data, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(data);
  return guarded(node.api(), [&] { node.compute(context); });
}

// A shape that is not known comes as one without dimensions, and stays unknown; so do those that no input has, which
// the file tells.
OrtStatus* infer_shape(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const OrtApi* api = of(op).api;
  return guarded(api, [&] {
    for (size_t i = 0; i < of(op).shape_of.size(); ++i) {
      OrtTensorTypeAndShapeInfo* shape = nullptr;  // owned by the context
      size_t rank = 0;
      check(ort::ShapeInferContext_GetInputTypeShape(api, context, of(op).shape_of[i], &shape));
      check(ort::GetDimensionsCount(api, shape, &rank));
      if (rank != 0) check(ort::ShapeInferContext_SetOutputTypeShape(api, context, i, shape));
    }
  });
}

void complete(Operator& op, const OrtApi* api) {
  op.version = kApiVersion;
  op.api = api;
  op.GetName = [](const OrtCustomOp* self) { return of(self).op_type.c_str(); };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU
  op.GetInputType = [](const OrtCustomOp* self, size_t index) { return of(self).inputs[index]; };
  op.GetInputTypeCount = [](const OrtCustomOp* self) { return of(self).inputs.size(); };
  op.GetOutputType = [](const OrtCustomOp* self, size_t index) { return of(self).outputs[index]; };
  op.GetOutputTypeCount = [](const OrtCustomOp* self) { return of(self).outputs.size(); };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetInputCharacteristic = op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kDefaultMemory; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.InferOutputShapeFn = infer_shape;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
}

// A domain and its operators, which must outlive every session that uses them: they go when the library does.
class Domain {
 public:
  Domain(const OrtApi* api, const char* name, std::vector<Operator> operators)
      : api_(api), operators_(std::move(operators)) {
    check(ort::CreateCustomOpDomain(api, name, &domain_));
    for (Operator& op : operators_) {
      complete(op, api);
      check(ort::CustomOpDomain_Add(api, domain_, &op));
    }
  }
  Domain(const Domain&) = delete;
  ~Domain() { ort::ReleaseCustomOpDomain(api_, domain_); }

  OrtCustomOpDomain* get() const { return domain_; }

 private:
  const OrtApi* api_;
  OrtCustomOpDomain* domain_ = nullptr;
  std::vector<Operator> operators_;
};

struct Domains {
  explicit Domains(const OrtApi* api)
      : attention(api, "localattn", attention_operators()), fused(api, "localattn.fused", fused_operators()) {}
  Domain attention, fused;
};

// One set of domains for each onnxruntime in the process.
const Domains& domains_of(const OrtApi* api) {
  static std::mutex mutex;
  static std::map<const OrtApi*, std::unique_ptr<Domains>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Domains>& domains = known[api];
  if (domains == nullptr) domains = std::make_unique<Domains>(api);
  return *domains;
}

}  // namespace
}  // namespace localattn

// The entry point that onnxruntime's `register_custom_ops_library` calls.
EXPORTED localattn::OrtStatus* RegisterCustomOps(localattn::OrtSessionOptions* options,
                                                 const localattn::OrtApiBase* base) {
  using namespace localattn;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    const std::string message = std::string("onnxruntime ") + base->GetVersionString() +
                                " is too old for the kernels of localattn: they need 1." + std::to_string(kApiVersion);
    return ort::CreateStatus(base->GetApi(1), kFail, message.c_str());
  }
  return guarded(api, [&] {
    const Domains& domains = domains_of(api);
    check(ort::AddCustomOpDomain(api, options, domains.attention.get()));
    check(ort::AddCustomOpDomain(api, options, domains.fused.get()));
  });
}

// For `localattn plugin check`: "avx512", "avx2", "neon" or "baseline".
EXPORTED const char* localattn_instruction_set() { return localattn::instruction_set(); }
