// The part of onnxruntime's C interface that the library uses, declared here because onnxruntime's packages bring no
// headers. The interface is a table of functions that only ever grows at its end: onnxruntime asserts the positions of
// every release, and a table asked for as release N has at least the functions of N. So a position is enough to call.
// Source: onnxruntime_c_api.h of onnxruntime; positions counted in the order of `struct OrtApi`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace localattn {

// The release of the interface this library is written for, that of onnxruntime 1.17: the first whose custom operators
// may use the session's own threads and report errors.
constexpr uint32_t kApiVersion = 17;

// Objects whose contents only onnxruntime knows.
struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtCustomOp;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;

enum OrtErrorCode : int { kFail = 1, kInvalidArgument = 2 };
// ONNXTensorElementDataType; its values are those of onnx.TensorProto.DataType.
enum OrtElement : int { kFloat = 1, kInt64 = 7, kBool = 9, kFloat16 = 10 };
// OrtCustomOpInputOutputCharacteristic and OrtMemType, as far as they are needed.
enum OrtPresence : int { kRequired = 0 };
enum OrtMemory : int { kDefaultMemory = 0 };

// The table. Functions return null, or a status that their caller owns.
struct OrtApi {
  const void* const slots[279];
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);  // null if this onnxruntime is older than `version`
  const char* (*GetVersionString)();
};

// One function of the table: its position and its parameters.
template <size_t position, class Result, class... Arguments>
struct Slot {
  static_assert(position < sizeof(OrtApi) / sizeof(void*), "not in the table of kApiVersion");
  Result operator()(const OrtApi* api, Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(reinterpret_cast<uintptr_t>(api->slots[position]))(arguments...);
  }
};

namespace ort {
constexpr Slot<0, OrtStatus*, OrtErrorCode, const char*> CreateStatus;
constexpr Slot<26, OrtStatus*, const char*, OrtCustomOpDomain**> CreateCustomOpDomain;
constexpr Slot<27, OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*> CustomOpDomain_Add;
constexpr Slot<28, OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*> AddCustomOpDomain;
constexpr Slot<51, OrtStatus*, OrtValue*, void**> GetTensorMutableData;
constexpr Slot<61, OrtStatus*, const OrtTensorTypeAndShapeInfo*, size_t*> GetDimensionsCount;
constexpr Slot<62, OrtStatus*, const OrtTensorTypeAndShapeInfo*, int64_t*, size_t> GetDimensions;
constexpr Slot<65, OrtStatus*, const OrtValue*, OrtTensorTypeAndShapeInfo**> GetTensorTypeAndShape;
constexpr Slot<85, OrtStatus*, const OrtKernelInfo*, const char*, float*> KernelInfoGetAttribute_float;
constexpr Slot<86, OrtStatus*, const OrtKernelInfo*, const char*, int64_t*> KernelInfoGetAttribute_int64;
constexpr Slot<90, OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**> KernelContext_GetInput;
constexpr Slot<91, OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**> KernelContext_GetOutput;
constexpr Slot<93, void, OrtStatus*> ReleaseStatus;
constexpr Slot<99, void, OrtTensorTypeAndShapeInfo*> ReleaseTensorTypeAndShapeInfo;
constexpr Slot<101, void, OrtCustomOpDomain*> ReleaseCustomOpDomain;
constexpr Slot<163, OrtStatus*, const OrtKernelInfo*, const char*, int64_t*, size_t*> KernelInfoGetAttributeArray_int64;
constexpr Slot<268, OrtStatus*, const OrtShapeInferContext*, size_t, OrtTensorTypeAndShapeInfo**>
    ShapeInferContext_GetInputTypeShape;
constexpr Slot<270, OrtStatus*, const OrtShapeInferContext*, size_t, const OrtTensorTypeAndShapeInfo*>
    ShapeInferContext_SetOutputTypeShape;
// Calls function(data, 0 … total - 1) on the session's threads, in `batches` pieces of work.
constexpr Slot<274, OrtStatus*, const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*>
    KernelContext_ParallelFor;
}  // namespace ort

// An operator for onnxruntime: a record of functions, of which onnxruntime reads as many as `version` had. The last
// four came with 18 and are never read here; they exist so that no reader runs past the end.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  OrtElement (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  OrtElement (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  OrtPresence (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  OrtPresence (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  OrtMemory (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

}  // namespace localattn
