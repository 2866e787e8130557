// Helpers of all nodes for onnxruntime's tensors: read them, check their shapes, make outputs, and run work on the
// session's threads.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "onnxruntime/onnxruntime_c.h"
#include "onnxruntime/status.h"
#include "kernels/tasks.h"

namespace localattn {

using Dims = std::vector<int64_t>;

// An input's shape and values.
struct Tensor {
  Dims dims;
  const void* data;

  const float* floats() const { return static_cast<const float*>(data); }
};

// "[1, 2, 3]"
std::string text(const Dims& dims);

// The number of elements. It fits, and so does every product of some of the sizes, if the tensor is in memory and not
// empty; of an empty one the other sizes may be anything, and must not be multiplied.
int64_t elements(const Dims& dims);
inline bool is_empty(const Dims& dims) { return elements(dims) == 0; }

// Input `index` of a call. Throws if there is none.
Tensor input(const OrtApi* api, const OrtKernelContext* context, size_t index);

// Output `index` of a call, of this shape.
void* output(const OrtApi* api, OrtKernelContext* context, size_t index, const Dims& dims);

// Throws unless tensor `name` of operator `op` has the shape it must have.
void require(const char* op, const char* name, const Dims& found, const Dims& wanted);

// The processors this process may use. onnxruntime does not report a session's number of threads, so a call has tasks
// for all processors; with fewer threads, each runs more tasks.
int64_t processors();

// Calls run(0 … tasks - 1) on the session's threads. Throws if one of them returns false, which says that there was no
// memory; no exception may pass through onnxruntime's threads.
void run_on_threads(const OrtApi* api, const OrtKernelContext* context, const char* op, int64_t tasks,
                    const std::function<bool(int64_t)>& run);

// Calls run([first, end)) on the session's threads, for `count` parts with the given size.
void share_out(const OrtApi* api, const OrtKernelContext* context, const char* op, int64_t count, int64_t numbers,
               const std::function<bool(Range)>& run);

// The kernel of a node: made once from its attributes, then called. Both throw what status.h turns into a status.
class Node {
 public:
  explicit Node(const OrtApi* api) : api_(api) {}
  virtual ~Node() = default;
  Node(const Node&) = delete;

  virtual void compute(OrtKernelContext* context) const = 0;

  const OrtApi* api() const { return api_; }

 private:
  const OrtApi* api_;
};

}  // namespace localattn
