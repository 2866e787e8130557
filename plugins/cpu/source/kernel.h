// A node's kernel: the attributes it was made from, and what one call does with onnxruntime's tensors.
#pragma once

#include "attention.h"
#include "onnxruntime_c.h"

namespace localattn {

// One operator: its name, the inputs it has besides query, key and value, and their element types.
struct Signature {
  const char* op_type;
  bool has_mask;
  bool has_bias;
  Element element;
  Element bias_element;  // without a bias that of the others

  size_t inputs() const { return size_t{3} + has_mask + has_bias; }
};

class Kernel {
 public:
  // Reads the node's attributes. Throws what status.h turns into a status.
  Kernel(const OrtApi* api, const Signature& signature, const OrtKernelInfo* info);

  // One call; the work is done by the session's threads. Throws likewise.
  void compute(OrtKernelContext* context) const;

  const OrtApi* api() const { return api_; }

 private:
  const OrtApi* api_;
  Signature signature_;
  Window window_;
  float scale_;
  bool shared_qk_;
  bool heads_first_;  // tensors are [B, H, N, D], else [B, N, H, D]
};

}  // namespace localattn
