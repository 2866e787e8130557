// The operators as onnxruntime is told of them, and the function by which it asks.
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "attention.h"
#include "kernel.h"
#include "onnxruntime_c.h"
#include "status.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace localattn {
namespace {

constexpr char kDomain[] = "localattn";
constexpr Element kHalf = Element::fp16, kSingle = Element::fp32;

// The names are those of core/node.py. The operators with xpos are missing: their function body computes them.
constexpr Signature kSignatures[] = {
    {"WindowedAttention", false, false, kSingle, kSingle},
    {"WindowedAttention", false, false, kHalf, kHalf},
    {"WindowedAttentionMask", true, false, kSingle, kSingle},
    {"WindowedAttentionMask", true, false, kHalf, kHalf},
    {"WindowedAttentionBias", false, true, kSingle, kSingle},
    {"WindowedAttentionBias", false, true, kHalf, kHalf},
    {"WindowedAttentionBias", false, true, kHalf, kSingle},
    {"WindowedAttentionMaskBias", true, true, kSingle, kSingle},
    {"WindowedAttentionMaskBias", true, true, kHalf, kHalf},
    {"WindowedAttentionMaskBias", true, true, kHalf, kSingle},
};

struct Operator : OrtCustomOp {
  Signature signature;
  const OrtApi* api;
};

const Operator& of(const OrtCustomOp* op) { return *static_cast<const Operator*>(op); }

OrtElement onnx_element(Element element) { return element == kHalf ? kFloat16 : kFloat; }

OrtElement input_type(const OrtCustomOp* op, size_t index) {
  const Signature& signature = of(op).signature;
  if (index < 3) return onnx_element(signature.element);
  return signature.has_mask && index == 3 ? kBool : onnx_element(signature.bias_element);
}

OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  return guarded(api, [&] { *kernel = new Kernel(api, of(op).signature, info); });
}

OrtStatus* compute(void* data, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(data);
  return guarded(kernel.api(), [&] { kernel.compute(context); });
}

// The output has the query's shape. A shape that is not known comes as one without dimensions, and stays unknown.
OrtStatus* infer_shape(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const OrtApi* api = of(op).api;
  return guarded(api, [&] {
    OrtTensorTypeAndShapeInfo* query = nullptr;  // owned by the context
    size_t rank = 0;
    check(ort::ShapeInferContext_GetInputTypeShape(api, context, 0, &query));
    check(ort::GetDimensionsCount(api, query, &rank));
    if (rank == 4) check(ort::ShapeInferContext_SetOutputTypeShape(api, context, 0, query));
  });
}

Operator make_operator(const OrtApi* api, const Signature& signature) {
  Operator op{};
  op.version = kApiVersion;
  op.signature = signature;
  op.api = api;
  op.GetName = [](const OrtCustomOp* self) { return of(self).signature.op_type; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU
  op.GetInputType = input_type;
  op.GetInputTypeCount = [](const OrtCustomOp* self) { return of(self).signature.inputs(); };
  op.GetOutputType = [](const OrtCustomOp* self, size_t) { return onnx_element(of(self).signature.element); };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetInputCharacteristic = op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kDefaultMemory; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.InferOutputShapeFn = infer_shape;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

// The domain and its operators, which must outlive every session that uses them: they go when the library does.
class Domain {
 public:
  explicit Domain(const OrtApi* api) : api_(api) {
    check(ort::CreateCustomOpDomain(api, kDomain, &domain_));
    size_t index = 0;
    for (const Signature& signature : kSignatures) {
      operators_[index] = make_operator(api, signature);
      check(ort::CustomOpDomain_Add(api, domain_, &operators_[index++]));
    }
  }
  Domain(const Domain&) = delete;
  ~Domain() { ort::ReleaseCustomOpDomain(api_, domain_); }

  OrtCustomOpDomain* get() const { return domain_; }

 private:
  const OrtApi* api_;
  OrtCustomOpDomain* domain_ = nullptr;
  Operator operators_[sizeof(kSignatures) / sizeof(kSignatures[0])];
};

// One domain for each onnxruntime in the process.
OrtCustomOpDomain* domain_of(const OrtApi* api) {
  static std::mutex mutex;
  static std::map<const OrtApi*, std::unique_ptr<Domain>> domains;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Domain>& domain = domains[api];
  if (domain == nullptr) domain = std::make_unique<Domain>(api);
  return domain->get();
}

}  // namespace
}  // namespace localattn

// What `register_custom_ops_library` of onnxruntime looks for.
EXPORTED localattn::OrtStatus* RegisterCustomOps(localattn::OrtSessionOptions* options,
                                                 const localattn::OrtApiBase* base) {
  using namespace localattn;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    const std::string message = std::string("onnxruntime ") + base->GetVersionString() +
                                " is too old for the kernels of localattn: they need 1." + std::to_string(kApiVersion);
    return ort::CreateStatus(base->GetApi(1), kFail, message.c_str());
  }
  return guarded(api, [&] { check(ort::AddCustomOpDomain(api, options, domain_of(api))); });
}

// For `localattn plugin check`: "avx512", "avx2", "neon" or "baseline".
EXPORTED const char* localattn_instruction_set() { return localattn::instruction_set(); }
