// What the programs that run CPU kernels on the cases of a file have in common: tensors that are heap blocks of exactly
// their size, threads, and scratch memory that is counted, or refused with DRIVE_NO_MEMORY. Included by one file each.
#pragma once

#include "kernels/attention/attention.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <stdlib.h>

std::atomic<size_t> largest_scratch{0};
// Tasks that a kernel gave back for want of memory.
std::atomic<int64_t> withoutMemory{0};

struct Free {
  void operator()(char* memory) const { free(memory); }
};
using Block = std::unique_ptr<char, Free>;

// A block that begins at a multiple of 64 bytes, or at any of 16.
inline Block block(size_t bytes, bool aligned = false) {
  void* memory = nullptr;
  if (posix_memalign(&memory, aligned ? 64 : 16, bytes) != 0) {
    throw std::bad_alloc();
  }
  return Block(static_cast<char*>(memory));
}

inline Block read(std::ifstream& file, size_t bytes, bool aligned = false) {
  Block data = block(bytes, aligned);
  file.read(data.get(), static_cast<std::streamsize>(bytes));
  return data;
}

// Outputs begin as NaN in every element type.
inline Block nothing(size_t bytes) {
  Block data = block(bytes);
  std::memset(data.get(), 0xff, bytes);
  return data;
}

// Calls run(0 … tasks - 1) on so many threads.
template <typename Run>
void onThreads(int64_t threads, int64_t tasks, Run const& run) {
  std::atomic<int64_t> next{0};
  auto const work = [&] {
    for (int64_t task = next++; task < tasks; task = next++) {
      run(task);
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) {
    others.emplace_back(work);
  }
  work();
  for (std::thread& other : others) {
    other.join();
  }
}

// The kernels' one way to memory.
extern "C" void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  void* memory = nullptr;
  if (std::getenv("DRIVE_NO_MEMORY") != nullptr || posix_memalign(&memory, alignment, bytes) != 0) {
    return nullptr;
  }
  size_t before = largest_scratch;
  while (before < bytes && !largest_scratch.compare_exchange_weak(before, bytes)) {
  }
  return memory;
}

// All cases of file `from`, each a Header and what run(header, in, out) reads after it and writes to file `to`; it
// returns the tasks. Prints the instruction set, the tasks of every case, how many tasks had no memory, and the largest
// block of scratch memory as JSON. The program's exit status.
template <typename Header, typename Run>
int runCases(char const* from, char const* to, Run const& run) {
  std::ifstream in(from, std::ios::binary);
  std::ofstream out(to, std::ios::binary);
  std::string tasks;
  Header header;
  while (in.read(reinterpret_cast<char*>(&header), sizeof header)) {
    tasks += (tasks.empty() ? "" : ", ") + std::to_string(run(header, in, out));
  }
  std::printf("{\"isa\": \"%s\", \"tasks\": [%s], \"without_memory\": %lld, \"scratch\": %zu}\n",
              localattn::instruction_set(), tasks.c_str(), static_cast<long long>(withoutMemory),
              largest_scratch.load());
  return out.flush() ? 0 : 1;
}
