// A logger as TensorRT 11 and TensorRT-RTX 1.7 want it: an IVersionedInterface; it writes to stderr.
#pragma once

#include <cstdint>
#include <cstdio>

struct Logger {
  virtual int32_t getAPILanguage() const noexcept { return 0; }
  struct Info {
    char const* kind;
    int32_t major;
    int32_t minor;
  };
  virtual Info getInterfaceInfo() const noexcept { return {"LOGGER", 1, 0}; }
  virtual ~Logger() noexcept = default;
  virtual void log(int32_t severity, char const* text) noexcept {
    if (severity <= 2) {
      std::fprintf(stderr, "[logger %d] %s\n", severity, text);
    }
  }
};
