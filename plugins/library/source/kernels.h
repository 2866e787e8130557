// The compiled kernels inside this library: the table that the build writes, and how one is chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace localattn {

enum class Element : int32_t { kFP16 = 0, kBF16 = 1, kFP32 = 2 };

char const* elementName(Element element);

// What a kernel was compiled for.
struct KernelKey {
  Element element;
  int32_t headDim;
  bool hasMask;
  bool hasBias;

  bool operator==(KernelKey const& other) const {
    return element == other.element && headDim == other.headDim && hasMask == other.hasMask && hasBias == other.hasBias;
  }
};

// One kernel for one GPU: machine code (a cubin) or PTX text, ended by a zero byte, that the driver compiles.
struct Kernel {
  KernelKey key;
  int32_t capability;  // 87 for compute capability 8.7; for PTX the lowest it runs on
  bool isPtx;
  char const* entry;
  int32_t blockQueries;
  int32_t threads;
  int32_t sharedBytes;
  void const* image;
  size_t imageBytes;
};

// Written by the build (table.cpp).
extern Kernel const kKERNELS[];
extern size_t const kKERNEL_COUNT;
extern char const kVERSION[];  // of localattn

// The kernel to use on a GPU: `rank` 0 the best, then what to try if the driver does not take it; null when there is
// no other. Machine code of exactly this compute capability comes first, then PTX, newest first, not above it.
Kernel const* chooseKernel(KernelKey const& key, int32_t capability, int32_t rank);

// Whether there is a kernel for some GPU, of this element type at least (`headDim` < 0: of any head size).
bool haveKernel(Element element, int32_t headDim, bool hasMask, bool hasBias);

// "fp16 with heads of 64 …", and the command that builds a library with the kernel.
std::string describeKey(KernelKey const& key);
std::string howToBuild(KernelKey const& key, int32_t capability);

}  // namespace localattn
