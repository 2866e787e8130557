// The state of a thread that CUDA calls depend on: its current context, and its mode during a stream capture. Both are
// restored.
#pragma once

#include "kernels/driver.h"

#include <cstdint>
#include <string>

namespace localattn {

// Has a context current while it lives: that of this thread, or, in a thread that has none, that of the stream.
class InContext {
 public:
  // `stream` may be null: then the thread must have a context. `why` says what failed.
  InContext(Driver const& cuda, Stream stream, std::string& why);
  ~InContext();
  InContext(InContext const&) = delete;
  InContext& operator=(InContext const&) = delete;

  bool good() const { return mContext != nullptr; }
  // A context's address may be used again by a later context; its id is not.
  bool identify(unsigned long long& id, std::string& why) const;
  // 87 for compute capability 8.7.
  bool capability(int32_t& value, std::string& why) const;

 private:
  Driver const& mCuda;
  Context mContext{nullptr};
  bool mPushed{false};
};

// Lets this thread load a module while it lives, although a stream is being captured into a CUDA graph: loading is no
// work of a stream, so nothing of it gets into the graph.
class WhileCapturing {
 public:
  explicit WhileCapturing(Driver const& cuda);
  ~WhileCapturing();
  WhileCapturing(WhileCapturing const&) = delete;
  WhileCapturing& operator=(WhileCapturing const&) = delete;

 private:
  Driver const& mCuda;
  int mMode;
  bool mExchanged;
};

}  // namespace localattn
