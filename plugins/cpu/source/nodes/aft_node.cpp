#include "nodes/aft_node.h"

#include <algorithm>
#include <new>

#include "instructions/instructions.h"
#include "kernels/scratch.h"
#include "kernels/tasks.h"

namespace localattn {
namespace {

// The longest sequence and the largest size; products of a few of these fit in 64 bits.
constexpr int64_t kMost = int64_t{1} << 31;

}  // namespace

void AftNode::compute(OrtKernelContext* context) const {
  const Tensor gate = input(api(), context, 0), key = input(api(), context, 1), value = input(api(), context, 2);
  const Tensor bias = input(api(), context, 3);
  if (gate.dims.size() != 3) refuse(op_type_, ": gate has shape ", text(gate.dims), "; it has 3 dimensions");
  require(op_type_, "key", key.dims, gate.dims);
  require(op_type_, "value", value.dims, gate.dims);
  Aft call{};
  call.length = gate.dims[0];
  call.batch = gate.dims[1];
  call.dim = gate.dims[2];
  call.causal = causal_;
  call.columns = bias.dims.size() == 2 ? bias.dims[1] : 0;
  if (call.columns < 1 || call.columns > kMost || (!causal_ && call.columns % 2 == 0)) {
    refuse(op_type_, ": position_bias has shape ", text(bias.dims), "; it has 2 dimensions, the last of them ",
           causal_ ? "at least 1" : "odd");
  }
  require(op_type_, "position_bias", bias.dims, {call.length, call.columns});
  call.reach = causal_ ? call.columns - 1 : call.columns / 2;
  if (has_mask_) {
    const Tensor mask = input(api(), context, 4);
    require(op_type_, "key_mask", mask.dims, {call.batch, call.length});
    call.mask = static_cast<const uint8_t*>(mask.data);
  }
  call.output = static_cast<float*>(output(api(), context, 0, gate.dims));
  if (is_empty(gate.dims)) return;
  if (call.length > kMost) refuse(op_type_, ": ", call.length, " positions are too many");
  call.gate = gate.floats();
  call.key = key.floats();
  call.value = value.floats();
  call.bias = bias.floats();
  const Memory states(static_cast<size_t>(aft_floats(call)));
  if (states.data() == nullptr) throw std::bad_alloc();
  call.states = states.data();

  const int64_t parts = call.batch * (call.width() / kAftChannels), wanted = kTasksPerThread * processors();
  const int64_t size = divide_up(parts, wanted);
  run_on_threads(api(), context, op_type_, divide_up(parts, size), [&](int64_t task) {
    return instructions().aft_states(call, {task * size, std::min((task + 1) * size, parts)});
  });
  // Rows share the exponents of their biases among all channels, so only as many parts as there are threads for.
  const int64_t tiles = divide_up(call.length, kAftRows);
  const int64_t together = divide_up(parts, std::min(parts, divide_up(wanted, tiles)));
  const int64_t across = divide_up(parts, together);
  run_on_threads(api(), context, op_type_, tiles * across, [&](int64_t task) {
    const int64_t first = task % across * together;
    return instructions().aft_mean(call, {task / across * kAftRows, {first, std::min(first + together, parts)}});
  });
}

}  // namespace localattn
