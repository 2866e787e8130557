#include "fused_nodes.h"

#include <algorithm>
#include <new>

#include "instructions.h"
#include "scratch.h"
#include "tasks.h"

namespace localattn {
namespace {

// So many elements are worth a task of their own.
constexpr int64_t kSmallestTask = 16384;
// Neither are there more streams, nor are they wider; products of these stay within 64 bits.
constexpr int64_t kMost = int64_t{1} << 20;

// Hands `rows` of so many elements each to the session's threads.
void for_all(const OrtApi* api, const OrtKernelContext* context, const char* op, int64_t rows, int64_t elements,
             const std::function<bool(Range)>& run) {
  if (rows <= 0 || elements <= 0) return;
  const int64_t least = std::max(kSmallestTask / elements, int64_t{1});
  const int64_t wanted = std::min(kTasksPerThread * processors(), divide_up(rows, least));
  const int64_t size = divide_up(rows, wanted);
  run_on_threads(api, context, op, divide_up(rows, size),
                 [&](int64_t task) { return run({task * size, std::min((task + 1) * size, rows)}); });
}

// The first input: tokens [B, N, ...] with so many dimensions.
Tensor tokens(const OrtApi* api, const OrtKernelContext* context, const char* op, size_t rank) {
  Tensor first = input(api, context, 0);
  if (first.dims.size() != rank) {
    refuse(op, ": the first input has shape ", text(first.dims), "; it must have ", rank, " dimensions");
  }
  return first;
}

// The same of residual streams: [B, N, S, D], or [B, N, D] of one.
Tensor stream_tokens(const OrtApi* api, const OrtKernelContext* context, const char* op, size_t rank) {
  Tensor first = tokens(api, context, op, rank);
  for (size_t i = 2; i < rank; ++i) {
    if (first.dims[i] < 1 || first.dims[i] > kMost) {
      refuse(op, ": the first input has shape ", text(first.dims), "; streams and width must lie in [1, ", kMost, "]");
    }
  }
  return first;
}

// A matrix [rows, columns] transposed, its rows filled up with zeros. Throws if there is no memory.
class Columns {
 public:
  Columns(const float* matrix, int64_t rows, int64_t columns)
      : width_(align(rows, kMostLanes)), memory_(static_cast<size_t>(columns * width_)) {
    float* data = memory_.data();
    if (data == nullptr) throw std::bad_alloc();
    for (int64_t column = 0; column < columns; ++column) {
      std::fill(data + column * width_ + rows, data + (column + 1) * width_, 0.0f);
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        data[column * width_ + row] = matrix[row * columns + column];
      }
    }
  }

  int64_t width() const { return width_; }
  const float* data() const { return memory_.data(); }

 private:
  int64_t width_;
  Memory memory_;
};

}  // namespace

void ReadStreamsNode::compute(OrtKernelContext* context) const {
  const char* op = "ReadStreams";
  const Tensor streams = stream_tokens(api(), context, op, 4), weight = input(api(), context, 1);
  const Tensor gain = input(api(), context, 2), constant = input(api(), context, 3);
  const int64_t batch = streams.dims[0], length = streams.dims[1], count = streams.dims[2], dim = streams.dims[3];
  require(op, "weight", weight.dims, {dim, count + 2});
  require(op, "gain", gain.dims, {count, count + 2});
  require(op, "constant", constant.dims, {count, count + 2});
  const Columns columns(weight.floats(), dim, count + 2);
  ReadStreams call{};
  call.streams = streams.floats();
  call.columns = columns.data();
  call.gain = gain.floats();
  call.constant = constant.floats();
  call.read = static_cast<float*>(output(api(), context, 0, {batch, length, dim}));
  call.mix = static_cast<float*>(output(api(), context, 1, {batch, length, count, count}));
  call.beta = static_cast<float*>(output(api(), context, 2, {batch, length, count, 1}));
  if (is_empty(streams.dims)) return;
  call.count = count;
  call.dim = dim;
  call.width = columns.width();
  for_all(api(), context, op, batch * length, count * dim,
          [&](Range rows) { return instructions().read_streams(call, rows); });
}

void WriteStreamsNode::compute(OrtKernelContext* context) const {
  // One stream is not an axis: [B, N, D].
  const Tensor streams = stream_tokens(api(), context, op_type_, writing_ == Writing::begin ? 3 : 4);
  const int64_t batch = streams.dims[0], length = streams.dims[1], dim = streams.dims.back();
  size_t next = 1;
  WriteStreams call{};
  call.from = call.to = writing_ == Writing::begin ? 1 : streams.dims[2];
  call.adds_up = writing_ == Writing::end;
  if (writing_ != Writing::add) {
    const Tensor mix = input(api(), context, next++);
    if (writing_ == Writing::begin) call.to = mix.dims.size() == 4 ? mix.dims[2] : 0;
    if (call.to > kMost)
      refuse(op_type_, ": mix has shape ", text(mix.dims), "; there are at most ", kMost, " streams");
    require(op_type_, "mix", mix.dims, {batch, length, call.to, call.from});
    call.mix = mix.floats();
  }
  const Tensor beta = input(api(), context, next++), branch = input(api(), context, next++);
  require(op_type_, "beta", beta.dims, {batch, length, call.to, 1});
  require(op_type_, "output", branch.dims, {batch, length, dim});
  call.streams = streams.floats();
  call.beta = beta.floats();
  call.output = branch.floats();
  const Dims written = call.adds_up ? Dims{batch, length, dim} : Dims{batch, length, call.to, dim};
  call.written = static_cast<float*>(output(api(), context, 0, written));
  if (is_empty(written)) return;
  call.dim = dim;
  for_all(api(), context, op_type_, batch * length, std::max(call.from, call.to) * dim,
          [&](Range rows) { return instructions().write_streams(call, rows); });
}

void RotateNode::compute(OrtKernelContext* context) const {
  const char* op = "RotateHeads";
  const Tensor x = tokens(api(), context, op, 4);
  const Tensor cosine = input(api(), context, 1), sine = input(api(), context, 2);
  if (x.dims[3] % 2) refuse(op, ": heads are ", x.dims[3], " wide; they must be even");
  // [N, 1, 2, D/2] for [B, N, H, D], [N, 2, D/2] for [B, H, N, D].
  const bool heads_first = cosine.dims.size() == 3;
  const int64_t positions = x.dims[heads_first ? 2 : 1], half = x.dims[3] / 2;
  const Dims table = heads_first ? Dims{positions, 2, half} : Dims{positions, 1, 2, half};
  require(op, "cosine", cosine.dims, table);
  require(op, "sine", sine.dims, table);
  Rotate call{};
  call.x = x.data;
  call.cosine = cosine.data;
  call.sine = sine.data;
  call.rotated = output(api(), context, 0, x.dims);
  if (is_empty(x.dims)) return;
  call.element = element_;
  call.dim = x.dims[3];
  call.positions = positions;
  call.rows_a_position = heads_first ? 1 : x.dims[2];
  for_all(api(), context, op, x.dims[0] * x.dims[1] * x.dims[2], x.dims[3],
          [&](Range rows) { return instructions().rotate(call, rows); });
}

void GatedGeluNode::compute(OrtKernelContext* context) const {
  const Tensor value = input(api(), context, 0), gate = input(api(), context, 1);
  require("GatedGelu", "gate", gate.dims, value.dims);
  GatedGelu call{};
  call.value = value.data;
  call.gate = gate.data;
  call.output = output(api(), context, 0, value.dims);
  call.element = element_;
  for_all(api(), context, "GatedGelu", elements(value.dims), 1,
          [&](Range elements) { return instructions().gated_gelu(call, elements); });
}

}  // namespace localattn
