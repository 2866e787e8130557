"""Pass: rewrite a model into standard operators only, for runtimes and tools that do not support functions.

Functions are inlined, and what follows from shapes is computed: index arithmetic becomes tables. Constants become
initializers, shapes that inference finds again are left out, and nodes have names of the user's modules. onnxruntime
does the same when it opens a file; others do not. No result changes: on real numbers, only single operations that
IEEE 754 rounds in one way are computed ahead.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

from ...core.machine.process import quiet_loggers
from ..block_weights import in_standard_operators
from ..precision.half_to_fp32 import EXACT
from . import scan_states
from .names import name_by_module
from .norms import without_lp_normalization

# Real tensors of this size in bytes or more count as weights, and are not used in constant folding.
_WEIGHTS_FROM = 4096
# The most elements of the inputs, and of the result, of constant folding.
_MOST_READ, _MOST_WRITTEN = 1 << 20, 1 << 20
# Operators on real numbers that every machine rounds alike, besides operators that only move numbers.
_ROUNDED_ALIKE = frozenset(("Add", "Cast", "CastLike", "Constant", "ConstantOfShape", "Div", "Mul", "Range", "Sub"))
# Operators whose inputs' values say how large their results are.
_SIZED_BY_VALUES = frozenset(
    ("ConstantOfShape", "Einsum", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample")
)
# Dimensions of a tensor.
_MOST_SIZES = 64
# Operators on whole numbers that take the square of their inputs, or worse, in onnx's reference.
_SLOW = frozenset(("ConvInteger", "MatMulInteger", "MaxPool", "NonMaxSuppression", "QLinearConv", "QLinearMatMul"))
# Loggers that report every node that is not folded.
_CHATTY = ("onnxscript.optimizer._constant_folding", "onnx_ir.passes.common")


def apply(model: Any) -> Any:
    """Return the `onnx_ir.Model` in standard operators only; the given model must not be used afterwards.

    Its opset stays. A model with Scans is returned as another object. Weights are neither read nor copied, except
    those of 4 bits.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants_ir

    in_standard_operators(model)
    with quiet_loggers(_CHATTY):
        weights = _take_weights(model)
        common.InlinePass()(model)
        if any(node.op_type == "Scan" for node in model.graph.all_nodes()):
            model = ir.serde.deserialize_model(scan_states.apply(ir.serde.serialize_model(model)))
        # Without propagation of data: for a Range or a Concat of constants, onnx makes an object of each number.
        common.ShapeInferencePass(data_prop=False)(model)
        fold_constants_ir(
            model, input_size_limit=_MOST_READ, output_size_limit=_MOST_WRITTEN, should_fold=_same_everywhere
        )
        without_lp_normalization(model)
        for step in (
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.LiftSubgraphInitializersToMainGraphPass(),
            common.DeduplicateInitializersPass(size_limit=_MOST_WRITTEN * 8),
            common.CommonSubexpressionEliminationPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common.RemoveUnusedOpsetsPass(),
        ):
            step(model)
        _put_back(model, weights)
    _drop_empty_attributes(model)
    name_by_module(model)
    _forget_inferred(model)
    return model


def _take_weights(model: Any) -> dict[str, Any]:
    """Turn the weights into inputs, so that passes treat them as unknown; return the tensors by name."""
    import onnx_ir as ir

    graph, indices = model.graph, (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
    tensors = {name: value.const_value for name, value in graph.initializers.items()}
    weights = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.nbytes >= (_WEIGHTS_FROM if tensor.dtype not in indices else 8 * _MOST_READ)
    }
    for name in weights:
        value = graph.initializers.pop(name)
        value.dtype, value.shape = value.const_value.dtype, value.const_value.shape
        value.const_value = None
        graph.inputs.append(value)
    return weights


def _put_back(model: Any, weights: dict[str, Any]) -> None:
    """Undo `_take_weights`; drop weights that are no longer read."""
    graph = model.graph
    for value in [value for value in graph.inputs if value.name in weights]:
        graph.inputs.remove(value)
        if value.uses() or value in graph.outputs:
            value.const_value = weights[value.name]
            graph.register_initializer(value)


def _same_everywhere(node: Any) -> bool | None:
    """Return whether constant folding may compute a node: False forbids it, None leaves it to the optimizer."""
    if _too_dear(node):
        return False
    real = any(value.dtype is None or value.dtype.is_floating_point() for value in node.outputs)
    return None if not real or node.op_type in EXACT | _ROUNDED_ALIKE else False


def _too_dear(node: Any) -> bool:
    """Return whether the result of a node is too large to be written, or may be: a few bytes can ask for terabytes."""
    import onnx_ir as ir

    if node.op_type in _SLOW:
        return True
    if any(value is not None and value.dtype == ir.DataType.STRING for value in (*node.inputs, *node.outputs)):
        return True
    for value in node.outputs:
        if value.shape is not None and value.shape.is_static():
            size: float = prod(value.shape.numpy())
        else:
            size = _size_by_values(node)
        if size > _MOST_WRITTEN:
            return True
    return False


def _size_by_values(node: Any) -> float:
    """Return how many elements a node of constant inputs writes at most, where no shape is inferred."""
    import numpy as np

    given: list[Any] = [None if value is None else value.const_value for value in node.inputs]
    sizes = [tensor.size for tensor in given if tensor is not None]
    last = given[-1] if given else None
    if node.op_type in _SIZED_BY_VALUES:
        if last is None or last.size > _MOST_SIZES or not sizes[0]:
            return inf
        if node.op_type == "Range" and all(size == 1 for size in sizes):
            first, end, step = (float(tensor.numpy().item()) for tensor in given)
            return abs((end - first) / step) if step else inf
        asked = prod(abs(float(size)) for size in last.numpy().flat)
        if node.op_type == "ConstantOfShape":
            return asked
        return sizes[0] * max(1.0, asked) if node.op_type in ("Expand", "Tile") else inf
    if node.op_type == "Gather" and sizes[0]:
        axis = node.attributes.get_int("axis", 0)
        shape = given[0].shape.numpy()
        return sizes[1] * sizes[0] / shape[axis] if -len(shape) <= axis < len(shape) else inf
    if node.op_type in ("GatherND", "MatMul"):
        return float(prod(sizes))
    try:
        broadcast = np.broadcast_shapes(*(tensor.shape.numpy() for tensor in given if tensor is not None))
    except ValueError:
        return float(sum(sizes))
    return float(max(sum(sizes), prod(broadcast)))


def _drop_empty_attributes(model: Any) -> None:
    """Remove attributes that are empty lists: PyTorch writes them into Scans, and ONNX's helpers fail on them."""
    for node in model.graph.all_nodes():
        for name in [name for name, attribute in node.attributes.items() if attribute.value in ((), [])]:
            del node.attributes[name]


def _forget_inferred(model: Any) -> None:
    """Remove types and shapes that inference finds again; those of inputs and outputs stay."""
    graph = model.graph
    for value in (*graph.initializers.values(), *(x for node in graph for x in node.outputs)):
        if not value.is_graph_output():
            value.type = value.shape = None
        value.metadata_props.clear()
