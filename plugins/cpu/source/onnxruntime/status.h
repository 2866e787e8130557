// Errors on their way to onnxruntime: C++ exceptions inside, an OrtStatus with their message at the boundary.
#pragma once

#include <exception>
#include <sstream>
#include <stdexcept>

#include "onnxruntime/onnxruntime_c.h"

namespace localattn {

// An error that one of onnxruntime's functions reported; it is returned unchanged.
struct Reported {
  OrtStatus* status;
};

inline void check(OrtStatus* status) {
  if (status != nullptr) throw Reported{status};
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Runs `body`; returns null, or a status with the reason of the failure.
template <class Body>
OrtStatus* guarded(const OrtApi* api, Body body) {
  try {
    body();
    return nullptr;
  } catch (const Reported& reported) {
    return reported.status;
  } catch (const std::invalid_argument& error) {
    return ort::CreateStatus(api, kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return ort::CreateStatus(api, kFail, error.what());
  }
}

}  // namespace localattn
