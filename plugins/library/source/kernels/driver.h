// The CUDA driver, opened with dlopen at the first use, so that this library links no NVIDIA library and loads
// on machines without a GPU. Only the entry points used here, with the types of the driver's ABI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;

namespace localattn {

using Result = int;  // CUresult; 0 is success
using Device = int;
using Context = CUctx_st*;
using Module = CUmod_st*;
using Function = CUfunc_st*;
using Stream = CUstream_st*;
using Address = unsigned long long;  // CUdeviceptr

struct Driver {
  Result (*init)(unsigned flags);
  Result (*contextCurrent)(Context* context);
  Result (*contextPush)(Context context);
  Result (*contextPop)(Context* context);
  Result (*contextDevice)(Device* device);
  Result (*contextId)(Context context, unsigned long long* id);  // since CUDA 12.0; may be null
  Result (*streamContext)(Stream stream, Context* context);
  Result (*exchangeCaptureMode)(int* mode);
  Result (*deviceAttribute)(int* value, int attribute, Device device);
  Result (*moduleLoad)(Module* module, void const* image, unsigned count, int* options, void** values);
  Result (*moduleFunction)(Function* function, Module module, char const* name);
  Result (*moduleUnload)(Module module);
  Result (*functionLoad)(Function function);  // since CUDA 12.4; may be null
  Result (*functionSetAttribute)(Function function, int attribute, int value);
  Result (*launch)(Function function, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,
                   unsigned blockZ, unsigned sharedBytes, Stream stream, void** arguments, void** extra);
  // Memory in the order of a stream, since CUDA 11.2; the first two may be null.
  Result (*allocate)(Address* address, size_t bytes, Stream stream);
  Result (*release)(Address address, Stream stream);
  Result (*copy)(Address to, Address from, size_t bytes, Stream stream);
  Result (*errorName)(Result result, char const** name);
  Result (*errorText)(Result result, char const** text);

  // "CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected"
  std::string describe(Result result) const;
};

// The driver, or null where there is none; `why` then says what failed. Opened once a process.
Driver const* driver(std::string& why);

}  // namespace localattn
