#include "kernels/launch.h"

#include "kernels/context.h"
#include "log.h"

#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace localattn {
namespace {

// CUfunction_attribute and CUjit_option, as cuda.h numbers them.
constexpr int kMAX_DYNAMIC_SHARED = 8;
constexpr int kJIT_ERROR_LOG = 5;
constexpr int kJIT_ERROR_LOG_SIZE = 6;
// Kernels must request shared memory above this size.
constexpr int32_t kFREE_SHARED_BYTES = 48 * 1024;
// The alignment in bytes that the kernels' loads assume for every tensor.
constexpr uintptr_t kALIGNMENT = 16;

bool isAligned(Address address) { return address % kALIGNMENT == 0; }

// One image into the current context.
bool loadImage(Driver const& cuda, Kernel const& kernel, Loaded& loaded, std::string& why) {
  char messages[2048] = "";
  int options[] = {kJIT_ERROR_LOG, kJIT_ERROR_LOG_SIZE};
  void* values[] = {messages, reinterpret_cast<void*>(uintptr_t{sizeof(messages)})};
  Module module = nullptr;
  Function function = nullptr;
  char const* step = "loading";
  WhileCapturing const allowed(cuda);
  Result result = cuda.moduleLoad(&module, kernel.image, 2, options, values);
  if (result == 0) {
    step = "finding";
    result = cuda.moduleFunction(&function, module, kernel.entry);
  }
  if (result == 0 && kernel.sharedBytes > kFREE_SHARED_BYTES) {
    step = "reserving shared memory for";
    result = cuda.functionSetAttribute(function, kMAX_DYNAMIC_SHARED, kernel.sharedBytes);
  }
  if (result == 0 && cuda.functionLoad != nullptr) {
    // Otherwise a driver that loads lazily would load it at the first launch.
    step = "loading the function of";
    result = cuda.functionLoad(function);
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
  loaded.kernel = &kernel;
  loaded.function = function;
  return true;
}

std::string capabilityText(int32_t capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

bool loadBest(Driver const& cuda, KernelKey const& key, int32_t capability, Loaded& loaded, std::string& why) {
  std::string refused;
  for (int32_t rank = 0;; ++rank) {
    Kernel const* kernel = chooseKernel(key, capability, rank);
    if (kernel == nullptr) {
      why = rank != 0 ? refused
                      : "no kernel for " + describeKey(key) + " on compute capability " + capabilityText(capability) +
                            " in this plugin library; build one that has it with: " + howToBuild(key, capability);
      return false;
    }
    std::string reason;
    if (!loadImage(cuda, *kernel, loaded, reason)) {
      refused += (refused.empty() ? "" : "; ") + reason;
      continue;
    }
    loaded.capability = capability;
    if (kernel->isPtx) {
      loaded.why = !refused.empty() ? refused : "this library has no machine code of sm_" + std::to_string(capability);
    }
    sayOnce(kernel->isPtx ? Severity::kWARNING : Severity::kINFO, describe(loaded));
    return true;
  }
}

using Place = std::pair<unsigned long long, KernelKey>;

std::mutex gGuard;

// What was loaded: modules live as long as their context.
std::map<Place, Loaded>& loadedAt() {
  static std::map<Place, Loaded> places;
  return places;
}

bool loadHere(Driver const& cuda, InContext const& here, KernelKey const& key, Loaded& loaded, std::string& why) {
  unsigned long long context = 0;
  if (!here.identify(context, why)) {
    return false;
  }
  Place const place{context, key};
  std::lock_guard<std::mutex> const lock(gGuard);
  auto const found = loadedAt().find(place);
  if (found != loadedAt().end()) {
    loaded = found->second;
    return true;
  }
  int32_t capability = 0;
  if (!here.capability(capability, why) || !loadBest(cuda, key, capability, loaded, why)) {
    return false;
  }
  loadedAt().emplace(place, loaded);
  return true;
}

// Where a kernel reads or writes one tensor: at its own address, or in an aligned copy that lives as long as this.
class Aligned {
 public:
  Aligned(Driver const& cuda, Stream stream, Address own, size_t bytes)
      : mCuda(cuda), mStream(stream), mOwn(own), mBytes(bytes), mUsed(own) {}
  ~Aligned() {
    if (mUsed != mOwn) {
      mCuda.release(mUsed, mStream);
    }
  }
  Aligned(Aligned const&) = delete;
  Aligned& operator=(Aligned const&) = delete;

  bool prepare(std::string const& name, bool isInput, std::string& why) {
    if (isAligned(mOwn)) {
      return true;
    }
    std::string const what = name + " does not start at a multiple of " + std::to_string(kALIGNMENT) + " bytes";
    if (mCuda.allocate == nullptr || mCuda.release == nullptr) {
      why = what + ", and this driver has no memory in the order of a stream to copy it to";
      return false;
    }
    Address copy = 0;
    Result result = mCuda.allocate(&copy, mBytes, mStream);
    if (result == 0) {
      mUsed = copy;
      result = isInput ? mCuda.copy(mUsed, mOwn, mBytes, mStream) : 0;
    }
    if (result != 0) {
      why = what + ", and it cannot be copied: " + mCuda.describe(result);
      return false;
    }
    sayOnce(Severity::kWARNING, what + ": it is copied at every call");
    return true;
  }

  bool giveBack(std::string& why) {
    Result const result = mUsed != mOwn ? mCuda.copy(mOwn, mUsed, mBytes, mStream) : 0;
    if (result != 0) {
      why = "copying the output to its place: " + mCuda.describe(result);
    }
    return result == 0;
  }

  Address* address() { return &mUsed; }

 private:
  Driver const& mCuda;
  Stream mStream;
  Address mOwn;
  size_t mBytes;
  Address mUsed;
};

size_t bytesOf(Element element) { return element == Element::kFP32 ? 4 : element == Element::kFP8 ? 1 : 2; }

// What a kernel reads, in order.
std::vector<Operand> inputsOf(KernelKey const& key, Attributes const& attributes, Sizes const& sizes,
                              void const* const* addresses) {
  size_t const element = bytesOf(key.element);
  std::vector<Operand> all;
  auto const add = [&](char const* name, int64_t count, size_t size) {
    all.push_back({name, static_cast<size_t>(count) * size, addresses[all.size()]});
  };
  if (key.options.aft) {
    int64_t const count = sizes.length * sizes.batch * sizes.channels;
    add("gate", count, element);
    add("key", count, element);
    add("value", count, element);
    add("position_bias", sizes.length * ((key.options.causal ? 1 : 2) * sizes.reach + 1), element);
  } else {
    int64_t const shared = sizes.batch * sizes.length * sizes.kvHeads * key.headDim;
    add("query", sizes.batch * sizes.length * sizes.heads * key.headDim, element);
    add("key", shared, element);
    add("value", shared, element);
  }
  if (key.options.mask) {
    add("key_mask", sizes.batch * sizes.length, 1);
  }
  if (key.options.bias) {
    add("attn_bias", sizes.heads * attributes.windowSize * attributes.keysPerWindow(), element);
  }
  if (key.options.sinks) {
    add("sinks", sizes.heads, element);
  }
  return all;
}

// The int32 arguments, in order.
std::vector<int32_t> scalarsOf(KernelKey const& key, Attributes const& attributes, Sizes const& sizes) {
  int32_t const length = static_cast<int32_t>(sizes.length);
  if (key.options.aft) {
    return {length, static_cast<int32_t>(sizes.batch), static_cast<int32_t>(sizes.channels),
            static_cast<int32_t>(sizes.reach)};
  }
  return {length,
          static_cast<int32_t>(sizes.heads),
          static_cast<int32_t>(sizes.kvHeads),
          attributes.seesAll() ? length : attributes.windowSize,
          attributes.lookBackward,
          attributes.lookForward,
          attributes.flags(),
          bitsOf(attributes.scale),
          bitsOf(attributes.softcap),
          bitsOf(attributes.xposScaleBase)};
}

}  // namespace

int32_t bitsOf(float value) {
  int32_t bits = 0;
  static_assert(sizeof(bits) == sizeof(value), "floats travel as their bits");
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

std::string describe(Loaded const& loaded) {
  Kernel const& kernel = *loaded.kernel;
  std::string const code = (kernel.isPtx ? "PTX of sm_" : "machine code of sm_") + std::to_string(kernel.capability);
  std::string const text = describeKey(kernel.key) + ": " + code;
  return !kernel.isPtx ? text
                       : text + ", compiled by the driver for compute capability " + capabilityText(loaded.capability) +
                             " (" + loaded.why + ")";
}

std::string whyTooLarge(Attributes const& attributes, Sizes const& sizes) {
  if (sizes.batch > 0 && sizes.heads > 0 && sizes.batch > kMOST_GROUPS / sizes.heads) {
    return "batch times heads is " + std::to_string(sizes.batch * sizes.heads) + ", above " +
           std::to_string(kMOST_GROUPS);
  }
  int64_t const most = std::numeric_limits<int32_t>::max();
  if (attributes.seesAll()) {
    return sizes.length <= most / 2 ? "" : "length " + std::to_string(sizes.length) + " overflows 32-bit positions";
  }
  if (sizes.length > most - attributes.keysPerWindow() - attributes.windowSize) {
    return "length " + std::to_string(sizes.length) + " and " + std::to_string(attributes.keysPerWindow()) +
           " keys a window overflow 32-bit positions";
  }
  return "";
}

bool load(KernelKey const& key, Stream stream, Loaded& loaded, std::string& why) {
  Driver const* cuda = driver(why);
  if (cuda == nullptr) {
    return false;
  }
  InContext const here(*cuda, stream, why);
  return here.good() && loadHere(*cuda, here, key, loaded, why);
}

bool launch(KernelKey const& key, std::function<Call(Kernel const&)> const& callOf, Stream stream, std::string& why) {
  Driver const* cuda = driver(why);
  if (cuda == nullptr) {
    return false;
  }
  InContext const here(*cuda, stream, why);
  Loaded loaded;
  if (!here.good() || !loadHere(*cuda, here, key, loaded, why)) {
    return false;
  }

  Kernel const& kernel = *loaded.kernel;
  Call call = callOf(kernel);
  std::deque<Aligned> tensors;
  std::vector<void*> arguments;
  auto const add = [&](Operand const& operand, bool isInput) {
    tensors.emplace_back(*cuda, stream, reinterpret_cast<Address>(operand.address), operand.bytes);
    arguments.push_back(tensors.back().address());
    return tensors.back().prepare(operand.name, isInput, why);
  };
  for (Operand const& input : call.inputs) {
    if (!add(input, true)) {
      return false;
    }
  }
  for (int32_t& scalar : call.scalars) {
    arguments.push_back(&scalar);
  }
  for (Operand const& output : call.outputs) {
    if (!add(output, false)) {
      return false;
    }
  }

  Result const launched = cuda->launch(loaded.function, static_cast<unsigned>(call.blocks),
                                       static_cast<unsigned>(call.groups), 1, static_cast<unsigned>(kernel.threads), 1,
                                       1, static_cast<unsigned>(kernel.sharedBytes), stream, arguments.data(), nullptr);
  if (launched != 0) {
    why = std::string("launching kernel ") + kernel.entry + ": " + cuda->describe(launched);
    return false;
  }
  for (size_t i = call.inputs.size(); i < tensors.size(); ++i) {
    if (!tensors[i].giveBack(why)) {
      return false;
    }
  }
  return true;
}

bool run(KernelKey const& key, Attributes const& attributes, Sizes const& sizes, void const* const* inputs,
         void* output, Stream stream, std::string& why) {
  auto const callOf = [&](Kernel const& kernel) {
    Call call{inputsOf(key, attributes, sizes, inputs), scalarsOf(key, attributes, sizes), {}, 0, 0};
    // As many elements as the query has; those of fp8 become fp16.
    call.outputs = {{"output", call.inputs[0].bytes * (key.element == Element::kFP8 ? 2 : 1), output}};
    call.blocks = (sizes.length + kernel.blockQueries - 1) / kernel.blockQueries;
    call.groups = sizes.batch * sizes.heads;
    return call;
  };
  return launch(key, callOf, stream, why);
}

std::vector<Loaded> loadedKernels() {
  std::lock_guard<std::mutex> const lock(gGuard);
  std::vector<Loaded> all;
  for (auto const& entry : loadedAt()) {
    bool known = false;
    for (Loaded const& other : all) {
      known = known || (other.kernel == entry.second.kernel && other.capability == entry.second.capability);
    }
    if (!known) {
      all.push_back(entry.second);
    }
  }
  return all;
}

}  // namespace localattn
