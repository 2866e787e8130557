// Operators between a model's matrix products and attention nodes, each in one pass over its tensors. The rows (or
// elements) of a call do not depend on each other; the caller runs them on threads. The meaning of every
// tensor is that of the nodes' contract, core/nodes/fused.py.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/tasks.h"

namespace localattn {

// A row is a token: its `streams` residual streams, `dim` wide, side by side.
struct ReadStreams {
  const float* streams;  // [rows, streams, dim]
  const float* columns;  // the matrix transposed, [2 + streams, width]: zeros after dim, from a multiple of 64 bytes on
  const float* gain;     // [streams, 2 + streams]
  const float* constant;  // [streams, 2 + streams]
  float* read;            // [rows, dim]
  float* mix;             // [rows, streams, streams]
  float* beta;            // [rows, streams]
  int64_t count;          // of streams
  int64_t dim;
  int64_t width;
  const float* scale;  // [dim]: what is read is normalized; null: it is not
  const float* shift;  // [dim]
};

struct WriteStreams {
  const float* streams;  // [rows, from, dim]
  const float* mix;      // [rows, from, to]; null: every stream keeps its own numbers
  const float* beta;     // [rows, to]
  const float* output;   // of the branch, [rows, dim]
  float* written;        // [rows, to, dim]; if it adds up, their sum [rows, dim]
  int64_t from;          // how many streams there are
  int64_t to;            // how many there will be; as many without a mix
  bool adds_up;          // only with a mix
  int64_t dim;
};

// A row is a head of a token.
struct Rotate {
  const void* x;       // [rows, dim]
  const void* cosine;  // [positions, dim], of each sequence or of all
  const void* sine;    // the same
  void* rotated;       // [rows, dim]
  Element element;     // of all four
  int64_t dim;         // even
  int64_t positions;
  int64_t rows_a_position;  // that follow each other
  int64_t rows_a_sequence;  // after so many rows come the next sequence's tables; 0: all share the same
  bool pairs;               // neighbours turn; else the halves of a row
};

enum class Activation { gelu, gelu_tanh, silu };

// value · activation(gate)
struct Gated {
  const void* value;
  const void* gate;
  void* output;
  Element element;  // of all three
  Activation activation;
};

// The most lanes that any instruction set has: widths are multiples of it.
constexpr int64_t kMostLanes = 16;

}  // namespace localattn
