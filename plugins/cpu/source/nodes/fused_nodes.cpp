#include "nodes/fused_nodes.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "instructions/instructions.h"
#include "kernels/scratch.h"

namespace localattn {
namespace {

// The most streams, and their largest width; products of these fit in 64 bits.
constexpr int64_t kMost = int64_t{1} << 20;
// Numbers of a matrix that a node keeps from one call to the next.
constexpr int64_t kMostKept = int64_t{1} << 16;

// The first input: tokens [B, N, ...] with so many dimensions.
Tensor tokens(const OrtApi* api, const OrtKernelContext* context, const char* op, size_t rank) {
  Tensor first = input(api, context, 0);
  if (first.dims.size() != rank) {
    refuse(op, ": the first input has shape ", text(first.dims), "; it must have ", rank, " dimensions");
  }
  return first;
}

// The first input of residual streams, and how their shape begins.
struct StreamTokens {
  Tensor streams;
  Dims tokens;  // [B, N], none for [S, D] of a single token
  int64_t count;

  Dims with(const Dims& more) const {
    Dims all = tokens;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  // Of a branch's input and output: [B, N, D], or [1, D].
  Dims rows(int64_t dim) const { return tokens.empty() ? Dims{1, dim} : with({dim}); }
};

// Streams [B, N, S, D] or, where `alone` says so, [S, D] of one token; of one stream [B, N, D].
StreamTokens stream_tokens(const OrtApi* api, const OrtKernelContext* context, const char* op, size_t rank,
                           bool alone = false) {
  Tensor first = input(api, context, 0);
  const bool single = alone && first.dims.size() == 2;
  if (!single) first = tokens(api, context, op, rank);
  for (size_t i = single ? 0 : 2; i < first.dims.size(); ++i) {
    if (first.dims[i] < 1 || first.dims[i] > kMost) {
      refuse(op, ": the first input has shape ", text(first.dims), "; streams and width must lie in [1, ", kMost, "]");
    }
  }
  if (single) return {first, {}, 1};
  return {first, {first.dims[0], first.dims[1]}, first.dims[0] * first.dims[1]};
}

// A call of the inputs that follow the streams (mix, beta, output), and of the first output.
WriteStreams writing_of(const OrtApi* api, OrtKernelContext* context, const char* op, const StreamTokens& given,
                        Writing writing) {
  const bool begins = writing == Writing::begin;
  const Dims& dims = given.streams.dims;
  size_t next = 1;
  WriteStreams call{};
  call.dim = dims.back();
  call.from = call.to = begins ? 1 : dims[dims.size() - 2];
  call.adds_up = writing == Writing::end;
  if (writing != Writing::add) {
    const Tensor mix = input(api, context, next++);
    if (begins) call.to = mix.dims.size() == 4 ? mix.dims[2] : 0;
    if (call.to > kMost) refuse(op, ": mix has shape ", text(mix.dims), "; there are at most ", kMost, " streams");
    require(op, "mix", mix.dims, given.with({call.to, call.from}));
    call.mix = mix.floats();
  }
  const Tensor beta = input(api, context, next++), branch = input(api, context, next++);
  require(op, "beta", beta.dims, given.with({call.to, 1}));
  require(op, "output", branch.dims, given.rows(call.dim));
  call.streams = given.streams.floats();
  call.beta = beta.floats();
  call.output = branch.floats();
  const Dims written = call.adds_up ? given.rows(call.dim) : given.with({call.to, call.dim});
  call.written = static_cast<float*>(output(api, context, 0, written));
  return call;
}

}  // namespace

// A matrix [rows, columns] transposed, its rows filled up with zeros. Throws if there is no memory.
class Columns {
 public:
  // One that is kept remembers the matrix it was made of.
  Columns(const float* matrix, int64_t rows, int64_t columns, bool kept)
      : width_(align(rows, kMostLanes)),
        matrix_(matrix, matrix + (kept ? rows * columns : 0)),
        memory_(static_cast<size_t>(columns * width_)) {
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
  bool are_of(const float* matrix, int64_t elements) const {
    return matrix_.size() == static_cast<size_t>(elements) &&
           std::memcmp(matrix_.data(), matrix, matrix_.size() * sizeof(float)) == 0;
  }

 private:
  int64_t width_;
  std::vector<float> matrix_;
  Memory memory_;
};

std::shared_ptr<const Columns> ReadStreamsNode::columns_of(const float* matrix, int64_t rows, int64_t columns) const {
  if (rows * columns > kMostKept) return std::make_shared<const Columns>(matrix, rows, columns, false);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!columns_ || !columns_->are_of(matrix, rows * columns)) {
    columns_ = std::make_shared<const Columns>(matrix, rows, columns, true);
  }
  return columns_;
}

void ReadStreamsNode::compute(OrtKernelContext* context) const {
  const StreamTokens given = stream_tokens(api(), context, op_type_, 4, true);
  const Dims& dims = given.streams.dims;
  const int64_t count = dims[dims.size() - 2], dim = dims.back();
  size_t in = 1, out = 0;
  WriteStreams writing{};
  if (mixes_) {
    writing = writing_of(api(), context, op_type_, given, Writing::mix);
    in = 4;
    out = 1;
  }
  const auto next = [&](const char* name, const Dims& wanted) {
    const Tensor tensor = input(api(), context, in++);
    require(op_type_, name, tensor.dims, wanted);
    return tensor.floats();
  };
  ReadStreams call{};
  const float* weight = next("weight", {dim, count + 2});
  call.gain = next("gain", {count, count + 2});
  call.constant = next("constant", {count, count + 2});
  if (has_norm_) {
    call.scale = next("scale", {dim});
    call.shift = next("shift", {dim});
  }
  const std::shared_ptr<const Columns> columns = columns_of(weight, dim, count + 2);
  call.streams = mixes_ ? writing.written : given.streams.floats();
  call.columns = columns->data();
  call.read = static_cast<float*>(output(api(), context, out++, given.rows(dim)));
  call.mix = static_cast<float*>(output(api(), context, out++, given.with({count, count})));
  call.beta = static_cast<float*>(output(api(), context, out++, given.with({count, 1})));
  if (is_empty(dims)) return;
  call.count = count;
  call.dim = dim;
  call.width = columns->width();
  share_out(api(), context, op_type_, given.count, count * dim, [&](Range rows) {
    return mixes_ ? instructions().write_and_read_streams(writing, call, rows)
                  : instructions().read_streams(call, rows);
  });
}

void WriteStreamsNode::compute(OrtKernelContext* context) const {
  // One stream is not an axis: [B, N, D].
  const bool begins = writing_ == Writing::begin, ends = writing_ == Writing::end;
  const StreamTokens given = stream_tokens(api(), context, op_type_, begins ? 3 : 4, !begins && !ends);
  const WriteStreams call = writing_of(api(), context, op_type_, given, writing_);
  if (call.to == 0) return;
  share_out(api(), context, op_type_, given.count, std::max(call.from, call.to) * call.dim,
            [&](Range rows) { return instructions().write_streams(call, rows); });
}

void RotateNode::compute(OrtKernelContext* context) const {
  const Tensor x = tokens(api(), context, op_type_, 4);
  const Tensor cosine = input(api(), context, 1), sine = input(api(), context, 2);
  if (x.dims[3] % 2) refuse(op_type_, ": heads are ", x.dims[3], " wide; they must be even");
  // [N, 1, 2, D/2] for [B, N, H, D], [N, 2, D/2] for [B, H, N, D]; before them B where sequences have their own. Of
  // pairs the last two change places.
  const bool own = cosine.dims.size() == 5;
  const bool heads_first = own ? cosine.dims[1] == 1 && x.dims[1] != 1 : cosine.dims.size() == 3;
  const int64_t positions = x.dims[heads_first ? 2 : 1], half = x.dims[3] / 2;
  const int64_t outer = pairs_ ? half : 2, inner = pairs_ ? 2 : half;
  Dims table = heads_first ? Dims{positions, outer, inner} : Dims{positions, 1, outer, inner};
  if (own && heads_first) table.insert(table.begin(), 1);
  if (own) table.insert(table.begin(), x.dims[0]);
  require(op_type_, "cosine", cosine.dims, table);
  require(op_type_, "sine", sine.dims, table);
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
  call.rows_a_sequence = own ? x.dims[1] * x.dims[2] : 0;
  call.pairs = pairs_;
  share_out(api(), context, op_type_, x.dims[0] * x.dims[1] * x.dims[2], x.dims[3],
            [&](Range rows) { return instructions().rotate(call, rows); });
}

void GatedNode::compute(OrtKernelContext* context) const {
  const Tensor value = input(api(), context, 0), gate = input(api(), context, 1);
  require(op_type_, "gate", gate.dims, value.dims);
  Gated call{};
  call.value = value.data;
  call.gate = gate.data;
  call.output = output(api(), context, 0, value.dims);
  call.element = element_;
  call.activation = activation_;
  share_out(api(), context, op_type_, elements(value.dims), 1,
            [&](Range elements) { return instructions().gated(call, elements); });
}

}  // namespace localattn
