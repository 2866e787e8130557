"""Store a traced model's linear layers in blocks of 4 or 8 bits, for onnxruntime's operator that multiplies by them.

Each becomes `com.microsoft::MatMulNBits`. Its accuracy level of 4 lets the processor round activations to 8 bits, with
a scale for every 32 numbers of one token, where it multiplies 8-bit integers fast; that error is a sixteenth of the
weights' own (docs/numerics.md). No token has a say in the scales of another. Layers whose products it would ruin have a
level of 1 and multiply numbers as they are: a massive activation takes the bits of its 31 neighbours. Which ones is
measured on the inputs of the calibration.

With calibration, matrices of 4 bits are rounded for the inputs that they meet in use (`gptq`), and kinds of layers that
cost most get 8 bits (`mixed_bits`). Without, each matrix is rounded by its own numbers.

Large tables of embeddings get 8 bits, or 4 where asked for (`tables`). Smaller ones, attention, norms, residual
streams, and matrices too narrow to be worth it stay as they are.
`onnx_graph.standard_ops` writes the same in standard operators.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ....core.versions import WIDE_BLOCKS_FROM
from ....onnx_graph.block_weights import ACCURACY, BITS, DOMAIN, EXACT, OP_TYPE, WIDE_BITS, packed
from ....onnx_graph.graph_values import add_constant, replace_node
from ....onnx_graph.standard_ops.names import MODULE
from .blocks import BLOCK, Blocks, Floats, round_in_blocks
from .calibration import Calibration, kind_of
from .gptq import round_for_inputs
from .linear_layers import StoredMatrix, is_transposed, linear_layers, replace_layers
from .mixed_bits import Rounded, choose
from .tables import quantize_tables

# A layer multiplies inputs as they are if rounding them would change it by this part, at any token. Ordinary layers
# have up to 0.016, those of a trained model up to 0.04, and those with a massive activation 0.15 to 0.8.
_RUINED = 0.1
# Of so many such layers each is named.
_NAMED = 3


@dataclass
class Rounding:
    """Decide how the matrices of a model are rounded: measured on its first graph, and the same for all other graphs.

    Args:
        calibration: the model and inputs as in use; None rounds each matrix by its own numbers.
        logits: the model's first output is a distribution over a vocabulary.
        bits: of a level of a linear layer, 4 or 8.
        table_bits: of a level of a large table.

    Attributes:
        notes: what was chosen, and by which measurement.
        exact: paths of layers whose inputs are not rounded; all others' may be.
    """

    calibration: Calibration | None = None
    logits: bool = False
    bits: int = BITS
    table_bits: int = WIDE_BITS
    notes: list[str] = field(default_factory=list)
    exact: frozenset[str] = frozenset()
    _made: dict[str, Blocks] = field(default_factory=dict)
    _tables: dict[str, Blocks] = field(default_factory=dict)

    def of_tables(self, model: ir.Model) -> None:
        """Store the large tables of a graph; only the first graph adds notes."""
        first = not self._tables
        notes = quantize_tables(model, self._tables, self.table_bits, self._importance)
        self.notes += notes if first else []

    def _importance(self, rows: int, columns: int) -> Floats | None:
        """Return the mean squares `[columns]` of what a head multiplies a table by; None where that is not known."""
        calibration = self.calibration
        if calibration is None:
            return None
        shape = (rows, columns)
        path = next((path for path, layer in calibration.layers.items() if tuple(layer.weight.shape) == shape), None)
        if path is None:
            return None
        return next((found[path].diagonal().numpy() for found in calibration.moments([path]) if path in found), None)

    def blocks(self, matrices: Mapping[str, NDArray[Any]]) -> Mapping[str, Blocks]:
        """Return the rounded matrices `[K, N]` of linear layers by path; the calibration is used once and then freed.

        Further pieces of a layer whose packed matrix was cut have their number behind the path, as `_piece` writes it.
        Layers that the calibration does not show are left out.
        """
        calibration, self.calibration = self.calibration, None
        if calibration is not None:
            self.exact = self._ruined(calibration, matrices)
        if self.bits == WIDE_BITS:
            if not self._made:
                self.notes.append(f"matrices in blocks of 8 bits; they need onnxruntime {WIDE_BLOCKS_FROM}")
            new = {path: _floats(x) for path, x in matrices.items() if path not in self._made}
            self._made |= {path: round_in_blocks(x, self.bits) for path, x in new.items()}
        elif calibration is not None:
            self._made = self._measured(calibration, matrices)
        return self._made

    def _ruined(self, calibration: Calibration, matrices: Mapping[str, NDArray[Any]]) -> frozenset[str]:
        """Return the layers that a rounding of their inputs would ruin."""
        known = {_layer_of(path) for path, x in matrices.items() if _fits(calibration, path, x)}
        parts = calibration.rounded_inputs(dict.fromkeys(known, BLOCK))
        ruined = sorted((path for path, part in parts.items() if part > _RUINED), key=lambda path: -parts[path])
        if ruined:
            named = [f"{path} ({parts[path]:.0%})" for path in ruined[:_NAMED]]
            more = len(ruined) - len(named)
            self.notes.append(
                f"{', '.join(named)}{f' and {more} more layers' if more else ''}: inputs are multiplied as they are; "
                "rounded to 8 bits they would change the layer's outputs at one token by that part"
            )
        return frozenset(ruined)

    def _measured(self, calibration: Calibration, matrices: Mapping[str, NDArray[Any]]) -> dict[str, Blocks]:
        known = {path: x for path, x in matrices.items() if _fits(calibration, path, x)}
        four: dict[str, Blocks] = {}
        for moments in calibration.moments(list(dict.fromkeys(map(_layer_of, known)))):
            four |= {
                path: round_for_inputs(_floats(x), moments[_layer_of(path)], BITS)
                for path, x in known.items()
                if _layer_of(path) in moments and bool(moments[_layer_of(path)].isfinite().all())
            }
        rounded = {
            path: Rounded(blocks, round_in_blocks(_floats(known[path]), WIDE_BITS))
            for path, blocks in four.items()
            if np.array_equal(calibration.layers[_layer_of(path)].weight.detach().numpy().T, known[path])
        }
        alone, chosen = choose(calibration, rounded, logits=self.logits)
        unit = "nats" if self.logits else "of the mean square"
        self.notes.append(
            f"weights rounded on {calibration.words}; with 4 bits only, the outputs would change by {alone:.2g} {unit}"
        )
        self.notes += [
            f"8 bits for {effect.kind}: {effect.distance:.2g} {unit}, {effect.growth:.1%} larger weights; "
            f"they need onnxruntime {WIDE_BLOCKS_FROM}"
            for effect in chosen
        ]
        kinds = {effect.kind for effect in chosen}
        wide = {path: layer.eight for path, layer in rounded.items() if kind_of(path) in kinds}
        return four | wide


def quantize(model: ir.Model, rounding: Rounding | None = None) -> ir.Model:
    """Store the model's linear layers in blocks, in place, and return the model.

    Args:
        model: traced, fp32, with or without ONNX functions.
        rounding: how; by default each matrix by its own numbers.

    Raises:
        ExportFailed: there is no linear layer, or a matrix contains NaN or infinity.
    """
    rounding = Rounding() if rounding is None else rounding
    rounding.of_tables(model)
    matrices: dict[str, NDArray[Any]] = {}
    paths: dict[str, str] = {}
    for node in linear_layers(model):
        name, numbers = _matrix(node)
        path = node.metadata_props.get(MODULE, "")
        if path and name not in paths and np.isfinite(numbers).all():
            piece = _piece(path, sum(_layer_of(known) == path for known in matrices))
            matrices[piece], paths[name] = numbers, piece
    made = rounding.blocks(matrices)
    blocks = {name: made[path] for name, path in paths.items() if path in made}
    replace_layers(model, "blocks", partial(_stored, model, blocks, rounding.bits), partial(_replace, rounding.exact))
    return model


def _piece(path: str, number: int) -> str:
    """Name a piece of a layer's matrix: a packed matrix is cut where its product only is (`onnx_graph/fusing`)."""
    return f"{path}/{number}" if number else path


def _layer_of(piece: str) -> str:
    """Return the path of the layer that a piece is of."""
    return piece.partition("/")[0]


def _fits(calibration: Calibration, path: str, matrix: NDArray[Any]) -> bool:
    layer = calibration.layers.get(_layer_of(path))
    return layer is not None and layer.in_features == len(matrix)


def _floats(matrix: NDArray[Any]) -> NDArray[np.float32]:
    return matrix.astype(np.float32, copy=False)


def _matrix(node: ir.Node) -> tuple[str, NDArray[Any]]:
    """Return the name and the numbers `[K, N]` of a linear layer's matrix, as `replace_layers` names it."""
    matrix = node.inputs[1]
    assert matrix is not None and matrix.const_value is not None
    numbers = matrix.const_value.numpy()
    turned = is_transposed(node)
    return f"{matrix.name}{'.turned' if turned else ''}", numbers.T if turned else numbers


def _stored(model: ir.Model, made: Mapping[str, Blocks], bits: int, name: str, matrix: NDArray[Any]) -> list[ir.Value]:
    """Add the initializers of a matrix in blocks: levels, scales and zero points."""
    blocks = made[name] if name in made else round_in_blocks(_floats(matrix), bits)
    fits = packed if blocks.bits == BITS else np.ascontiguousarray
    # The scales have one dimension, which every release supports.
    parts = {
        "levels": fits(blocks.levels), "scales": blocks.scales.reshape(-1), "zeros": fits(blocks.zeros).reshape(-1)
    }  # fmt: skip
    return [add_constant(model.graph, f"{name}.{part}", array) for part, array in parts.items()]


def _replace(exact: Collection[str], node: ir.Node, matrix: StoredMatrix) -> None:
    """Replace a linear layer by a product with a stored matrix; the inputs of exact ones are not rounded."""
    levels = matrix.initializers[0].shape
    assert levels is not None and isinstance(levels[-1], int)
    replace_node(
        node,
        OP_TYPE,
        [node.inputs[0], *matrix.initializers],
        domain=DOMAIN,
        name=node.name,
        K=matrix.rows,
        N=matrix.columns,
        bits=levels[-1] * 8 // BLOCK,
        block_size=BLOCK,
        accuracy_level=EXACT if node.metadata_props.get(MODULE, "") in exact else ACCURACY,
    )
