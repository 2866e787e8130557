"""Rewrite matrices in blocks of 4 or 8 bits from onnxruntime's MatMulNBits to standard operators.

    MatMulNBits(x, levels, scales, zeros)  =  MatMul(x, DequantizeLinear(levels, scales, zeros))

with `axis=0` and the same block size. DequantizeLinear has blocks, and types of 4 bits, from opset 21 on. onnxruntime
joins the two nodes to one MatMulNBits of accuracy level 4 again when it opens the file. A product whose inputs must not
be rounded is thus written so that they are not joined, with `axis=1` and a Transpose in between. Sources: ONNX,
operator DequantizeLinear; onnxruntime, docs/ContribOperators.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .graph_values import add_constant

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DOMAIN, OP_TYPE = "com.microsoft", "MatMulNBits"
BITS, WIDE_BITS = 4, 8
# Products of 8-bit integers, summed in 32 bits: 0.19 of fp32's time a token, where exact products take 0.52.
ACCURACY = 4
# Products of fp32: numbers of one block of a token may be of very different sizes.
EXACT = 1
# The first opset whose DequantizeLinear takes blocks of 4 bits.
OPSET = 21
_INPUTS = 4


def packed(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack numbers below 16 in pairs along the last axis, the earlier one in the lower bits; an odd end gets a 0."""
    import numpy as np

    if levels.shape[-1] % 2:
        levels = np.concatenate((levels, np.zeros_like(levels[..., :1])), axis=-1)
    return np.ascontiguousarray(levels[..., 0::2] | (levels[..., 1::2] << BITS))


def unpacked(pairs: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Undo `packed`: return the first `count` numbers of the last axis."""
    import numpy as np

    both = np.stack((pairs & (1 << BITS) - 1, pairs >> BITS), axis=-1)
    return both.reshape(*pairs.shape[:-1], -1)[..., :count]


def in_standard_operators(model: Any) -> None:
    """Replace each MatMulNBits of an `onnx_ir.Model` with constant blocks of 4 or 8 bits, in place.

    Others stay: of other widths, with an order of rows, or in a model whose opset has no such blocks.
    """
    import onnx_ir as ir

    if model.graph.opset_imports.get("", 0) < OPSET:
        return
    made: dict[tuple[str, bool], list[Any]] = {}
    for node in [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OP_TYPE)]:
        if not _is_plain(node):
            continue
        exact = _is_exact(node)
        key = node.inputs[1].name, exact
        if key not in made:
            made[key] = _initializers(model.graph, node, by_row=not exact)
        block = {"axis": int(exact), "block_size": node.attributes["block_size"].as_int()}
        metadata = dict(node.metadata_props)
        wide = [ir.node("DequantizeLinear", made[key], block, name=f"{node.name}/weights", metadata_props=metadata)]
        if exact:
            turn = {"perm": [1, 0]}
            name = f"{node.name}/turned"
            wide.append(ir.node("Transpose", wide[0].outputs, turn, name=name, metadata_props=metadata))
        matrix = wide[-1].outputs[0]
        product = ir.node("MatMul", [node.inputs[0], matrix], name=node.name, metadata_props=metadata)
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [*wide, product], node.outputs, product.outputs
        )
    for value in list(model.graph.initializers.values()):
        if not value.uses() and not value.is_graph_output():
            model.graph.initializers.pop(value.name)


def _is_plain(node: Any) -> bool:
    constant = [value for value in node.inputs if value is not None]
    return (
        len(node.inputs) == len(constant) == _INPUTS
        and all(value.is_initializer() and value.const_value is not None for value in constant[1:])
        and node.attributes["bits"].as_int() in (BITS, WIDE_BITS)
    )


def _is_exact(node: Any) -> bool:
    """Return whether the inputs of a product may not be rounded."""
    level = node.attributes.get("accuracy_level")
    return level is not None and bool(level.as_int() == EXACT)


def _initializers(graph: Any, node: Any, *, by_row: bool) -> list[Any]:
    """Add the matrix of a MatMulNBits as DequantizeLinear takes it.

    They are levels `[K, N]`, scales and zeros by block, or all three transposed where it is not `by_row`.
    """
    import numpy as np
    import onnx_ir as ir

    rows, columns, size = (node.attributes[name].as_int() for name in ("K", "N", "block_size"))
    count = -(-rows // size)
    pairs, scales, zeros = (value.const_value.numpy() for value in node.inputs[1:])
    wide = node.attributes["bits"].as_int() == WIDE_BITS
    kind = ir.DataType.UINT8 if wide else ir.DataType.UINT4
    levels, zeros = pairs.reshape(columns, count, -1), zeros.reshape(columns, -1)
    if not wide:
        levels, zeros = unpacked(levels, size), unpacked(zeros, count)
    arrays = (
        (levels.reshape(columns, -1)[:, :rows], kind),
        (scales.reshape(columns, count), None),
        (zeros, kind),
    )
    return [
        add_constant(
            graph,
            f"{given.name}.by_{'row' if by_row else 'column'}",
            np.ascontiguousarray(array.T if by_row else array),
            dtype,
        )
        for (array, dtype), given in zip(arrays, node.inputs[1:], strict=True)
    ]
