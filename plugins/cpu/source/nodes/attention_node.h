// The attention node: the attributes it was made from, and what one call does with onnxruntime's tensors.
#pragma once

#include "kernels/attention/attention.h"
#include "onnxruntime/tensors.h"

namespace localattn {

// One operator: its name, its inputs other than query, key and value, and the element types of its inputs.
struct Signature {
  std::string op_type;
  Element element;
  Element bias_element;  // without a bias that of the others
  bool has_mask;
  bool has_bias;
  bool has_xpos;
  bool is_grouped;  // core/nodes/grouped.py, else core/nodes/attention.py
  bool sees_all;    // has no window
  bool has_softcap;
  bool has_sinks;
};

class AttentionNode : public Node {
 public:
  AttentionNode(const OrtApi* api, const Signature& signature, const OrtKernelInfo* info);

  void compute(OrtKernelContext* context) const override;

 private:
  Layout layout_of(const Call& call, int64_t heads) const;

  Signature signature_;
  Window window_;
  float scale_;
  float softcap_ = 0;
  float xpos_scale_base_ = 0;
  bool shared_qk_ = false;
  bool heads_first_;  // tensors are [B, H, N, D], else [B, N, H, D]
};

}  // namespace localattn
