// Loading a kernel into a CUDA context, and launching it with the arguments that every kernel takes: pointers of the
// inputs, int32, pointers of the outputs.
#pragma once

#include "kernels/attributes.h"
#include "kernels/driver.h"
#include "kernels/kernels.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace localattn {

// Of the launch grid's second axis: batch times heads.
constexpr int64_t kMOST_GROUPS = 65535;
// Channels of a program of AFT-local's kernel.
constexpr int64_t kAFT_CHANNELS = 32;

// Sizes of one call.
struct Sizes {
  int64_t batch;
  int64_t length;
  int64_t heads;
  int64_t kvHeads;
  // Of AFT-local, whose groups of kAFT_CHANNELS channels count as heads: how many channels, and the biases' reach.
  int64_t channels{0};
  int64_t reach{0};
};

// A kernel, ready in a CUDA context.
struct Loaded {
  Kernel const* kernel{nullptr};
  Function function{nullptr};
  int32_t capability{0};  // of the GPU
  std::string why;        // why it is not machine code; empty if it is
};

// Why a kernel cannot compute these sizes; sizes not known yet (below 0) are no reason. Empty if it can.
std::string whyTooLarge(Attributes const& attributes, Sizes const& sizes);

// The kernel in the current context, loaded at the first call; false with the reason in `why`. In a thread without a
// context it is loaded into that of `stream`, which may be null. Safe to call from several threads, and while a stream
// is captured.
bool load(KernelKey const& key, Stream stream, Loaded& loaded, std::string& why);

// A float as an int32 argument.
int32_t bitsOf(float value);

// A tensor of a call.
struct Operand {
  char const* name;
  size_t bytes;
  void const* address;
};

// One launch: what a kernel reads, its int32 arguments, what it writes, and the first two axes of the grid.
struct Call {
  std::vector<Operand> inputs;
  std::vector<int32_t> scalars;
  std::vector<Operand> outputs;
  int64_t blocks;
  int64_t groups;
};

// Launches a kernel on `stream`, loading it if need be; the call may depend on the kernel that was chosen. Tensors that
// do not start where the kernel's loads need it are copied.
bool launch(KernelKey const& key, std::function<Call(Kernel const&)> const& callOf, Stream stream, std::string& why);

// Runs attention or AFT-local on `stream`. `inputs` are query, key, value, then those of key mask, bias and sinks
// that the kernel has; of AFT-local those of the node.
bool run(KernelKey const& key, Attributes const& attributes, Sizes const& sizes, void const* const* inputs,
         void* output, Stream stream, std::string& why);

// Every kernel that this process has loaded, each once, in words: variant, GPU, and which machine code or PTX.
std::vector<Loaded> loadedKernels();
std::string describe(Loaded const& loaded);

}  // namespace localattn
