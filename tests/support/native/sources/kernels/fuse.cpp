// Runs the fused CPU kernels on the cases of a file, on threads of its own, and writes what they made.
//
//   fuse CASES OUTPUTS    every case: a Header, then its inputs as fused.h has them
//
// Outputs begin as NaN. What it prints, `runCases` says.
#include "cases.h"
#include "instructions/instructions.h"

#include <algorithm>

namespace {

using localattn::Element;
using localattn::Range;

enum class Kind : int64_t { read, readNorm, mix, mixRead, add, begin, end, rotate, rotatePairs, gelu, geluTanh, silu };

struct Header {
  Kind kind;
  int64_t element, rows, from, to, dim, positions, rowsAPosition, rowsASequence;
  int64_t threads, range;  // rows of a task
};

// A case's file and what was read from it and made for it.
class Tensors {
 public:
  Tensors(std::ifstream& in, Header const& header) : in_(in), size_(header.element == 0 ? 4 : 2) {}

  template <typename Number>
  Number const* input(int64_t elements, bool aligned = false) {
    inputs_.push_back(read(in_, bytes(elements), aligned));
    return reinterpret_cast<Number const*>(inputs_.back().get());
  }

  template <typename Number>
  Number* output(int64_t elements) {
    sizes_.push_back(bytes(elements));
    outputs_.push_back(nothing(sizes_.back()));
    return reinterpret_cast<Number*>(outputs_.back().get());
  }

  void write(std::ofstream& out) const {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      out.write(outputs_[i].get(), static_cast<std::streamsize>(sizes_[i]));
    }
  }

 private:
  size_t bytes(int64_t elements) const { return static_cast<size_t>(elements) * size_; }

  std::ifstream& in_;
  size_t size_;
  std::vector<Block> inputs_, outputs_;
  std::vector<size_t> sizes_;
};

int64_t tasksOf(Header const& h) { return h.rows > 0 ? (h.rows + h.range - 1) / h.range : 0; }

template <typename Call>
void run(Header const& h, Call const& call, bool (*kernel)(Call const&, Range)) {
  onThreads(h.threads, tasksOf(h), [&](int64_t task) {
    if (!kernel(call, {task * h.range, std::min((task + 1) * h.range, h.rows)})) {
      ++withoutMemory;
    }
  });
}

// Of `streams`, or of the next input.
localattn::ReadStreams reading(Header const& h, Tensors& tensors, float const* streams) {
  localattn::ReadStreams call{};
  int64_t const columns = h.from + 2;
  call.count = h.from;
  call.dim = h.dim;
  call.width = (h.dim + localattn::kMostLanes - 1) / localattn::kMostLanes * localattn::kMostLanes;
  call.streams = streams ? streams : tensors.input<float>(h.rows * h.from * h.dim);
  call.columns = tensors.input<float>(columns * call.width, true);
  call.gain = tensors.input<float>(h.from * columns);
  call.constant = tensors.input<float>(h.from * columns);
  if (h.kind != Kind::read) {
    call.scale = tensors.input<float>(h.dim);
    call.shift = tensors.input<float>(h.dim);
  }
  call.read = tensors.output<float>(h.rows * h.dim);
  call.mix = tensors.output<float>(h.rows * h.from * h.from);
  call.beta = tensors.output<float>(h.rows * h.from);
  return call;
}

localattn::WriteStreams writing(Header const& h, Tensors& tensors) {
  localattn::WriteStreams call{};
  call.from = h.from;
  call.to = h.to;
  call.dim = h.dim;
  call.adds_up = h.kind == Kind::end;
  call.streams = tensors.input<float>(h.rows * h.from * h.dim);
  call.mix = h.kind == Kind::add ? nullptr : tensors.input<float>(h.rows * h.from * h.to);
  call.beta = tensors.input<float>(h.rows * h.to);
  call.output = tensors.input<float>(h.rows * h.dim);
  call.written = tensors.output<float>(h.rows * (call.adds_up ? 1 : h.to) * h.dim);
  return call;
}

struct Mixed {
  localattn::WriteStreams writing;
  localattn::ReadStreams reading;
};

void mixAndRead(Header const& h, Tensors& tensors) {
  localattn::WriteStreams const first = writing(h, tensors);
  Mixed const call{first, reading(h, tensors, first.written)};
  run<Mixed>(h, call, [](Mixed const& both, Range rows) {
    return localattn::instructions().write_and_read_streams(both.writing, both.reading, rows);
  });
}

void rotate(Header const& h, Tensors& tensors) {
  localattn::Rotate call{};
  call.element = static_cast<Element>(h.element);
  call.dim = h.dim;
  call.positions = h.positions;
  call.rows_a_position = h.rowsAPosition;
  call.rows_a_sequence = h.rowsASequence;
  call.pairs = h.kind == Kind::rotatePairs;
  int64_t const tables = h.rowsASequence > 0 ? h.rows / h.rowsASequence : 1;
  call.x = tensors.input<void>(h.rows * h.dim);
  call.cosine = tensors.input<void>(tables * h.positions * h.dim);
  call.sine = tensors.input<void>(tables * h.positions * h.dim);
  call.rotated = tensors.output<void>(h.rows * h.dim);
  run(h, call, localattn::instructions().rotate);
}

void gated(Header const& h, Tensors& tensors) {
  localattn::Gated call{};
  call.element = static_cast<Element>(h.element);
  call.activation = static_cast<localattn::Activation>(static_cast<int64_t>(h.kind) - static_cast<int64_t>(Kind::gelu));
  call.value = tensors.input<void>(h.rows);
  call.gate = tensors.input<void>(h.rows);
  call.output = tensors.output<void>(h.rows);
  run(h, call, localattn::instructions().gated);
}

int64_t fuse(Header const& h, std::ifstream& in, std::ofstream& out) {
  Tensors tensors(in, h);
  switch (h.kind) {
    case Kind::read:
    case Kind::readNorm: run(h, reading(h, tensors, nullptr), localattn::instructions().read_streams); break;
    case Kind::mixRead: mixAndRead(h, tensors); break;
    case Kind::rotate:
    case Kind::rotatePairs: rotate(h, tensors); break;
    case Kind::gelu:
    case Kind::geluTanh:
    case Kind::silu: gated(h, tensors); break;
    default: run(h, writing(h, tensors), localattn::instructions().write_streams);
  }
  tensors.write(out);
  return tasksOf(h);
}

}  // namespace

int main(int argc, char** argv) { return argc == 3 ? runCases<Header>(argv[1], argv[2], fuse) : 2; }
