// The compiled kernels inside this library: the table that the build writes, and how one is chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

namespace localattn {

// Of what a kernel reads; the outputs of those that read fp8 (E4M3) are fp16.
enum class Element : int32_t { kFP16 = 0, kBF16 = 1, kFP32 = 2, kFP8 = 3 };

char const* elementName(Element element);

// What is compiled in besides element type and head size.
struct Options {
  bool mask;
  bool bias;
  bool xpos;
  bool softcap;
  bool sinks;
  bool sharedQk;
  bool aft;     // a kernel of AFT-local's nodes, whose only other options are mask and causal
  bool causal;  // attention tells it at run time
  // Of steps and chunks, and of what joins their splits.
  bool ring{false};
  bool chunked{false};
  bool joins{false};

  auto tied() const { return std::tie(mask, bias, xpos, softcap, sinks, sharedQk, aft, causal, ring, chunked, joins); }
  bool operator==(Options const& other) const { return tied() == other.tied(); }
  bool operator<(Options const& other) const { return tied() < other.tied(); }
  // Of tensors that a kernel of attention with them reads.
  int32_t inputs() const { return (aft ? 4 : 3) + (mask ? 1 : 0) + (bias ? 1 : 0) + (sinks ? 1 : 0); }
};

// The options as a number, added: in the tables of op types, and where others ask for a kernel (report.h).
enum OptionBit : int32_t {
  kWITH_MASK = 1 << 0,
  kWITH_BIAS = 1 << 1,
  kWITH_XPOS = 1 << 2,
  kWITH_SOFTCAP = 1 << 3,
  kWITH_SINKS = 1 << 4,
  kSHARED_QK = 1 << 5,
  kOF_AFT = 1 << 6,
  kCAUSAL_AFT = 1 << 7,
  kOF_RING = 1 << 8,
  kCHUNKED = 1 << 9,
  kJOINS = 1 << 10,
};

Options optionsOf(int32_t bits);

// What a kernel was compiled for.
struct KernelKey {
  Element element;
  int32_t headDim;  // 0 of AFT-local's, and of what joins
  Options options;

  auto tied() const { return std::tie(element, headDim, options); }
  bool operator==(KernelKey const& other) const { return tied() == other.tied(); }
  bool operator<(KernelKey const& other) const { return tied() < other.tied(); }
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

// Whether there is a kernel for some GPU, with a head size below 0 of any head size.
bool haveKernel(KernelKey const& key);

// "fp16 with heads of 64 …", and the command that builds a library with the kernel.
std::string describeKey(KernelKey const& key);
std::string howToBuild(KernelKey const& key, int32_t capability);

}  // namespace localattn
