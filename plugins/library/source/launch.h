// Loading a kernel into the current CUDA context, and launching it with the arguments that every kernel takes:
// pointers of the inputs, seven int32, the pointer of the output.
#pragma once

#include "attributes.h"
#include "driver.h"
#include "kernels.h"

#include <cstdint>
#include <string>

namespace localattn {

// Sizes of one call.
struct Sizes {
  int64_t batch;
  int64_t length;
  int64_t heads;
};

// A kernel, ready in a CUDA context.
struct Loaded {
  Kernel const* kernel{nullptr};
  Function function{nullptr};
};

// Why a kernel cannot compute these sizes; empty if it can.
std::string whyTooLarge(Attributes const& attributes, Sizes const& sizes);

// The kernel in the current context, loaded at the first call; false with the reason in `why`. Safe to call from
// several threads.
bool load(KernelKey const& key, Loaded& loaded, std::string& why);

// Runs it on `stream`. `inputs` are query, key, value, then key mask and bias if the kernel has them.
bool launch(Loaded const& loaded, Attributes const& attributes, Sizes const& sizes, void const* const* inputs,
            void* output, Stream stream, std::string& why);

}  // namespace localattn
