"""Store large embedding tables in blocks of 8 or 4 bits, only once even if a head multiplies by the same table.

A row of the table is gathered as it is stored, and then becomes numbers, in standard operators that every runtime has:

    x = (Cast(Gather(levels, tokens)) - Cast(Gather(zeros, tokens))) · Gather(scales, tokens)

Levels of 4 bits lie in pairs in a byte, as `MatMulNBits` reads them; a look-up takes them apart. A head that reads the
table turned around becomes a `MatMulNBits` on the same levels. In a trained model of
262,144 rows the table is two thirds of all weights, and its rounding moves the outputs by far less than that of the
linear layers in 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ....onnx_graph.block_weights import ACCURACY, BITS, DOMAIN, OP_TYPE, WIDE_BITS, packed
from ....onnx_graph.graph_values import add_constant, node_like, replace_node
from .blocks import Blocks, Floats, round_for_head, round_in_blocks
from .linear_layers import is_plain_gemm, is_transposed

# Tables with fewer numbers stay unchanged: they are a small part of a file.
LEAST = 1 << 24
# Numbers that share a scale, the most that divides the width: larger blocks have fewer scales.
_BLOCKS = (128, 64, 32)
# The same for levels of 4 bits.
_BLOCKS_OF_4 = (32,)


def quantize_tables(
    model: ir.Model,
    made: MutableMapping[str, Blocks],
    bits: int = WIDE_BITS,
    importance: Callable[[int, int], Floats | None] = lambda rows, columns: None,
) -> list[str]:
    """Store the large tables of a model in few bits, in place; return what was done, for reports.

    Args:
        model: traced, fp32.
        made: rounded tables by name; filled, so that further graphs of an export have the same numbers.
        bits: of a level, 8 or 4.
        importance: returns how much each column of a table of this shape matters to the head; None for all alike.
    """
    notes = []
    for table, gathers, heads in list(_tables(model)):
        numbers = table.const_value.numpy()
        name, width = str(table.name), numbers.shape[1]
        block = next(size for size in (_BLOCKS if bits == WIDE_BITS else _BLOCKS_OF_4) if width % size == 0)
        if name not in made:
            matters = importance(*numbers.shape) if heads and bits == BITS else None
            if matters is None:
                made[name] = round_in_blocks(np.ascontiguousarray(numbers.T), bits, block)
            else:
                made[name] = round_for_head(numbers, matters, bits, block)
        blocks = made[name]
        levels = add_constant(model.graph, f"{name}.levels", packed(blocks.levels) if bits == BITS else blocks.levels)
        scales = add_constant(model.graph, f"{name}.scales", blocks.scales[..., None])
        zeros = add_constant(model.graph, f"{name}.zeros", blocks.zeros[..., None])
        for node in gathers:
            _gather(model.graph, node, levels, scales, zeros, width, bits)
        if heads:
            flat = [
                add_constant(model.graph, f"{name}.head.scales", blocks.scales.reshape(-1)),
                add_constant(
                    model.graph,
                    f"{name}.head.zeros",
                    (packed(blocks.zeros) if bits == BITS else blocks.zeros).reshape(-1),
                ),
            ]
            for node in heads:
                _multiply(node, [levels, *flat], numbers.shape, block, bits)
        model.graph.initializers.pop(name)
        notes.append(f"table {name} in {bits} bits{', which the head shares' if heads else ''}")
    return notes


def _tables(model: ir.Model) -> Iterator[tuple[Any, list[ir.Node], list[ir.Node]]]:
    """Yield large tables with the nodes that look up rows, and those that multiply by the transposed table.

    Tables with other users are skipped.
    """
    for value in list(model.graph.initializers.values()):
        shape = [size for size in value.shape or () if isinstance(size, int)]
        if len(shape) != 2 or value.dtype != ir.DataType.FLOAT or value.const_value is None:
            continue
        if shape[0] * shape[1] < LEAST or shape[1] % _BLOCKS[-1] or value.is_graph_output():
            continue
        gathers, heads, others = [], [], 0
        for node, place in value.uses():
            if node.graph is not model.graph or node.domain:
                others += 1
            elif node.op_type == "Gather" and place == 0 and not _axis(node):
                gathers.append(node)
            elif node.op_type == "Gemm" and place == 1 and is_plain_gemm(node) and is_transposed(node):
                heads.append(node)
            elif node.op_type == "Transpose" and (products := _products(node)):
                heads += products
            else:
                others += 1
        if gathers and not others and np.isfinite(value.const_value.numpy()).all():
            yield value, gathers, heads


def _axis(node: ir.Node) -> int:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else 0


def _products(turning: ir.Node) -> list[ir.Node]:
    """Return the products that read a transposed table; none if it has other users too."""
    users = list(turning.outputs[0].uses())
    plain = all(node.op_type == "MatMul" and not node.domain and place == 1 for node, place in users)
    return [node for node, _ in users] if plain and not turning.outputs[0].is_graph_output() else []


def _gather(graph: Any, node: ir.Node, levels: Any, scales: Any, zeros: Any, width: int, bits: int) -> None:
    """Replace a look-up by one of rounded rows; its result keeps name, type and shape."""
    tokens, result = node.inputs[1], node.outputs[0]
    assert tokens is not None and tokens.shape is not None and result.dtype is not None
    where, element = list(tokens.shape), result.dtype
    made: list[ir.Node] = []

    def add(op: str, inputs: list[Any], shape: list[Any], dtype: Any = element, **attributes: Any) -> Any:
        made.append(node_like(node, op, inputs, shape, dtype, f"{node.name}.{len(made)}", **attributes))
        return made[-1].outputs[0]

    eight, block = ir.DataType.UINT8, levels.shape[2] * WIDE_BITS // bits
    stored, single = [*where, *levels.shape[1:]], [*where, levels.shape[1], 1]
    whole = [*where, levels.shape[1], block]
    taken = add("Gather", [levels, tokens], stored, eight)
    if bits == BITS:
        four = add_constant(graph, "table.four", np.array(BITS, np.uint8))
        lower = add_constant(graph, "table.lower", np.array((1 << BITS) - 1, np.uint8))
        last = add_constant(graph, "table.last", np.array([-1], np.int64))
        ends = np.array([0] * len(where) + [levels.shape[1], block], np.int64)
        shape = add_constant(graph, f"table.{len(where)}.{levels.shape[1]}.{block}", ends)
        high = add("BitShift", [taken, four], stored, eight, direction="RIGHT")
        low = add("BitwiseAnd", [taken, lower], stored, eight)
        pair = [add("Unsqueeze", [half, last], [*stored, 1], eight) for half in (low, high)]
        taken = add("Reshape", [add("Concat", pair, [*stored, 2], eight, axis=-1), shape], whole, eight)
    level = add("Cast", [taken], whole, to=element)
    zero = add("Cast", [add("Gather", [zeros, tokens], single, eight)], single, to=element)
    scaled = add("Mul", [add("Sub", [level, zero], whole), add("Gather", [scales, tokens], single)], whole)
    ends = add_constant(graph, f"rows.{len(where)}.{width}", np.array([0] * len(where) + [width], np.int64))
    row = add("Reshape", [scaled, ends], [*where, width])
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, [row])


def _multiply(node: ir.Node, parts: list[Any], shape: tuple[int, ...], block: int, bits: int) -> None:
    """Replace a head by a product with the stored table; remove a Transpose that is no longer read."""
    turned = node.inputs[1]
    assert turned is not None
    turning = turned.producer()
    replace_node(
        node,
        OP_TYPE,
        [node.inputs[0], *parts],
        domain=DOMAIN,
        name=node.name,
        K=shape[1],
        N=shape[0],
        bits=bits,
        block_size=block,
        accuracy_level=ACCURACY,
    )
    if turning is not None and not turned.uses() and turning.graph is not None:
        turning.graph.remove(turning, safe=True)
