// A stand-in for TensorRT's plugin registry, laid out by NVIDIA's headers of TensorRT 10: `loadLibrary` opens a library
// and takes what its `getCreators` returns. VERSION is the release that it claims to be.
#include <NvInferRuntime.h>

#include <dlfcn.h>

#include <vector>

using namespace nvinfer1;

namespace {

class Registry final : public IPluginRegistry {
 public:
  bool registerCreator(IPluginCreator&, AsciiChar const* const) noexcept override { return false; }
  IPluginCreator* const* getPluginCreatorList(int32_t* const) const noexcept override { return nullptr; }
  IPluginCreator* getPluginCreator(AsciiChar const* const, AsciiChar const* const,
                                   AsciiChar const* const) noexcept override {
    return nullptr;
  }
  void setErrorRecorder(IErrorRecorder* const) noexcept override {}
  IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
  bool deregisterCreator(IPluginCreator const&) noexcept override { return false; }
  bool isParentSearchEnabled() const override { return false; }
  void setParentSearchEnabled(bool const) override {}
  PluginLibraryHandle loadLibrary(AsciiChar const* path) noexcept override {
    void* const library = dlopen(path, RTLD_LAZY);
    if (library == nullptr) {
      return nullptr;
    }
    int32_t count = 0;
    auto const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
    IPluginCreatorInterface* const* all = get(count);
    mCreators.insert(mCreators.end(), all, all + count);
    return library;
  }
  void deregisterLibrary(PluginLibraryHandle) noexcept override {}
  bool registerCreator(IPluginCreatorInterface&, AsciiChar const* const) noexcept override { return false; }
  IPluginCreatorInterface* const* getAllCreators(int32_t* const count) const noexcept override {
    *count = static_cast<int32_t>(mCreators.size());
    return mCreators.data();
  }
  IPluginCreatorInterface* getCreator(AsciiChar const* const, AsciiChar const* const,
                                      AsciiChar const* const) noexcept override {
    return nullptr;
  }
  bool deregisterCreator(IPluginCreatorInterface const&) noexcept override { return false; }
  IPluginResource* acquirePluginResource(AsciiChar const*, IPluginResource*) noexcept override { return nullptr; }
  int32_t releasePluginResource(AsciiChar const*) noexcept override { return 0; }
  IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* const) noexcept override { return nullptr; }

 private:
  std::vector<IPluginCreatorInterface*> mCreators;
};

}  // namespace

extern "C" {

int32_t getInferLibVersion() noexcept { return VERSION; }

IPluginRegistry* getPluginRegistry() noexcept {
  static Registry registry;
  return &registry;
}

void* createInferBuilder_INTERNAL(void* logger, int32_t) noexcept { return logger; }

}  // extern "C"
