// Stand-ins for libnvinfer and libcudart of a machine where TensorRT does not start: a GPU is seen, and no more works.
#include <cuda_runtime_api.h>

#include <cstdint>

extern "C" {

void* createInferRuntime_INTERNAL(void*, int32_t) noexcept { return nullptr; }

#ifdef CUDART
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

char const* cudaGetErrorString(cudaError_t) { return "stand-in"; }

cudaError_t cudaStreamCreate(cudaStream_t*) { return cudaErrorUnknown; }

cudaError_t cudaMalloc(void**, size_t) { return cudaErrorUnknown; }

cudaError_t cudaMemcpyAsync(void*, void const*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaErrorUnknown; }

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaErrorUnknown; }

cudaError_t cudaFree(void*) { return cudaErrorUnknown; }

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaErrorUnknown; }
#endif

}  // extern "C"
