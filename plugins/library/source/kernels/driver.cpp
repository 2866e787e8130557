#include "kernels/driver.h"

#include <dlfcn.h>

namespace localattn {
namespace {

constexpr char const* kLIBRARY = "libcuda.so.1";

struct Opened {
  Driver driver{};
  bool good{false};
  std::string why;

  Opened() {
    void* library = dlopen(kLIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      char const* reason = dlerror();
      why = reason != nullptr ? reason : std::string("cannot open ") + kLIBRARY;
      return;
    }
    // The suffixes are those that cuda.h gives these names since CUDA 4 and 11.
    if (!find(library, "cuInit", driver.init) || !find(library, "cuCtxGetCurrent", driver.contextCurrent) ||
        !find(library, "cuCtxPushCurrent_v2", driver.contextPush) ||
        !find(library, "cuCtxPopCurrent_v2", driver.contextPop) ||
        !find(library, "cuCtxGetDevice", driver.contextDevice) ||
        !find(library, "cuStreamGetCtx", driver.streamContext) ||
        !find(library, "cuThreadExchangeStreamCaptureMode", driver.exchangeCaptureMode) ||
        !find(library, "cuDeviceGetAttribute", driver.deviceAttribute) ||
        !find(library, "cuModuleLoadDataEx", driver.moduleLoad) ||
        !find(library, "cuModuleGetFunction", driver.moduleFunction) ||
        !find(library, "cuModuleUnload", driver.moduleUnload) ||
        !find(library, "cuFuncSetAttribute", driver.functionSetAttribute) ||
        !find(library, "cuMemcpyDtoDAsync_v2", driver.copy) || !find(library, "cuLaunchKernel", driver.launch) ||
        !find(library, "cuGetErrorName", driver.errorName) || !find(library, "cuGetErrorString", driver.errorText)) {
      return;
    }
    look(library, "cuCtxGetId", driver.contextId);
    look(library, "cuFuncLoad", driver.functionLoad);
    look(library, "cuMemAllocAsync", driver.allocate);
    look(library, "cuMemFreeAsync", driver.release);
    Result const result = driver.init(0);
    if (result != 0) {
      why = "cuInit: " + driver.describe(result);
      return;
    }
    good = true;
  }

  template <typename Pointer>
  void look(void* library, char const* name, Pointer& pointer) {
    pointer = reinterpret_cast<Pointer>(dlsym(library, name));
  }

  template <typename Pointer>
  bool find(void* library, char const* name, Pointer& pointer) {
    look(library, name, pointer);
    if (pointer == nullptr) {
      why = std::string(kLIBRARY) + " has no " + name;
    }
    return pointer != nullptr;
  }
};

}  // namespace

std::string Driver::describe(Result result) const {
  char const* name = nullptr;
  char const* text = nullptr;
  errorName(result, &name);
  errorText(result, &text);
  return std::string(name != nullptr ? name : "CUDA error") + " (" + std::to_string(result) +
         "): " + (text != nullptr ? text : "unknown");
}

Driver const* driver(std::string& why) {
  static Opened const opened;
  if (!opened.good) {
    why = opened.why;
    return nullptr;
  }
  return &opened.driver;
}

}  // namespace localattn
