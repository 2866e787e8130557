// The part of a host that uses TensorRT, linked to it: as Triton Server's backend, onnxruntime's provider and
// DeepStream's element are. It calls TensorRT by name, so another library of the process may answer first.
#include <cstdint>

#include "versioned_logger.h"

extern "C" {

void* getPluginRegistry() noexcept;
void* createInferBuilder_INTERNAL(void* logger, int32_t version) noexcept;
int32_t getInferLibVersion() noexcept;

// Creators that TensorRT knows: IPluginRegistry::getAllCreators, at its place in the release.
int32_t creators() {
  void* const registry = getPluginRegistry();
  int32_t const version = getInferLibVersion();
  bool const isNew = version >= 110000 || version < 100000;
  int32_t count = -1;
  using GetAll = void* const* (*)(void*, int32_t*);
  reinterpret_cast<GetAll>((*static_cast<void***>(registry))[isNew ? 9 : 13])(registry, &count);
  return count;
}

// What hosts do first: TensorRT gets its logger.
bool start() {
  static Logger logger;
  return createInferBuilder_INTERNAL(&logger, getInferLibVersion()) != nullptr;
}

// `loadLibrary` of the registry, for hosts that know plugin libraries.
bool load(char const* path) {
  void* const registry = getPluginRegistry();
  int32_t const version = getInferLibVersion();
  bool const isNew = version >= 110000 || version < 100000;
  using Load = void* (*)(void*, char const*);
  return reinterpret_cast<Load>((*static_cast<void***>(registry))[isNew ? 6 : 10])(registry, path) != nullptr;
}

}  // extern "C"
