// Scratch memory of a task. A thread keeps a little of it from one task to the next; more is given back at once.
#pragma once

#include <cstddef>

namespace localattn {

// Holds at least so many floats for as long as it lives, from a multiple of 64 bytes on, with any content. A thread has
// one at a time.
class Scratch {
 public:
  explicit Scratch(size_t floats);
  ~Scratch();
  Scratch(const Scratch&) = delete;

  // Null if there is no memory.
  float* data() const { return data_; }

 private:
  bool kept_;
  float* data_;
};

}  // namespace localattn
