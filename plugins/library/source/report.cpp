#include "report.h"

#include "kernels/launch.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <string>

namespace localattn {
namespace {

std::atomic<int32_t> gRegistrations{0};

// As much as there is room for, and a zero byte; what it would take.
size_t write(std::string const& line, char* text, size_t capacity) noexcept {
  if (text != nullptr && capacity > 0) {
    size_t const count = line.size() < capacity ? line.size() : capacity - 1;
    std::memcpy(text, line.data(), count);
    text[count] = '\0';
  }
  return line.size() + 1;
}

}  // namespace

void noteRegistration() noexcept { ++gRegistrations; }

}  // namespace localattn

extern "C" {

__attribute__((visibility("default"))) int32_t localattn_registrations() noexcept {
  return localattn::gRegistrations.load();
}

__attribute__((visibility("default"))) size_t localattn_loaded_kernels(char* text, size_t capacity) noexcept {
  try {
    std::string lines;
    for (localattn::Loaded const& loaded : localattn::loadedKernels()) {
      lines += localattn::describe(loaded) + "\n";
    }
    return localattn::write(lines, text, capacity);
  } catch (std::exception const&) {
    return 0;
  }
}

__attribute__((visibility("default"))) int32_t localattn_load_kernel_with(int32_t element, int32_t headDim,
                                                                          int32_t options, char* text,
                                                                          size_t capacity) noexcept {
  try {
    localattn::KernelKey const key{static_cast<localattn::Element>(element), headDim, localattn::optionsOf(options)};
    localattn::Loaded loaded;
    std::string why;
    bool const good = localattn::load(key, nullptr, loaded, why);
    localattn::write(good ? localattn::describe(loaded) : why, text, capacity);
    return good ? 0 : -1;
  } catch (std::exception const& error) {
    localattn::write(error.what(), text, capacity);
    return -1;
  }
}

}  // extern "C"
