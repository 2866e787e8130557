// Registers the plugin library beside this one with every TensorRT of the process, for hosts that only open or preload
// libraries and never ask for `getCreators`: Triton Server, DeepStream, onnxruntime's TensorRT provider, trtexec's
// --staticPlugins.
//
// Where TensorRT is there already, this happens while the library is loaded. A library named in LD_PRELOAD is loaded
// long before TensorRT, so the three functions by which every program enters TensorRT are defined here too: the loader
// finds these definitions first, they register, and pass on what TensorRT's own functions return.
//
// For `libNAME_register.so` the plugin library is `libNAME.so` in the same folder.
#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

// Positions of IPluginRegistry::loadLibrary in its table of virtual functions, as the Itanium C++ ABI lays it out.
// TensorRT 11 and TensorRT-RTX 1.7 dropped four functions before it.
constexpr int32_t kUNKNOWN = -1;
constexpr int32_t kIN_TENSORRT_10 = 10;
constexpr int32_t kIN_TENSORRT_11 = 6;

// `version` is what getInferLibVersion returns: 10.3.0 is 100300, 11.1.0 is 110100, TensorRT-RTX 1.7.1 is 10701.
int32_t indexIn(int32_t version) {
  if (version < 100000) {
    return version >= 10700 ? kIN_TENSORRT_11 : kUNKNOWN;
  }
  return version >= 110000 ? kIN_TENSORRT_11 : kIN_TENSORRT_10;
}

void complain(std::string const& text) noexcept { std::fprintf(stderr, "localattn: %s\n", text.c_str()); }

// The object that an address lies in.
void* baseOf(void const* address) {
  Dl_info owner{};
  return dladdr(address, &owner) != 0 ? owner.dli_fbase : nullptr;
}

std::string ownPath() {
  Dl_info owner{};
  return dladdr(reinterpret_cast<void const*>(&ownPath), &owner) != 0 && owner.dli_fname != nullptr ? owner.dli_fname
                                                                                                    : "";
}

constexpr char kSUFFIX[] = "_register.so";
constexpr size_t kSUFFIX_LENGTH = sizeof(kSUFFIX) - 1;

// Path of the plugin library; empty if this one bears another name than it was built with.
std::string pluginPath() {
  std::string const own = ownPath();
  if (own.size() <= kSUFFIX_LENGTH || own.compare(own.size() - kSUFFIX_LENGTH, kSUFFIX_LENGTH, kSUFFIX) != 0) {
    return "";
  }
  return own.substr(0, own.size() - kSUFFIX_LENGTH) + ".so";
}

int collect(dl_phdr_info* info, size_t, void* names) {
  if (info->dlpi_name != nullptr && info->dlpi_name[0] != '\0') {
    static_cast<std::vector<std::string>*>(names)->push_back(info->dlpi_name);
  }
  return 0;
}

// A function of this object itself, not of what it depends on; null if it has none, or is not loaded.
void* functionOf(std::string const& object, char const* name) {
  void* const handle = dlopen(object.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) {
    return nullptr;
  }
  void* const function = dlsym(handle, name);
  void* const table = dlsym(handle, "getInferLibVersion");
  dlclose(handle);  // somebody else holds it
  Dl_info owner{};
  bool const own = function != nullptr && table != nullptr && baseOf(function) == baseOf(table) &&
                   dladdr(function, &owner) != 0 && owner.dli_fname != nullptr && object == owner.dli_fname;
  return own ? function : nullptr;
}

// Every TensorRT that is loaded, however it was: `RTLD_DEFAULT` does not see what a plugin of the host has brought.
std::vector<std::string> loadedTensorRTs() {
  std::vector<std::string> names;
  std::vector<std::string> found;
  dl_iterate_phdr(collect, &names);
  for (std::string const& name : names) {
    if (functionOf(name, "getPluginRegistry") != nullptr) {
      found.push_back(name);
    }
  }
  return found;
}

// Whether the host has given the plugin library to TensorRT itself; `mine`: how often this library did.
bool isRegistered(std::string const& plugin, int32_t mine) {
  void* const handle = dlopen(plugin.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) {
    return false;
  }
  auto const count = reinterpret_cast<int32_t (*)()>(dlsym(handle, "localattn_registrations"));
  dlclose(handle);
  return count != nullptr && count() > mine;
}

void registerWith(std::string const& tensorrt, std::string const& plugin) {
  static std::set<std::string> done;
  static int32_t mine = 0;
  if (!done.insert(tensorrt).second || isRegistered(plugin, mine)) {
    return;
  }
  auto const version = reinterpret_cast<int32_t (*)()>(functionOf(tensorrt, "getInferLibVersion"))();
  int32_t const index = indexIn(version);
  if (index == kUNKNOWN) {
    complain(tensorrt + " is release " + std::to_string(version) + ", which is unknown: no plugin is registered");
    return;
  }
  void* const registry = reinterpret_cast<void* (*)()>(functionOf(tensorrt, "getPluginRegistry"))();
  if (registry == nullptr) {
    complain(tensorrt + " has no plugin registry: no plugin is registered");
    return;
  }
  void* const function = (*static_cast<void***>(registry))[index];
  if (reinterpret_cast<void* (*)(void*, char const*)>(function)(registry, plugin.c_str()) == nullptr) {
    complain(tensorrt + " does not take " + plugin);
    return;
  }
  ++mine;
}

// Registers with each TensorRT that was not there before.
void registerEverywhere() noexcept {
  static std::recursive_mutex guard;
  static bool busy = false;
  try {
    std::lock_guard<std::recursive_mutex> const lock(guard);
    if (busy) {
      return;  // TensorRT calls its own functions, which are those below
    }
    busy = true;
    std::string const plugin = pluginPath();
    for (std::string const& tensorrt : loadedTensorRTs()) {
      if (plugin.empty()) {
        complain(ownPath() + " does not end in " + kSUFFIX + ": the plugin library beside it is not known");
        break;
      }
      registerWith(tensorrt, plugin);
    }
    busy = false;
  } catch (std::exception const& error) {
    busy = false;
    complain(error.what());
  }
}

// TensorRT's own function, as the caller's library would have found it without this one.
void* original(char const* name, void const* caller) noexcept {
  try {
    Dl_info from{};
    void* const self = baseOf(reinterpret_cast<void const*>(&original));
    if (dladdr(caller, &from) != 0 && from.dli_fname != nullptr) {
      if (void* const handle = dlopen(from.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
        void* const function = dlsym(handle, name);
        dlclose(handle);
        if (function != nullptr && baseOf(function) != self) {
          return function;
        }
      }
    }
    std::vector<std::string> const all = loadedTensorRTs();
    return all.empty() ? nullptr : functionOf(all.front(), name);
  } catch (std::exception const& error) {
    complain(error.what());
    return nullptr;
  }
}

__attribute__((constructor)) void atLoad() { registerEverywhere(); }

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void* getPluginRegistry() noexcept {
  registerEverywhere();
  void* const function = original("getPluginRegistry", __builtin_return_address(0));
  return function != nullptr ? reinterpret_cast<void* (*)() noexcept>(function)() : nullptr;
}

__attribute__((visibility("default"))) void* createInferRuntime_INTERNAL(void* logger, int32_t version) noexcept {
  void* const function = original("createInferRuntime_INTERNAL", __builtin_return_address(0));
  void* const made =
      function != nullptr ? reinterpret_cast<void* (*)(void*, int32_t) noexcept>(function)(logger, version) : nullptr;
  registerEverywhere();
  return made;
}

__attribute__((visibility("default"))) void* createInferBuilder_INTERNAL(void* logger, int32_t version) noexcept {
  void* const function = original("createInferBuilder_INTERNAL", __builtin_return_address(0));
  void* const made =
      function != nullptr ? reinterpret_cast<void* (*)(void*, int32_t) noexcept>(function)(logger, version) : nullptr;
  registerEverywhere();
  return made;
}

}  // extern "C"
