#include "launch.h"

#include "log.h"

#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <tuple>

namespace localattn {
namespace {

// CUdevice_attribute, CUfunction_attribute and CUjit_option, as cuda.h numbers them.
constexpr int kCAPABILITY_MAJOR = 75;
constexpr int kCAPABILITY_MINOR = 76;
constexpr int kMAX_DYNAMIC_SHARED = 8;
constexpr int kJIT_ERROR_LOG = 5;
constexpr int kJIT_ERROR_LOG_SIZE = 6;
// More shared memory than this a kernel has to ask for.
constexpr int32_t kFREE_SHARED_BYTES = 48 * 1024;
// Of the launch grid's second axis.
constexpr int64_t kMAX_BATCH_HEADS = 65535;
// What the kernels' loads assume of every tensor's address, in bytes.
constexpr uintptr_t kALIGNMENT = 16;

bool isAligned(void const* address) { return reinterpret_cast<uintptr_t>(address) % kALIGNMENT == 0; }

// The current context. Its address may be used again by a later context; its id is not.
bool currentContext(Driver const& cuda, unsigned long long& id, int32_t& capability, std::string& why) {
  Context context = nullptr;
  Result result = cuda.contextCurrent(&context);
  if (result == 0 && context == nullptr) {
    why = "no CUDA context is current on this thread";
    return false;
  }
  id = reinterpret_cast<uintptr_t>(context);
  if (result == 0 && cuda.contextId != nullptr) {
    result = cuda.contextId(context, &id);
  }
  Device device = 0;
  int major = 0;
  int minor = 0;
  result = result != 0 ? result : cuda.contextDevice(&device);
  result = result != 0 ? result : cuda.deviceAttribute(&major, kCAPABILITY_MAJOR, device);
  result = result != 0 ? result : cuda.deviceAttribute(&minor, kCAPABILITY_MINOR, device);
  if (result != 0) {
    why = "asking for the current GPU: " + cuda.describe(result);
    return false;
  }
  capability = 10 * major + minor;
  return true;
}

// One image into the current context.
bool loadImage(Driver const& cuda, Kernel const& kernel, Loaded& loaded, std::string& why) {
  char messages[2048] = "";
  int options[] = {kJIT_ERROR_LOG, kJIT_ERROR_LOG_SIZE};
  void* values[] = {messages, reinterpret_cast<void*>(uintptr_t{sizeof(messages)})};
  Module module = nullptr;
  Function function = nullptr;
  char const* step = "loading";
  Result result = cuda.moduleLoad(&module, kernel.image, 2, options, values);
  if (result == 0) {
    step = "finding";
    result = cuda.moduleFunction(&function, module, kernel.entry);
  }
  if (result == 0 && kernel.sharedBytes > kFREE_SHARED_BYTES) {
    step = "reserving shared memory for";
    result = cuda.functionSetAttribute(function, kMAX_DYNAMIC_SHARED, kernel.sharedBytes);
  }
  if (result != 0) {
    messages[sizeof(messages) - 1] = '\0';
    why = std::string(step) + " kernel " + kernel.entry + " (" + (kernel.isPtx ? "PTX of" : "machine code of") +
          " sm_" + std::to_string(kernel.capability) + "): " + cuda.describe(result) + " " + messages;
    if (module != nullptr) {
      cuda.moduleUnload(module);
    }
    return false;
  }
  loaded = Loaded{&kernel, function};
  return true;
}

bool loadBest(Driver const& cuda, KernelKey const& key, int32_t capability, Loaded& loaded, std::string& why) {
  for (int32_t rank = 0;; ++rank) {
    Kernel const* kernel = chooseKernel(key, capability, rank);
    if (kernel == nullptr) {
      if (rank == 0) {
        why = "no kernel for " + describeKey(key) + " on compute capability " + std::to_string(capability / 10) + "." +
              std::to_string(capability % 10) +
              " in this plugin library; build one that has it with: " + howToBuild(key, capability);
      }
      return false;
    }
    std::string reason;
    if (loadImage(cuda, *kernel, loaded, reason)) {
      return true;
    }
    why += (why.empty() ? "" : "; ") + reason;
    say(Severity::kWARNING, reason);
  }
}

}  // namespace

std::string whyTooLarge(Attributes const& attributes, Sizes const& sizes) {
  if (sizes.batch * sizes.heads > kMAX_BATCH_HEADS) {
    return "batch times heads is " + std::to_string(sizes.batch * sizes.heads) + ", above " +
           std::to_string(kMAX_BATCH_HEADS);
  }
  int64_t const furthest = sizes.length + attributes.keysPerWindow() + attributes.windowSize;
  if (furthest > std::numeric_limits<int32_t>::max()) {
    return "length " + std::to_string(sizes.length) + " and " + std::to_string(attributes.keysPerWindow()) +
           " keys a window overflow 32-bit positions";
  }
  return "";
}

bool load(KernelKey const& key, Loaded& loaded, std::string& why) {
  using Place = std::tuple<unsigned long long, Element, int32_t, bool, bool>;
  static std::mutex guard;
  static std::map<Place, Loaded> cache;  // modules live as long as their context

  Driver const* cuda = driver(why);
  if (cuda == nullptr) {
    return false;
  }
  unsigned long long context = 0;
  int32_t capability = 0;
  if (!currentContext(*cuda, context, capability, why)) {
    return false;
  }
  Place const place{context, key.element, key.headDim, key.hasMask, key.hasBias};
  std::lock_guard<std::mutex> const lock(guard);
  auto const found = cache.find(place);
  if (found != cache.end()) {
    loaded = found->second;
    return true;
  }
  if (!loadBest(*cuda, key, capability, loaded, why)) {
    return false;
  }
  cache.emplace(place, loaded);
  return true;
}

bool launch(Loaded const& loaded, Attributes const& attributes, Sizes const& sizes, void const* const* inputs,
            void* output, Stream stream, std::string& why) {
  Kernel const& kernel = *loaded.kernel;
  int32_t const pointers = 3 + (kernel.key.hasMask ? 1 : 0) + (kernel.key.hasBias ? 1 : 0);
  int32_t scaleBits = 0;
  static_assert(sizeof(scaleBits) == sizeof(attributes.scale), "the scale travels as its bits");
  std::memcpy(&scaleBits, &attributes.scale, sizeof(scaleBits));
  int32_t scalars[] = {static_cast<int32_t>(sizes.length),
                       static_cast<int32_t>(sizes.heads),
                       attributes.windowSize,
                       attributes.lookBackward,
                       attributes.lookForward,
                       attributes.flags(),
                       scaleBits};

  void const* addresses[5];
  void* arguments[5 + 7 + 1];
  int32_t count = 0;
  bool aligned = isAligned(output);
  for (int32_t i = 0; i < pointers; ++i) {
    addresses[i] = inputs[i];
    arguments[count++] = &addresses[i];
    aligned = aligned && isAligned(inputs[i]);
  }
  for (int32_t& scalar : scalars) {
    arguments[count++] = &scalar;
  }
  arguments[count++] = &output;

  if (!aligned) {
    why = "a tensor does not start at a multiple of " + std::to_string(kALIGNMENT) + " bytes";
    return false;
  }
  Driver const* cuda = driver(why);
  if (cuda == nullptr) {
    return false;
  }
  unsigned const blocks = static_cast<unsigned>((sizes.length + kernel.blockQueries - 1) / kernel.blockQueries);
  Result const result = cuda->launch(loaded.function, blocks, static_cast<unsigned>(sizes.batch * sizes.heads), 1,
                                     static_cast<unsigned>(kernel.threads), 1, 1,
                                     static_cast<unsigned>(kernel.sharedBytes), stream, arguments, nullptr);
  if (result != 0) {
    why = std::string("launching kernel ") + kernel.entry + ": " + cuda->describe(result);
    return false;
  }
  return true;
}

}  // namespace localattn
