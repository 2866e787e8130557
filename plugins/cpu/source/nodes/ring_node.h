// The step and chunk nodes of core/nodes/step.py: what one call does with onnxruntime's tensors.
#pragma once

#include "kernels/attention/attention.h"
#include "onnxruntime/tensors.h"

namespace localattn {

// One operator: its name, its optional inputs, and the element type of queries, keys and values.
struct RingSignature {
  std::string op_type;
  Element element;
  bool chunked;
  bool has_xpos;
  bool has_softcap;
  bool has_sinks;
};

class RingNode : public Node {
 public:
  RingNode(const OrtApi* api, const RingSignature& signature, const OrtKernelInfo* info);

  void compute(OrtKernelContext* context) const override;

 private:
  RingSignature signature_;
  float scale_;
  float softcap_ = 0;
};

}  // namespace localattn
