"""Build the ONNX functions of the step nodes: their definition in standard operators, stored in a step file.

Everything is computed in fp32 whatever the inputs' dtype, as in the function of the whole-sequence node; the caches
keep the file's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import build_function

from ...core.nodes.attention import DOMAIN
from ...core.nodes.step import STEP_VARIANT_BY_OP_TYPE

STEP_ATTRIBUTE_TYPES: Mapping[str, ir.AttributeType] = {
    "window_size": ir.AttributeType.INT,
    "look_backward": ir.AttributeType.INT,
    "look_forward": ir.AttributeType.INT,
    "causal": ir.AttributeType.INT,
    "exact_windowsize": ir.AttributeType.INT,
    "scale": ir.AttributeType.FLOAT,
    "shared_qk": ir.AttributeType.INT,
    "xpos_scale_base": ir.AttributeType.FLOAT,
    "plugin_namespace": ir.AttributeType.STRING,
    "plugin_version": ir.AttributeType.STRING,
}


def _attend(op: Any, query: Any, keys: Any, values: Any, score_bias: Any, scales: Sequence[Any]) -> Any:
    """Compute `softmax(scale·q·kᵀ + score_bias)·v`, in the dtype of the query."""
    precise, keys, values = (op.Cast(x, to=ir.DataType.FLOAT) for x in (query, keys, values))
    if scales:
        keys = op.Mul(keys, scales[-1])
    if len(scales) > 1:
        precise = op.Mul(precise, scales[0])
    scale = op.Constant(value_float=ir.RefAttr("value_float", "scale", ir.AttributeType.FLOAT))
    scores = op.MatMul(op.Mul(precise, scale), op.Transpose(keys, perm=[0, 1, 3, 2]))
    weights = op.Softmax(op.Add(scores, score_bias), axis=-1)
    return op.CastLike(op.MatMul(weights, values), query)


def _step(op: Any, *inputs: Any) -> Any:
    """Compute one token: write its key and value, then attend to the ring."""
    query, key, value, key_cache, value_cache, score_bias, write_index, *scales = inputs
    keys = op.ScatterND(key_cache, write_index, key)
    values = op.ScatterND(value_cache, write_index, value)
    return _attend(op, query, keys, values, score_bias, scales), keys, values


def _chunk(op: Any, *inputs: Any) -> Any:
    """Compute several tokens: attend to the old ring and the new keys, then write them."""
    query, key, value, key_cache, value_cache, score_bias, write_index, *scales = inputs
    keys, values = op.Concat(key_cache, key, axis=2), op.Concat(value_cache, value, axis=2)
    output = _attend(op, query, keys, values, score_bias, scales)
    return output, op.Gather(keys, write_index, axis=2), op.Gather(values, write_index, axis=2)


def build_step(op_type: str, opset: int, nodes: Sequence[ir.Node] = ()) -> ir.Function:
    """Build the ONNX function of an op type of `core.step_node`, the same for all nodes; see `functions.Builder`."""
    variant = STEP_VARIANT_BY_OP_TYPE[op_type]
    return build_function(
        _chunk if variant.chunked else _step,
        [ir.Value(name=name) for name in variant.input_names],
        domain=DOMAIN,
        name=variant.op_type,
        attributes=[ir.Attr(name, kind, None) for name, kind in STEP_ATTRIBUTE_TYPES.items()],
        opset_imports={"": opset},
    )
