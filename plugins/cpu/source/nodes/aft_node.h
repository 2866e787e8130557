// The nodes of core/nodes/aft.py: what one call does with onnxruntime's tensors. They have no attributes.
#pragma once

#include "onnxruntime/tensors.h"

namespace localattn {

// (gate, key, value, position_bias[, key_mask]) -> output
class AftNode : public Node {
 public:
  AftNode(const OrtApi* api, const char* op_type, bool causal, bool has_mask)
      : Node(api), op_type_(op_type), causal_(causal), has_mask_(has_mask) {}
  void compute(OrtKernelContext* context) const override;

 private:
  const char* op_type_;
  bool causal_, has_mask_;
};

}  // namespace localattn
