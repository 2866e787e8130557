"""Prove a file of rounded weights in two steps, without a tolerance as wide as its rounding.

Rounded to few bits, a correct file may differ from its model by a tenth, and many faults differ by less. So the two
sources of a difference are proven apart, each tightly:

1. *graph before rounding*: the traced graph with the model's own weights against the float64 reference, by the
   criteria of fp32 (`GraphProof`).
2. *rounded weights*: the weights are read back from the written file's bytes, widened to fp32, and put into that same
   graph; the file must compute what it computes. And each matrix read back must be near the model's own
   (`check_rounded`).

What remains is what rounding costs the model, which is quality and not a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from ...core.documents.proof import GRAPH_CHECK
from ...core.documents.sidecar import CheckRecord
from ...core.errors import LocalAttnError
from ...core.tolerance import Tolerance
from ...onnx_graph import block_weights
from ...onnx_graph.block_weights import ACCURACY, EXACT, unpacked
from ...onnx_graph.standard_ops.names import MODULE
from ...runtime.backends.onnxruntime.session import open_file
from ...runtime.parity.compare import compare
from ...runtime.parity.comparison import Comparison, merged
from ...runtime.parity.runner import Runner, SessionRunner
from ...runtime.session import Arrays, Session
from ..lowering.quantize.blocked import Rounding
from ..lowering.quantize.weights import quantize_weights
from ..source.source_model import SourceModel
from .outcome import failed, not_proven, passed
from .parity import baseline_meter, parity_record

Floats = NDArray[np.float32]
# Makes of a session what runs whole inputs: a step file is fed call by call.
Feeds = Callable[[Session], Runner]

# A file that multiplies exactly, against fp32 products of the same weights: two orders of the same sums.
_SAME = Tolerance(None, None, relative_rms=1e-3)
# What 8 bits of activations may change, where a file rounds them: the bound of files in int8.
_ROUNDED = Tolerance(None, None, cosine=0.99, relative_rms=0.14)
# The most that a matrix may be off by, relative to its norm, by bits. Measured in trained models and in random ones: up
# to 0.18 in 4 bits, where other numbers of the matrix make up for it, and 0.026 in 8 (fp8).
_FURTHEST = {4: 0.3, 8: 0.06}
# Positions on which a file is compared with its own weights.
_POSITIONS = 1024
# Bytes of outputs that are kept to compare with.
_KEPT = 1 << 28
# Rows of a matrix at a time.
_ROWS = 4096
_WEIGHTS = "weights"


def keep_unrounded(model: ir.Model, folder: Path, name: str) -> Path:
    """Write a traced model before its weights are rounded, with the weights beside it, and return its path.

    Args:
        model: with its ONNX functions; it is not changed.
        folder: of the export, which is removed at its end.
        name: of the file that will be written.
    """
    place = folder / "unrounded"
    place.mkdir(exist_ok=True)
    path = place / name
    ir.save(model, path, external_data=f"{name}.{_WEIGHTS}")
    return path


@dataclass
class GraphProof:
    """Compare the graph before rounding with the reference, on the inputs on which the rounded file is compared.

    Args:
        path: of the graph, as `keep_unrounded` wrote it.
        tolerance: of fp32.

    Attributes:
        sets: the inputs so far, by name.
        then: of a file that takes chunks, the graph of the step file that takes the tokens left.
        record: what was found, once the inputs are through.
    """

    path: Path
    tolerance: Tolerance
    sets: list[tuple[str, Arrays]] = field(default_factory=list)
    then: GraphProof | None = None
    record: CheckRecord | None = None
    _found: list[tuple[str, Comparison]] = field(default_factory=list)
    _session: Session | None = None
    _meter: Any = None

    @property
    def session(self) -> Session:
        """The graph in onnxruntime on the CPU."""
        if self._session is None:
            self._session = open_file(self.path, provider="cpu", plugin="none", lean=True, arranged=False)
        return self._session

    def take(
        self,
        name: str,
        inputs: Arrays,
        source: SourceModel,
        reference: Runner,
        expected: Arrays,
        feeds: Feeds = SessionRunner,
    ) -> None:
        """Compare on one set of inputs, for which the reference gave these outputs."""
        if self._meter is None and self.tolerance.takes_baseline:
            self._meter = baseline_meter(source, "fp32", self.tolerance)
        found = compare(feeds(self.session), reference, inputs, self.tolerance, expected=expected).comparisons
        self._found += [(name, comparison) for comparison in found]
        self.sets.append((name, inputs))
        if self._meter is not None:
            self._meter.take(reference, inputs, expected, missed=not all(x.passed for x in found))

    def finish(self, reference: Runner, inputs: str) -> None:
        """Make the record, with the inputs in words, and free the session."""
        record = parity_record(self._found, reference, self.tolerance, inputs, self._meter)
        self.record = record.model_copy(update={"name": GRAPH_CHECK})
        self._session = self._meter = None


@dataclass(frozen=True)
class Product:
    """A product of a written file with weights that it stores in fewer bits.

    Args:
        name: of the node in the graph before rounding.
        bits: of a stored number.
        shape: of the matrix, `[K, N]`.
        matrix: reads the stored weights, fp32 `[K, N]`.
    """

    name: str
    bits: int
    shape: tuple[int, int]
    matrix: Callable[[], Floats]


def check_rounded(
    written: Path,
    session: Session,
    graph: GraphProof,
    feeds: Feeds = SessionRunner,
    *,
    blocks: bool,
    cut: Cut | None = None,
) -> CheckRecord:
    """Compare a rounded file with the graph before rounding, in which its own weights stand.

    Args:
        written: the file.
        session: that file, opened.
        graph: the graph before rounding, after its own proof.
        feeds: makes of a session what runs whole inputs.
        blocks: weights are in blocks and multiplied by numbers of fp32: activations may be rounded, and then the file
            is compared twice, once with that rounding switched off.
        cut: how inputs are cut, for files that take them call by call; None leaves them whole.
    """
    model, before = ir.load(written), ir.load(graph.path)
    products = list(_products(model, before))
    if not products:
        return not_proven("no product of the file reads rounded weights")
    tables = list(_tables(model, before))
    furthest = _put(before, products, tables)
    sets = _few(graph.sets, cut)
    stored_path = graph.path.with_name(f"stored-{graph.path.name}")
    ir.save(before, stored_path, external_data=f"{stored_path.name}.{_WEIGHTS}")
    del before
    count = f"{len(products)} matrices" + (f" and {len(tables)} table(s)" if tables else "")
    off = max(furthest, key=lambda one: one[1] / _FURTHEST[one[2]])
    near = f"{count} read back from the file, off by at most {max(part for _, part, _ in furthest):.2g} of their norm"
    if not off[1] <= _FURTHEST[off[2]]:  # also NaN
        return failed(
            f"the weights of {off[0]} are off by {off[1]:.2g} of their norm, in {off[2]} bits at most "
            f"{_FURTHEST[off[2]]:g}: they are not the model's"
        )
    session.rest()  # one session at a time: each has a copy of the weights
    expected = _outputs(feeds(open_file(stored_path, provider="cpu", plugin="none", lean=True, arranged=False)), sets)
    same: list[Comparison] = []
    exact_path = _multiplying_exactly(written) if blocks else None
    if exact_path is not None:
        exact = feeds(open_file(exact_path, provider="cpu", plugin="none", lean=True, arranged=True))
        same = _compared(exact, sets, expected, _SAME)
        exact_path.unlink()
        del exact
    session.wake()
    rounded = _compared(feeds(session), sets, expected, _ROUNDED)
    wrong = [one for one in _whole(same, _SAME) if not one.passed]
    if wrong:
        return failed(
            f"output {wrong[0].name!r} differs by {wrong[0].relative_rms:.2g} of its rms from what fp32 computes with "
            f"the file's own weights, at most {_SAME.relative_rms:g}; {near}",
            **wrong[0].figures(),
        )
    figures: dict[str, float | int] = {"matrices": len(products), "furthest": max(part for _, part, _ in furthest)}
    words = [near]
    if same:
        figures["exact"] = max(one.relative_rms for one in _whole(same, _SAME))
        words.append(
            f"the file computes what fp32 computes with them, within {figures['exact']:.1e} of the outputs' rms "
            f"({_SAME.relative_rms:g} is allowed)"
        )
    outputs = _whole(rounded, _ROUNDED)
    figures["activations"] = max(one.relative_rms for one in outputs)
    words.append(f"rounding activations as in use changes {figures['activations']:.1e} of the rms")
    beyond = not same and not all(one.passed for one in outputs)
    if beyond:
        words.append("which hides what else may differ")
    return (not_proven if beyond else passed)("; ".join(words), **figures)


def _outputs(runner: Runner, sets: Sequence[Arrays]) -> list[Arrays]:
    """Return the outputs for the first sets, as many as may be kept."""
    found: list[Arrays] = []
    for inputs in sets:
        found.append(runner.run(inputs))
        if sum(array.nbytes for outputs in found for array in outputs.values()) > _KEPT:
            break
    return found


def _compared(
    runner: Runner, sets: Sequence[Arrays], expected: Sequence[Arrays], tolerance: Tolerance
) -> list[Comparison]:
    """Compare a file with outputs for the first sets."""
    pairs = zip(sets, expected, strict=False)
    return [
        found
        for inputs, outputs in pairs
        for found in compare(runner, runner, inputs, tolerance, expected=outputs, whole=True).comparisons
    ]


def _whole(found: Sequence[Comparison], tolerance: Tolerance) -> list[Comparison]:
    """Return one comparison for each output, over all inputs."""
    names = dict.fromkeys(one.name for one in found)
    return [merged([one for one in found if one.name == name], tolerance) for name in names]


@dataclass(frozen=True)
class Cut:
    """How inputs are cut: along which axis, to how many positions at most, and to a multiple of what."""

    axis: int
    most: int
    multiple: int

    def of(self, inputs: Arrays) -> Arrays:
        """Return the beginning of inputs; none may be left."""
        length = min(self.most, next(iter(inputs.values())).shape[self.axis]) // self.multiple * self.multiple
        return {name: np.take(array, np.arange(length), self.axis) for name, array in inputs.items()}


def passes_in_int8(
    graph: GraphProof,
    exact: Collection[str] | None,
    tolerance: Tolerance,
    feeds: Feeds = SessionRunner,
    cut: Cut | None = None,
) -> bool:
    """Return whether matrices in blocks of 8 bits meet a tolerance on the inputs on which a file was refused.

    Args:
        graph: before rounding, after its own proof.
        exact: paths of the layers whose inputs are not rounded; None: all.
        tolerance: of such a file.
        feeds: as of `check_rounded`.
        cut: as of `check_rounded`.
    """
    model = ir.load(graph.path)
    if exact is None:
        exact = {str(node.metadata_props.get(MODULE, "")) for node in model.graph}
    try:
        model = quantize_weights(model, "int8", Rounding(bits=block_weights.WIDE_BITS, exact=frozenset(exact)))
    except LocalAttnError:
        return False
    path = graph.path.with_name(f"int8-{graph.path.name}")
    ir.save(model, path, external_data=f"{path.name}.{_WEIGHTS}")
    del model
    file = feeds(open_file(path, provider="cpu", plugin="none", lean=True, arranged=True))
    before = feeds(graph.session)
    found = (
        comparison
        for inputs in _few(graph.sets, cut, all_sets=True)
        for comparison in compare(file, before, inputs, tolerance, expected=before.run(inputs)).comparisons
    )
    return all(comparison.passed for comparison in found)


def _few(sets: Sequence[tuple[str, Arrays]], cut: Cut | None, *, all_sets: bool = False) -> list[Arrays]:
    """Return the first sets, of some positions together, or all."""
    found: list[Arrays] = []
    left = _POSITIONS if cut is None else 2 * cut.most
    for _, inputs in sets:
        given = inputs if cut is None else cut.of(inputs)
        size = next(iter(given.values())).size
        if (left := left - size) < 0 and found and not all_sets:
            break
        found += [given] if size else []
    return found


def _products(written: ir.Model, before: ir.Model) -> Iterator[Product]:
    """List the products of a file whose matrix is stored in fewer bits than it has in the graph before rounding."""
    names = {node.name for node in before.graph if node.op_type in ("MatMul", "Gemm") and not node.domain}
    for node in written.graph:
        name = str(node.name)
        own = (
            name
            if name in names
            else next((x for x in (name.removesuffix("_quant"), name.rpartition(".")[0]) if x in names), "")
        )
        if not own:
            continue
        if (node.domain, node.op_type) == (block_weights.DOMAIN, block_weights.OP_TYPE):
            rows, columns, bits = (node.attributes[x].as_int() for x in ("K", "N", "bits"))
            yield Product(own, bits, (rows, columns), partial(_of_blocks, node))
        elif node.op_type == "MatMulInteger":
            yield Product(own, 8, _sizes(node.inputs[1]), partial(_of_columns, written, node))
        elif node.op_type == "MatMul" and (widened := _widened(node.inputs[1])) is not None:
            dequantized, turned = widened
            given = dequantized.inputs[0]
            assert given is not None and given.dtype is not None
            rows, columns = _sizes(given)
            shape = (columns, rows) if turned else (rows, columns)
            bits = 4 if given.dtype in (ir.DataType.UINT4, ir.DataType.INT4) else 8
            yield Product(own, bits, shape, partial(_of_dequantize, dequantized, turned=turned))


def _sizes(value: ir.Value | None) -> tuple[int, int]:
    """Return the sizes of a constant matrix."""
    rows, columns = _numbers(value).shape
    return rows, columns


def _widened(value: ir.Value | None) -> tuple[ir.Node, bool] | None:
    """Return the node that widens a stored matrix, and whether it is turned after that; None for another value."""
    node = None if value is None else value.producer()
    turned = node is not None and node.op_type == "Transpose"
    if node is not None and turned:
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    if (
        node is None
        or node.op_type != "DequantizeLinear"
        or any(x is None or not x.is_initializer() for x in node.inputs)
    ):
        return None
    return node, turned


def _numbers(value: ir.Value | None) -> NDArray[Any]:
    assert value is not None and value.const_value is not None
    found: NDArray[Any] = value.const_value.numpy()
    return found


def _of_blocks(node: ir.Node) -> Floats:
    """Read the matrix of a MatMulNBits, fp32 `[K, N]`."""
    rows, columns, bits, block = (node.attributes[name].as_int() for name in ("K", "N", "bits", "block_size"))
    count = -(-rows // block)
    levels, scales, zeros = (_numbers(value) for value in node.inputs[1:4])
    levels, zeros = levels.reshape(columns, count, -1), zeros.reshape(columns, -1)
    if bits == block_weights.BITS:
        levels, zeros = unpacked(levels, block), unpacked(zeros, count)
    found: Floats = _scaled(levels, scales.reshape(columns, count), zeros)[:, :rows].T
    return found


def _scaled(levels: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any]) -> Floats:
    """Return numbers `[N, blocks·block]` of levels `[N, blocks, block]`, scales and zero points `[N, blocks]`."""
    wide = levels.astype(np.float32) - zeros.astype(np.float32)[..., None]
    found: Floats = (wide * scales.astype(np.float32)[..., None]).reshape(len(levels), -1)
    return found


def _of_columns(model: ir.Model, node: ir.Node) -> Floats:
    """Read the matrix `[K, N]` of a MatMulInteger that onnxruntime's quantizer made, with a scale a column."""
    stored = node.inputs[1]
    assert stored is not None
    scales = _numbers(model.graph.initializers[f"{str(stored.name).removesuffix('_quantized')}_scale"])
    zeros = _numbers(node.inputs[3]).astype(np.float32)
    found: Floats = (_numbers(stored).astype(np.float32) - zeros) * scales.astype(np.float32)
    return found


def _of_dequantize(node: ir.Node, turned: bool) -> Floats:
    """Read the matrix `[K, N]` behind a DequantizeLinear, in blocks or with a scale a column."""
    levels, scales, zeros = (_numbers(value).astype(np.float32) for value in node.inputs[:3])
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    if block:
        scales, zeros = (
            np.take(np.repeat(x, block, axis), np.arange(levels.shape[axis]), axis) for x in (scales, zeros)
        )
    else:
        shape = [-1 if place == axis else 1 for place in range(2)]
        scales, zeros = scales.reshape(shape), zeros.reshape(shape)
    found: Floats = (levels - zeros) * scales
    return found.T if turned else found


@dataclass(frozen=True)
class Table:
    """A table of embeddings that a file stores in fewer bits: its name, bits, shape `[V, D]`, and what reads it."""

    name: str
    bits: int
    shape: tuple[int, int]
    matrix: Callable[[], Floats]


def _tables(written: ir.Model, before: ir.Model) -> Iterator[Table]:
    stored = written.graph.initializers
    for node in before.graph:
        table = node.inputs[0] if node.op_type == "Gather" and not node.domain else None
        if table is None or not table.is_initializer() or table.name in stored or f"{table.name}.levels" not in stored:
            continue
        shape = _sizes(table)
        _, blocks, size = _numbers(stored[f"{table.name}.levels"]).shape
        bits = size * blocks * 8 // shape[1]

        def matrix(name: str = str(table.name), bits: int = bits, width: int = shape[1]) -> Floats:
            levels, scales, zeros = (_numbers(stored[f"{name}.{part}"]) for part in ("levels", "scales", "zeros"))
            if bits == block_weights.BITS:
                levels = unpacked(levels, width // levels.shape[1])
            return _scaled(levels, scales[..., 0], zeros[..., 0])

        yield Table(str(table.name), bits, shape, matrix)


def _put(before: ir.Model, products: Sequence[Product], tables: Sequence[Table]) -> list[tuple[str, float, int]]:
    """Put the stored weights into the graph before rounding; return how far each is from the model's, as it is known.

    Of each: its name, the norm of the difference relative to the norm of the model's own, and its bits.
    """
    found = []
    nodes = {str(node.name): node for node in before.graph}
    graph = before.graph
    for product in products:
        node = nodes[product.name]
        matrix = node.inputs[1]
        assert matrix is not None
        own = _own(matrix)
        turned = node.op_type == "Gemm" and "transB" in node.attributes and bool(node.attributes["transB"].as_int())
        numbers = product.matrix()
        numbers = np.ascontiguousarray(numbers.T if turned else numbers)
        found.append((str(matrix.name), _apart(numbers, own), product.bits))
        node.replace_input_with(
            1, _lazily(graph, f"{product.name}.stored", numbers.shape, product.matrix, turned=turned)
        )
    for table in tables:
        value = graph.initializers[table.name]
        found.append((table.name, _apart(table.matrix(), _numbers(value)), table.bits))
        new = _lazily(graph, f"{table.name}.stored", table.shape, table.matrix, turned=False)
        value.replace_all_uses_with(new)
    for node in [node for node in graph if node.op_type == "Transpose" and not node.outputs[0].uses()]:
        if not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)
    return found


def _own(value: ir.Value) -> NDArray[Any]:
    """Return the model's own matrix behind an input of a product, which may be a table that is turned."""
    node = value.producer()
    return _numbers(value) if node is None else _numbers(node.inputs[0]).T


def _apart(stored: NDArray[Any], own: NDArray[Any]) -> float:
    """Return the norm of the difference of two matrices relative to that of the second, some rows at a time."""
    if stored.shape != own.shape:
        return float("nan")
    squares = whole = 0.0
    for start in range(0, len(own), _ROWS):
        part = slice(start, start + _ROWS)
        squares += float(np.square(stored[part] - own[part], dtype=np.float64).sum())
        whole += float(np.square(own[part], dtype=np.float64).sum())
    return float(np.sqrt(squares / whole)) if whole else float(squares > 0)


def _lazily(graph: Any, name: str, shape: Sequence[int], read: Callable[[], Floats], turned: bool) -> ir.Value:
    """Add an initializer whose numbers are read when it is written: of all matrices one at a time is in memory."""

    def tensor() -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(read().T if turned else read()), name=name)

    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    value.const_value = ir.LazyTensor(tensor, dtype=ir.DataType.FLOAT, shape=ir.Shape(shape), name=name)
    graph.register_initializer(value)
    return value


def _multiplying_exactly(written: Path) -> Path | None:
    """Write a copy of a file beside it that multiplies activations as they are; None where it has no such products."""
    model = onnx.load(written, load_external_data=False)
    changed = False
    for node in model.graph.node:
        if (node.domain, node.op_type) == (block_weights.DOMAIN, block_weights.OP_TYPE):
            changed = True
            for attribute in node.attribute:
                if attribute.name == "accuracy_level" and attribute.i == ACCURACY:
                    attribute.i = EXACT
    if not changed:
        return None
    path = written.with_name(f"exact-{written.name}")
    onnx.save(model, path)
    return path
