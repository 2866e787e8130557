// A CUDA runtime whose one GPU is this machine's memory: buffers can be made, filled and read, and kernels do nothing.
// The functions that onnxruntime's providers import and that are not here answer 0, see `cuda_stand_in.py`.
#include <cstdlib>
#include <cstring>

// Where cudaDeviceProp (driver_types.h) has its members, in CUDA 12 and 13.
enum { MEMORY = 288, SHARED = 296, REGISTERS = 304, WARP = 308, THREADS = 320, MAJOR = 360, MINOR = 364 };
static int something;

static int allocate(void** at, size_t bytes) {
  *at = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *at == 0;
}

extern "C" {

int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cudaGetDeviceProperties(char* of, int device) {
  memset(of, 0, 512);
  strcpy(of, "memory");
  *(size_t*)(of + MEMORY) = (size_t)8 << 30;
  *(size_t*)(of + SHARED) = 48 << 10;
  *(int*)(of + REGISTERS) = 65536;
  *(int*)(of + WARP) = 32;
  *(int*)(of + THREADS) = 1024;
  *(int*)(of + MAJOR) = 8;
  *(int*)(of + MINOR) = 6;
  return 0;
}
int cudaGetDeviceProperties_v2(char* of, int device) {
  return cudaGetDeviceProperties(of, device);
}  // its name in CUDA 12
int cudaMalloc(void** at, size_t bytes) { return allocate(at, bytes); }
int cudaMallocHost(void** at, size_t bytes) { return allocate(at, bytes); }
int cudaHostAlloc(void** at, size_t bytes, unsigned flags) { return allocate(at, bytes); }
int cudaFree(void* at) {
  free(at);
  return 0;
}
int cudaFreeHost(void* at) {
  free(at);
  return 0;
}
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  memcpy(to, from, bytes);
  return 0;
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  memcpy(to, from, bytes);
  return 0;
}
int cudaMemGetInfo(size_t* left, size_t* total) {
  *left = *total = (size_t)8 << 30;
  return 0;
}
int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  *stream = &something;
  return 0;
}
int cudaEventCreateWithFlags(void** event, unsigned flags) {
  *event = &something;
  return 0;
}
int cudaStreamEndCapture(void* stream, void** graph) {
  *graph = &something;
  return 0;
}
int cudaGraphInstantiate(void** made, void* graph, unsigned long long flags) {
  *made = &something;
  return 0;
}
void** __cudaRegisterFatBinary(void* binary) {
  static void* handle;
  return &handle;
}
const char* cudaGetErrorName(int error) { return "error"; }
const char* cudaGetErrorString(int error) { return "an error of the stand-in"; }

}  // extern "C"
