// A stand-in for libcuda.so.1 on machines without a GPU. It computes nothing: it writes each call that matters as a
// line of JSON into the file $FAKE_CUDA_LOG, and the PTX it is given into $FAKE_CUDA_LOG.ptx and $FAKE_CUDA_LOG.ENTRY,
// so that a test can compare the arguments of a launch with the kernel's contract, and repeat the launch on a machine
// for PTX.
//
// FAKE_CUDA_CAPABILITY: compute capability, "87" for 8.7.  FAKE_CUDA_REFUSE: "cubin", "ptx" or "all" are not loaded.
// FAKE_CUDA_CONTEXT: "none": no thread has a context; "lost": nor has the stream.
// FAKE_CUDA_CAPTURING: the stream is being captured: what could synchronise fails, but in a thread of relaxed mode.
// FAKE_CUDA_MEMORY: "none": no memory in the order of a stream.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

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
  std::string const text = ptx;
  size_t const at = text.find(".entry ") + 7;
  std::string const entry = text.substr(at, text.find('(', at) - at);
  if (std::FILE* file = std::fopen((std::string(std::getenv("FAKE_CUDA_LOG")) + "." + entry).c_str(), "w")) {
    std::fputs(ptx, file);
    std::fclose(file);
  }
}

std::string variable(char const* name) {
  char const* text = std::getenv(name);
  return text != nullptr ? text : "";
}

constexpr int kCAPTURE_UNSUPPORTED = 900;
constexpr int kNOT_SUPPORTED = 801;
constexpr uintptr_t kTHREADS_CONTEXT = 0x1000;
constexpr uintptr_t kSTREAMS_CONTEXT = 0x2000;

thread_local std::vector<uintptr_t> contexts{variable("FAKE_CUDA_CONTEXT").empty() ? kTHREADS_CONTEXT : 0};
thread_local int captureMode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL

uintptr_t current() { return contexts.empty() ? 0 : contexts.back(); }

// Whether a call that could synchronise breaks the capture.
bool breaksCapture() { return !variable("FAKE_CUDA_CAPTURING").empty() && captureMode != 2; }

bool has(std::string const& text, char const* part) { return text.find(part) != std::string::npos; }

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }

int cuDeviceGet(int* device, int index) {
  *device = index;
  return index == 0 ? 0 : 101;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = reinterpret_cast<void*>(uintptr_t{0x3000});
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int) { return 0; }

int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(current());
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(reinterpret_cast<uintptr_t>(context));
  record("{\"call\": \"push\", \"context\": " + std::to_string(current()) + "}");
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = reinterpret_cast<void*>(current());
  contexts.pop_back();
  record("{\"call\": \"pop\", \"left\": " + std::to_string(current()) + "}");
  return 0;
}

int cuStreamGetCtx(void*, void** context) {
  *context = reinterpret_cast<void*>(kSTREAMS_CONTEXT);
  return variable("FAKE_CUDA_CONTEXT") == "lost" ? 201 : 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, captureMode);
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
  if (breaksCapture()) {
    return kCAPTURE_UNSUPPORTED;
  }
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

int cuFuncLoad(void*) {
  record("{\"call\": \"function_load\"}");
  return breaksCapture() ? kCAPTURE_UNSUPPORTED : 0;
}

int cuMemAllocAsync(uint64_t* address, size_t bytes, void* stream) {
  static uint64_t next = 0xA00000000;
  if (variable("FAKE_CUDA_MEMORY") == "none") {
    return kNOT_SUPPORTED;
  }
  *address = next;
  next += 0x10000000;
  record("{\"call\": \"allocate\", \"address\": " + std::to_string(*address) + ", \"bytes\": " + std::to_string(bytes) +
         ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(stream)) + "}");
  return 0;
}

int cuMemFreeAsync(uint64_t address, void* stream) {
  record("{\"call\": \"free\", \"address\": " + std::to_string(address) +
         ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(stream)) + "}");
  return 0;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  record("{\"call\": \"copy\", \"to\": " + std::to_string(to) + ", \"from\": " + std::to_string(from) +
         ", \"bytes\": " + std::to_string(bytes) +
         ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(stream)) + "}");
  return 0;
}

int cuLaunchKernel(void* handle, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,
                   unsigned blockZ, unsigned sharedBytes, void* stream, void** arguments, void** extra) {
  Function const& function = *static_cast<Function*>(handle);
  bool const aft = has(function.entry, "_aft");
  bool const join = has(function.entry, "_join");
  bool const chunk = has(function.entry, "_chunk_");
  bool const ring = chunk || has(function.entry, "_step_");
  int const scales = !ring || !has(function.entry, "_xpos") ? 0 : chunk ? 2 : 1;
  int const outputs = ring ? 4 : 1;
  int const pointers = (join   ? 1
                        : ring ? 7 + scales
                        : aft  ? 4
                               : 3) +
                       (has(function.entry, "_mask") ? 1 : 0) + (has(function.entry, "_bias") ? 1 : 0) +
                       (has(function.entry, "_sinks") ? 1 : 0);
  int const scalars = join ? 3 : ring ? 9 : aft ? 4 : 10;
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
  for (int i = 0; i < scalars; ++i) {
    line += (i != 0 ? ", " : "") + std::to_string(*static_cast<int32_t*>(arguments[pointers + i]));
  }
  for (int i = 0; ring && i < outputs; ++i) {
    line += (i != 0 ? ", " : "], \"outputs\": [") +
            std::to_string(*static_cast<uint64_t*>(arguments[pointers + scalars + i]));
  }
  record(line + "], \"output\": " + std::to_string(*static_cast<uint64_t*>(arguments[pointers + scalars])) +
         ", \"context\": " + std::to_string(current()) + ", \"capture_mode\": " + std::to_string(captureMode) + "}");
  return 0;
}

int cuGetErrorName(int result, char const** name) {
  *name = result == kCAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
          : result == kNOT_SUPPORTED     ? "CUDA_ERROR_NOT_SUPPORTED"
          : result == 201                ? "CUDA_ERROR_INVALID_CONTEXT"
                                         : "CUDA_ERROR_NO_BINARY_FOR_GPU";
  return 0;
}

int cuGetErrorString(int result, char const** text) {
  *text = result == 209 ? "no kernel image is available" : "refused";
  return 0;
}

}  // extern "C"
