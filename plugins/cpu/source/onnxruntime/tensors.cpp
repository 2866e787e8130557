#include "onnxruntime/tensors.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace localattn {
namespace {

// What the session's threads share during a call.
struct Work {
  const std::function<bool(int64_t)>* run;
  std::atomic<bool> failed{false};
};

void run_one(void* data, size_t task) {
  Work& work = *static_cast<Work*>(data);
  try {
    if (!(*work.run)(static_cast<int64_t>(task))) work.failed = true;
  } catch (...) {
    work.failed = true;
  }
}

}  // namespace

int64_t elements(const Dims& dims) {
  if (std::find(dims.begin(), dims.end(), 0) != dims.end()) return 0;
  int64_t count = 1;
  for (const int64_t size : dims) count *= size;
  return count;
}

std::string text(const Dims& dims) {
  std::ostringstream out;
  for (size_t i = 0; i < dims.size(); ++i) out << (i ? ", " : "[") << dims[i];
  out << (dims.empty() ? "[]" : "]");
  return out.str();
}

Tensor input(const OrtApi* api, const OrtKernelContext* context, size_t index) {
  const OrtValue* value = nullptr;
  check(ort::KernelContext_GetInput(api, context, index, &value));
  if (value == nullptr) refuse("input ", index, " is missing");
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(ort::GetTensorTypeAndShape(api, value, &info));
  Tensor tensor;
  size_t rank = 0;
  OrtStatus* status = ort::GetDimensionsCount(api, info, &rank);
  if (status == nullptr) {
    tensor.dims.resize(rank);
    status = ort::GetDimensions(api, info, tensor.dims.data(), rank);
  }
  ort::ReleaseTensorTypeAndShapeInfo(api, info);
  check(status);
  void* data = nullptr;
  check(ort::GetTensorMutableData(api, const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

void* output(const OrtApi* api, OrtKernelContext* context, size_t index, const Dims& dims) {
  OrtValue* value = nullptr;
  check(ort::KernelContext_GetOutput(api, context, index, dims.data(), dims.size(), &value));
  void* data = nullptr;
  check(ort::GetTensorMutableData(api, value, &data));
  return data;
}

void require(const char* op, const char* name, const Dims& found, const Dims& wanted) {
  if (found != wanted) refuse(op, ": ", name, " has shape ", text(found), "; it must be ", text(wanted));
}

int64_t processors() {
  static const int64_t count = std::max(1u, std::thread::hardware_concurrency());
  return count;
}

void run_on_threads(const OrtApi* api, const OrtKernelContext* context, const char* op, int64_t tasks,
                    const std::function<bool(int64_t)>& run) {
  if (tasks == 0) return;
  Work work{&run};
  const size_t count = static_cast<size_t>(tasks);
  if (tasks == 1) {
    run_one(&work, 0);  // not worth waking a thread
  } else {
    check(ort::KernelContext_ParallelFor(api, context, run_one, count, count, &work));
  }
  if (work.failed) throw std::runtime_error(std::string(op) + ": out of memory");
}

void share_out(const OrtApi* api, const OrtKernelContext* context, const char* op, int64_t count, int64_t numbers,
               const std::function<bool(Range)>& run) {
  if (count <= 0 || numbers <= 0) return;
  const int64_t fewest = std::max(kSmallestTask / numbers, int64_t{1});  // parts of a task
  const int64_t tasks = std::min(kTasksPerThread * processors(), divide_up(count, fewest));
  const int64_t size = divide_up(count, tasks);
  run_on_threads(api, context, op, divide_up(count, size),
                 [&](int64_t task) { return run({task * size, std::min((task + 1) * size, count)}); });
}

}  // namespace localattn
