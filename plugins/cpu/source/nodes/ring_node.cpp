#include "nodes/ring_node.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "nodes/attributes.h"
#include "instructions/instructions.h"
#include "kernels/scratch.h"
#include "kernels/tasks.h"

namespace localattn {
namespace {

// The most tokens, slots or channels; products of two of these fit in 64 bits.
constexpr int64_t kMost = int64_t{1} << 31;

// The biases are those of all, of every head, or of every sequence.
void take_biases(const char* op, const Tensor& bias, Ring& call) {
  const Dims all{call.rows, call.keys()}, by_head{call.heads, call.rows, call.keys()};
  const Dims by_batch{call.batch, 1, call.rows, call.keys()};
  call.bias_by_head = bias.dims.size() == 3;
  call.bias_by_batch = bias.dims.size() == 4;
  require(op, "score_bias", bias.dims, call.bias_by_batch ? by_batch : call.bias_by_head ? by_head : all);
  call.bias = bias.floats();
}

// Refuses coordinates outside of the caches, and those that are not a head's own.
void check_index(const char* op, const Ring& call) {
  if (call.chunked) {
    const bool in_place = call.key_cache == call.next_key || call.value_cache == call.next_value;
    for (int64_t slot = 0; slot < call.slots; ++slot) {
      const int64_t from = call.write_index[slot];
      if (from < 0 || from >= call.keys())
        refuse(op, ": write_index holds ", from, "; it must lie in [0, ", call.keys(), ")");
      if (from < call.slots && from != slot && in_place)
        refuse(op, ": write_index moves key ", from, " within a ring that is input and output at once");
    }
    return;
  }
  for (int64_t at = 0; at < call.batch * call.kv_heads; ++at) {
    const int64_t* place = call.write_index + at * 3;
    if (place[0] != at / call.kv_heads || place[1] != at % call.kv_heads || place[2] < 0 || place[2] >= call.slots)
      refuse(op, ": write_index names [", place[0], ", ", place[1], ", ", place[2], "] for head ", at % call.kv_heads,
             " of sequence ", at / call.kv_heads, "; the slot must lie in [0, ", call.slots, ")");
  }
}

// A ring as the next call needs it: slot after slot from the ring before, or from the new tokens.
void write_ring(const Ring& call, int64_t at, const void* ring, const void* given, void* next) {
  const int64_t size = call.dim * (call.element == Element::fp32 ? 4 : 2);
  const char* old = static_cast<const char*>(ring) + at * call.slots * size;
  const char* added = static_cast<const char*>(given) + at * call.rows * size;
  char* to = static_cast<char*>(next) + at * call.slots * size;
  for (int64_t slot = 0; slot < call.slots; ++slot) {
    const int64_t key = call.write_index[slot];
    const char* from = key < call.slots ? old + key * size : added + (key - call.slots) * size;
    if (from != to + slot * size) std::memcpy(to + slot * size, from, static_cast<size_t>(size));
  }
}

// Both rings of all heads, after a chunk has read them.
void write_rings(const OrtApi* api, const OrtKernelContext* context, const char* op, const Ring& call) {
  run_on_threads(api, context, op, call.batch * call.kv_heads, [&](int64_t at) {
    write_ring(call, at, call.key_cache, call.key, call.next_key);
    write_ring(call, at, call.value_cache, call.value, call.next_value);
    return true;
  });
}

// A step: the pieces of all rings, and then their merged outputs.
void attend_to_pieces(const OrtApi* api, const OrtKernelContext* context, const char* op, const Ring& call) {
  RingPieces pieces(call);
  const int64_t heads = call.batch * call.kv_heads, parts = heads * pieces.count;
  const Memory memory(static_cast<size_t>(pieces.count > 1 ? parts * call.group() * pieces.row_floats() : 0));
  if (pieces.count > 1 && memory.data() == nullptr) throw std::bad_alloc();
  pieces.data = memory.data();
  share_out(api, context, op, parts, 2 * pieces.slots * call.dim,
            [&](Range range) { return instructions().ring_step(call, pieces, range); });
  if (pieces.count == 1) return;
  share_out(api, context, op, heads, call.group() * pieces.count * pieces.row_floats(),
            [&](Range range) { return instructions().ring_merge(call, pieces, range); });
}

// A chunk: tiles of queries, which share the keys of their group.
void attend_in_tiles(const OrtApi* api, const OrtKernelContext* context, const char* op, const Ring& call) {
  const int64_t rows = instructions().ring_rows, tiles = divide_up(call.rows, rows);
  if (tiles == 0) return;
  const int64_t heads = call.batch * call.kv_heads;
  const Memory memory(static_cast<size_t>(call.biases() * tiles * call.keys() * rows));
  if (memory.data() == nullptr) throw std::bad_alloc();
  std::vector<uint8_t> seen(static_cast<size_t>(call.biases() * tiles * call.keys()));
  const RingBiases biases{memory.data(), seen.data(), tiles};
  run_on_threads(api, context, op, call.biases() * tiles, [&](int64_t task) {
    instructions().ring_biases(call, biases, {task, task + 1});
    return true;
  });
  // A group's tiles are cut only where there are fewer groups than threads.
  const int64_t all = call.group() * tiles, parts = std::min(all, divide_up(2 * processors(), heads));
  const int64_t size = divide_up(all, parts), each = divide_up(all, size);
  run_on_threads(api, context, op, heads * each, [&](int64_t task) {
    const int64_t at = task / each, first = task % each * size;
    const Range own{first, std::min(first + size, all)};
    return instructions().ring_chunk(call, biases, {at / call.kv_heads, at % call.kv_heads, own});
  });
}

}  // namespace

RingNode::RingNode(const OrtApi* api, const RingSignature& signature, const OrtKernelInfo* info)
    : Node(api), signature_(signature) {
  const char* op = signature_.op_type.c_str();
  scale_ = number_attribute(api, op, info, "scale");
  if (signature.has_softcap) softcap_ = softcap_attribute(api, op, info);
}

void RingNode::compute(OrtKernelContext* context) const {
  const char* op = signature_.op_type.c_str();
  const Tensor query = input(api(), context, 0), key = input(api(), context, 1), value = input(api(), context, 2);
  const Tensor key_cache = input(api(), context, 3), value_cache = input(api(), context, 4);
  const Tensor bias = input(api(), context, 5), index = input(api(), context, 6);
  if (query.dims.size() != 4) refuse(op, ": query has shape ", text(query.dims), "; it has 4 dimensions");
  if (key_cache.dims.size() != 4) refuse(op, ": key_cache has shape ", text(key_cache.dims), "; it has 4 dimensions");
  Ring call{};
  call.element = signature_.element;
  call.chunked = signature_.chunked;
  call.batch = query.dims[0];
  call.heads = query.dims[1];
  call.rows = query.dims[2];
  call.dim = query.dims[3];
  call.kv_heads = key_cache.dims[1];
  call.slots = key_cache.dims[2];
  call.scale = scale_;
  call.softcap = softcap_;
  if (!call.chunked && call.rows != 1) refuse(op, ": query has ", call.rows, " tokens; a step has one");
  if (call.heads != 0 && (call.kv_heads == 0 || call.heads % call.kv_heads != 0))
    refuse(op, ": key_cache has ", call.kv_heads, " heads; they must divide the ", call.heads, " of query");
  if (std::max({call.rows, call.slots, call.dim}) > kMost) refuse(op, ": more tokens, slots or channels than 2^31");
  const Dims ring{call.batch, call.kv_heads, call.slots, call.dim};
  const Dims given{call.batch, call.kv_heads, call.rows, call.dim};
  require(op, "key", key.dims, given);
  require(op, "value", value.dims, given);
  require(op, "key_cache", key_cache.dims, ring);
  require(op, "value_cache", value_cache.dims, ring);
  if (call.slots == 0) refuse(op, ": the caches have no slot");
  take_biases(op, bias, call);
  require(op, "write_index", index.dims, call.chunked ? Dims{call.slots} : Dims{call.batch, call.kv_heads, 1, 3});
  call.write_index = static_cast<const int64_t*>(index.data);
  size_t next = 7;
  if (signature_.has_xpos && call.chunked) {
    const Tensor scale = input(api(), context, next++);
    require(op, "query_scale", scale.dims, {call.rows, call.dim});
    call.query_scale = scale.floats();
  }
  if (signature_.has_xpos) {
    const Tensor scale = input(api(), context, next++);
    require(op, "key_scale", scale.dims, {call.keys(), call.dim});
    call.key_scale = scale.floats();
  }
  std::vector<float> sinks;
  if (signature_.has_sinks) {
    const Tensor sink = input(api(), context, next++);
    require(op, "sinks", sink.dims, {call.heads});
    sinks = as_floats(sink, call.element);
    call.sinks = sinks.data();
  }
  call.query = query.data;
  call.key = key.data;
  call.value = value.data;
  call.key_cache = key_cache.data;
  call.value_cache = value_cache.data;
  call.output = output(api(), context, 0, query.dims);
  call.next_key = output(api(), context, 1, ring);
  call.next_value = output(api(), context, 2, ring);
  if (call.batch == 0 || call.kv_heads == 0 || call.dim == 0 || call.heads == 0) return;
  check_index(op, call);
  if (call.chunked) {
    attend_in_tiles(api(), context, op, call);
    write_rings(api(), context, op, call);
  } else {
    attend_to_pieces(api(), context, op, call);
  }
}

}  // namespace localattn
