#include "kernels/context.h"

namespace localattn {
namespace {

// CUdevice_attribute and CUstreamCaptureMode, as cuda.h numbers them.
constexpr int kCAPABILITY_MAJOR = 75;
constexpr int kCAPABILITY_MINOR = 76;
constexpr int kRELAXED = 2;

}  // namespace

InContext::InContext(Driver const& cuda, Stream stream, std::string& why) : mCuda(cuda) {
  Context context = nullptr;
  Result result = cuda.contextCurrent(&context);
  if (result == 0 && context == nullptr) {
    if (stream == nullptr) {
      why = "no CUDA context is current on this thread";
      return;
    }
    result = cuda.streamContext(stream, &context);
    result = result != 0 ? result : cuda.contextPush(context);
    mPushed = result == 0;
  }
  if (result != 0) {
    why = "asking for the CUDA context: " + cuda.describe(result);
    return;
  }
  mContext = context;
}

InContext::~InContext() {
  if (mPushed) {
    Context popped = nullptr;
    mCuda.contextPop(&popped);
  }
}

bool InContext::identify(unsigned long long& id, std::string& why) const {
  id = reinterpret_cast<uintptr_t>(mContext);
  Result const result = mCuda.contextId != nullptr ? mCuda.contextId(mContext, &id) : 0;
  if (result != 0) {
    why = "asking for the CUDA context: " + mCuda.describe(result);
  }
  return result == 0;
}

bool InContext::capability(int32_t& value, std::string& why) const {
  Device device = 0;
  int major = 0;
  int minor = 0;
  Result result = mCuda.contextDevice(&device);
  result = result != 0 ? result : mCuda.deviceAttribute(&major, kCAPABILITY_MAJOR, device);
  result = result != 0 ? result : mCuda.deviceAttribute(&minor, kCAPABILITY_MINOR, device);
  if (result != 0) {
    why = "asking for the current GPU: " + mCuda.describe(result);
    return false;
  }
  value = 10 * major + minor;
  return true;
}

WhileCapturing::WhileCapturing(Driver const& cuda)
    : mCuda(cuda), mMode(kRELAXED), mExchanged(cuda.exchangeCaptureMode(&mMode) == 0) {}

WhileCapturing::~WhileCapturing() {
  if (mExchanged) {
    mCuda.exchangeCaptureMode(&mMode);
  }
}

}  // namespace localattn
