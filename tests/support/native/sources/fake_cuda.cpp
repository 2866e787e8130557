// A stand-in for libcuda.so.1 on machines without a GPU. It computes nothing: it writes each call that matters as a
// line of JSON into the file $FAKE_CUDA_LOG, and the PTX it is given into $FAKE_CUDA_LOG.ptx, so that a test can
// compare the arguments of a launch with the kernel's contract, and repeat the launch on a machine for PTX.
//
// FAKE_CUDA_CAPABILITY: compute capability, "87" for 8.7.  FAKE_CUDA_REFUSE: "cubin", "ptx" or "all" are not loaded.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

struct Function {
  std::string entry;
  bool isPtx;
};

int capability() {
  char const* text = std::getenv("FAKE_CUDA_CAPABILITY");
  return text != nullptr ? std::atoi(text) : 80;
}

bool refused(bool isPtx) {
  char const* text = std::getenv("FAKE_CUDA_REFUSE");
  std::string const what = text != nullptr ? text : "";
  return what == "all" || what == (isPtx ? "ptx" : "cubin");
}

void record(std::string const& line) {
  if (std::FILE* log = std::fopen(std::getenv("FAKE_CUDA_LOG"), "a")) {
    std::fprintf(log, "%s\n", line.c_str());
    std::fclose(log);
  }
}

void keep(char const* ptx) {
  if (std::FILE* file = std::fopen((std::string(std::getenv("FAKE_CUDA_LOG")) + ".ptx").c_str(), "w")) {
    std::fputs(ptx, file);
    std::fclose(file);
  }
}

bool has(std::string const& text, char const* part) { return text.find(part) != std::string::npos; }

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }

int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(uintptr_t{0x1000});
  return 0;
}

int cuCtxGetId(void*, unsigned long long* id) {
  *id = 7;
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? capability() / 10 : capability() % 10;
  return attribute == 75 || attribute == 76 ? 0 : 1;
}

int cuModuleLoadDataEx(void** module, void const* image, unsigned, int*, void**) {
  bool const isPtx = std::memcmp(image, "\177ELF", 4) != 0;
  bool const refuse = refused(isPtx);
  record(std::string("{\"call\": \"load\", \"ptx\": ") + (isPtx ? "true" : "false") +
         ", \"refused\": " + (refuse ? "true" : "false") + "}");
  if (isPtx && !refuse) {
    keep(static_cast<char const*>(image));
  }
  *module = new bool(isPtx);
  return refuse ? 209 : 0;
}

int cuModuleGetFunction(void** function, void* module, char const* name) {
  *function = new Function{name, *static_cast<bool*>(module)};
  return 0;
}

int cuModuleUnload(void*) { return 0; }

int cuFuncSetAttribute(void*, int attribute, int value) {
  record("{\"call\": \"attribute\", \"attribute\": " + std::to_string(attribute) +
         ", \"value\": " + std::to_string(value) + "}");
  return 0;
}

int cuLaunchKernel(void* handle, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,
                   unsigned blockZ, unsigned sharedBytes, void* stream, void** arguments, void** extra) {
  Function const& function = *static_cast<Function*>(handle);
  int const pointers = 3 + (has(function.entry, "_mask") ? 1 : 0) + (has(function.entry, "_bias") ? 1 : 0);
  std::string line = "{\"call\": \"launch\", \"entry\": \"" + function.entry +
                     "\", \"ptx\": " + (function.isPtx ? "true" : "false") + ", \"grid\": [" + std::to_string(gridX) +
                     ", " + std::to_string(gridY) + ", " + std::to_string(gridZ) + "], \"block\": [" +
                     std::to_string(blockX) + ", " + std::to_string(blockY) + ", " + std::to_string(blockZ) +
                     "], \"shared\": " + std::to_string(sharedBytes) +
                     ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(stream)) +
                     ", \"extra\": " + (extra != nullptr ? "true" : "false") + ", \"inputs\": [";
  for (int i = 0; i < pointers; ++i) {
    line += (i != 0 ? ", " : "") + std::to_string(*static_cast<uint64_t*>(arguments[i]));
  }
  line += "], \"scalars\": [";
  for (int i = 0; i < 7; ++i) {
    line += (i != 0 ? ", " : "") + std::to_string(*static_cast<int32_t*>(arguments[pointers + i]));
  }
  record(line + "], \"output\": " + std::to_string(*static_cast<uint64_t*>(arguments[pointers + 7])) + "}");
  return 0;
}

int cuGetErrorName(int, char const** name) {
  *name = "CUDA_ERROR_NO_BINARY_FOR_GPU";
  return 0;
}

int cuGetErrorString(int, char const** text) {
  *text = "no kernel image is available";
  return 0;
}

}  // extern "C"
