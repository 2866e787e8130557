// Memory besides tensors. A thread keeps a little of it from one task to the next; more is given back to the system.
#pragma once

#include <cstddef>

namespace localattn {

// This many floats with any content, aligned to 64 bytes; none for 0.
class Memory {
 public:
  explicit Memory(size_t floats);
  ~Memory();
  Memory(const Memory&) = delete;

  // Null if there is no memory.
  float* data() const { return data_; }

 private:
  size_t mapped_;  // bytes that came from the system itself
  float* data_;
};

// The same for a task, from the memory that its thread keeps if that is enough. A thread has one at a time.
class Scratch {
 public:
  explicit Scratch(size_t floats);

  float* data() const { return data_; }

 private:
  Memory own_;
  float* data_;
};

}  // namespace localattn
