#include "log.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <mutex>
#include <set>

// TensorRT 11 and TensorRT-RTX 1.7 put the functions of IVersionedInterface before those that ILogger and ILoggerFinder
// have in TensorRT 10. A library compiled with the headers of one would crash in the other, so the place of the
// functions is not taken from the headers but from the release of the TensorRT that owns the finder.
namespace localattn {
namespace {

// Index of ILoggerFinder::findLogger and of ILogger::log in the tables of virtual functions, as the Itanium C++ ABI
// lays them out; IVersionedInterface has two functions and its destructor two entries.
constexpr int32_t kUNKNOWN = -1;
constexpr int32_t kIN_TENSORRT_10 = 0;
constexpr int32_t kIN_TENSORRT_11 = 4;

// `version` is what getInferLibVersion returns: 10.3.0 is 100300, 11.1.0 is 110100, TensorRT-RTX 1.7.1 is 10701.
int32_t indexIn(int32_t version) {
  bool const isRtx = version < 100000;
  if (isRtx) {
    return version >= 10700 ? kIN_TENSORRT_11 : kUNKNOWN;
  }
  return version >= 110000 ? kIN_TENSORRT_11 : kIN_TENSORRT_10;
}

// The index for an object of TensorRT's, by the library that its table of functions lies in.
int32_t indexFor(void const* object) {
  Dl_info owner{};
  if (dladdr(*static_cast<void* const*>(object), &owner) == 0 || owner.dli_fname == nullptr) {
    return kUNKNOWN;
  }
  void* library = dlopen(owner.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  void* const entry = dlsym(library != nullptr ? library : RTLD_DEFAULT, "getInferLibVersion");
  if (library != nullptr) {
    dlclose(library);
  }
  return entry != nullptr ? indexIn(reinterpret_cast<int32_t (*)()>(entry)()) : kUNKNOWN;
}

template <typename Signature>
Signature* functionOf(void* object, int32_t index) {
  return reinterpret_cast<Signature*>((*static_cast<void***>(object))[index]);
}

std::mutex gGuard;
void* gFinder = nullptr;
int32_t gIndex = kUNKNOWN;

// False if there is no logger.
bool log(Severity severity, char const* text) {
  std::lock_guard<std::mutex> const lock(gGuard);
  if (gFinder == nullptr || gIndex == kUNKNOWN) {
    return false;
  }
  void* const logger = functionOf<void*(void*)>(gFinder, gIndex)(gFinder);
  if (logger == nullptr) {
    return false;
  }
  functionOf<void(void*, Severity, char const*)>(logger, gIndex)(logger, severity, text);
  return true;
}

}  // namespace

void useLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept {
  int32_t const index = finder != nullptr ? indexFor(finder) : kUNKNOWN;
  std::lock_guard<std::mutex> const lock(gGuard);
  gFinder = finder;
  gIndex = index;
}

void say(Severity severity, std::string const& text) noexcept {
  try {
    std::string const line = "localattn: " + text;
    if (!log(severity, line.c_str()) && severity <= Severity::kWARNING) {
      std::fprintf(stderr, "%s\n", line.c_str());
    }
  } catch (...) {
    // No memory for a message: nothing left to say.
  }
}

void sayOnce(Severity severity, std::string const& text) noexcept {
  try {
    static std::mutex guard;
    static std::set<std::string> said;
    std::lock_guard<std::mutex> const lock(guard);
    if (!said.insert(text).second) {
      return;
    }
  } catch (...) {
    return;
  }
  say(severity, text);
}

}  // namespace localattn
