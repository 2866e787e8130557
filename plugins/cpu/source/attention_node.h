// The attention node: the attributes it was made from, and what one call does with onnxruntime's tensors.
#pragma once

#include "attention.h"
#include "tensors.h"

namespace localattn {

// One operator: its name, the inputs it has besides query, key and value, and their element types.
struct Signature {
  const char* op_type;
  bool has_mask;
  bool has_bias;
  Element element;
  Element bias_element;  // without a bias that of the others
};

class AttentionNode : public Node {
 public:
  AttentionNode(const OrtApi* api, const Signature& signature, const OrtKernelInfo* info);

  void compute(OrtKernelContext* context) const override;

 private:
  Signature signature_;
  Window window_;
  float scale_;
  bool shared_qk_;
  bool heads_first_;  // tensors are [B, H, N, D], else [B, N, H, D]
};

}  // namespace localattn
