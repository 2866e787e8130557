// The nodes of core/nodes/fused.py: what one call does with onnxruntime's tensors. They have no attributes.
#pragma once

#include <memory>
#include <mutex>

#include "kernels/fused.h"
#include "onnxruntime/tensors.h"

namespace localattn {

class Columns;

// (streams, weight, gain, constant) -> (read, mix, beta); with a norm (..., scale, shift), and after mixing
// (streams, mix, beta, output, weight, ...) -> (written, read, next_mix, next_beta).
class ReadStreamsNode : public Node {
 public:
  ReadStreamsNode(const OrtApi* api, const char* op_type, bool mixes, bool has_norm)
      : Node(api), op_type_(op_type), mixes_(mixes), has_norm_(has_norm) {}
  void compute(OrtKernelContext* context) const override;

 private:
  // The matrix transposed; that of the call before, if the matrix is the same, because one token takes less time.
  std::shared_ptr<const Columns> columns_of(const float* matrix, int64_t rows, int64_t columns) const;

  const char* op_type_;
  bool mixes_;
  bool has_norm_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Columns> columns_;
};

// How the streams change when a branch writes to them.
enum class Writing { mix, add, begin, end };

// (streams, mix, beta, output) -> written; `add` has no mix, `begin` has one stream before, `end` one after.
class WriteStreamsNode : public Node {
 public:
  WriteStreamsNode(const OrtApi* api, const char* op_type, Writing writing)
      : Node(api), op_type_(op_type), writing_(writing) {}
  void compute(OrtKernelContext* context) const override;

 private:
  const char* op_type_;
  Writing writing_;
};

// (x, cosine, sine) -> rotated
class RotateNode : public Node {
 public:
  RotateNode(const OrtApi* api, const char* op_type, bool pairs, Element element)
      : Node(api), op_type_(op_type), pairs_(pairs), element_(element) {}
  void compute(OrtKernelContext* context) const override;

 private:
  const char* op_type_;
  bool pairs_;
  Element element_;
};

// (value, gate) -> output
class GatedNode : public Node {
 public:
  GatedNode(const OrtApi* api, const char* op_type, Activation activation, Element element)
      : Node(api), op_type_(op_type), activation_(activation), element_(element) {}
  void compute(OrtKernelContext* context) const override;

 private:
  const char* op_type_;
  Activation activation_;
  Element element_;
};

}  // namespace localattn
