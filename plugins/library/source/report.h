// Exported C functions beyond TensorRT's interface, for `localattn` and for the companion library that registers this
// one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace localattn {

void noteRegistration() noexcept;

}  // namespace localattn

extern "C" {

// How often TensorRT has asked for the creators.
int32_t localattn_registrations() noexcept;

// The kernels that this process has loaded, a line each; the number of bytes, which may be more than `capacity`.
size_t localattn_loaded_kernels(char* text, size_t capacity) noexcept;

// Loads one kernel into the current CUDA context: 0 if it is there, with its line in `text`, else with the reason.
// `element` is a number of `Element`; `options` are some of `OptionBit` (kernels.h), added.
int32_t localattn_load_kernel_with(int32_t element, int32_t headDim, int32_t options, char* text,
                                   size_t capacity) noexcept;
}
