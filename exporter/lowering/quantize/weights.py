"""Store a traced model's linear layers in fewer bits, by a table of kinds and their requirements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from ....core.error_texts import argument
from ....core.errors import MissingDependency, UsageError
from ....core.versions import WIDE_BLOCKS_FROM, parse
from ....onnx_graph import block_weights
from ...models.family import TORCH_DTYPE
from ...options import ExportRequest, ModuleOptions
from . import blocked, dynamic_int8, scaled_rows


@dataclass(frozen=True)
class WeightKind:
    """A kind of weights.

    Args:
        quantize: takes a traced model, and returns it with its linear layers in this kind.
        products: what the products take and give, for errors.
        instead: what to do where a model loses too much in it.
        bits: of a level, where matrices are in blocks; `quantize` then also takes a `blocked.Rounding`.
        spans_tokens: a token has a say in how others are rounded, also one outside of their windows.
        standard_from: the opset from which standard operators express it.
        opset_from: the opset from which any operators do.
        dtypes: element types of the files that it goes with.
    """

    quantize: Callable[..., ir.Model]
    products: str
    instead: str
    bits: int = 0
    spans_tokens: bool = False
    standard_from: int = 0
    opset_from: int = 0
    dtypes: tuple[str, ...] = ("fp32",)


_IN_INT8, _IN_FP8 = (partial(scaled_rows.quantize, kind=kind) for kind in (scaled_rows.INT8, scaled_rows.FP8))
_PLAIN = f"Leave {argument('weight_dtype')} out: this model needs its weights as they are."
_WIDE = (
    f"Try {argument('weight_dtype', 'int4')}, which rounds weights and no activations, or leave "
    f"{argument('weight_dtype')} out."
)
# Bits of a table's levels, by the values of `table_dtype`.
TABLE_BITS: Mapping[str, int] = {"int8": block_weights.WIDE_BITS, "int4": block_weights.BITS}
# A row for each value of `weight_dtype`; each has its tolerance in `core.tolerance`.
WEIGHT_KINDS: Mapping[str, WeightKind] = {
    "int8": WeightKind(
        blocked.quantize,
        "products of int8 matrices",
        _PLAIN,
        bits=block_weights.WIDE_BITS,
        standard_from=block_weights.OPSET,
    ),
    "int4": WeightKind(
        blocked.quantize,
        "products of int4 matrices",
        _PLAIN,
        bits=block_weights.BITS,
        standard_from=block_weights.OPSET,
    ),
    "int8-dynamic": WeightKind(dynamic_int8.quantize, "dynamic int8 products", _WIDE, spans_tokens=True),
    "int8-qdq": WeightKind(_IN_INT8, "products of rounded rows", _WIDE, dtypes=("fp32", "fp16")),
    "fp8": WeightKind(_IN_FP8, "products of rounded rows", _WIDE, opset_from=19, dtypes=("fp32", "fp16")),
}


def check_precision(options: ExportRequest | ModuleOptions) -> None:
    """Refuse an unknown element type or kind of weights, or two that cannot be combined.

    Raises:
        UsageError: the precision is one of these.
        MissingDependency: the installed onnxruntime cannot compute it.
    """
    if options.dtype not in TORCH_DTYPE:
        raise UsageError(f"Unknown dtype {options.dtype!r}.", fix=f"Known: {', '.join(TORCH_DTYPE)}.")
    check_weights(options.weight_dtype, options.dtype, options.opset, standard_ops=options.standard_ops)


def check_weights(weights: str | None, dtype: str, opset: int, *, standard_ops: bool) -> None:
    """Refuse a kind of weights that is unknown or incompatible with the file's other options.

    Raises:
        UsageError: it is one of these.
        MissingDependency: the installed onnxruntime cannot compute it.
    """
    if weights is None:
        return
    kind = WEIGHT_KINDS.get(weights)
    if kind is None:
        raise UsageError(f"Unknown weights {weights!r}.", fix=f"Known: {', '.join(WEIGHT_KINDS)}.")
    if dtype not in kind.dtypes:
        allowed = " or ".join(kind.dtypes)
        raise UsageError(
            f"{weights} weights do not support {dtype}.",
            why=f"onnxruntime's {kind.products} compute in {allowed}.",
            fix=f"Use {allowed}.",
        )
    if opset < kind.opset_from:
        raise UsageError(
            f"{weights} weights need opset {kind.opset_from}.",
            why=f"Opset {opset} has no such element type.",
            fix=f"Give {argument('opset', kind.opset_from)}.",
        )
    if standard_ops and opset < kind.standard_from:
        raise UsageError(
            f"{argument('standard_ops', True)} with {weights} weights needs opset {kind.standard_from}.",
            why=f"Opset {opset} has no operator for matrices in blocks of {kind.bits} bits.",
            fix=f"Give {argument('opset', kind.standard_from)}, or {argument('weight_dtype', 'int8-dynamic')}, or "
            "leave out one of the two options.",
        )
    _check_multiplies(weights, kind)


def _check_multiplies(weights: str, kind: WeightKind) -> None:
    """Refuse weights whose products the installed onnxruntime lacks, before the work begins.

    Raises:
        MissingDependency: it is too old.
    """
    if kind.bits != block_weights.WIDE_BITS:
        return
    try:
        import onnxruntime
    except ImportError:  # the checks of the file report it
        return
    version = str(onnxruntime.__version__)
    if parse(version) < parse(WIDE_BLOCKS_FROM):
        raise MissingDependency(
            f"{weights} weights need onnxruntime {WIDE_BLOCKS_FROM} or later.",
            why=f"onnxruntime {version} multiplies by matrices in blocks of 4 bits, and not of 8.",
            fix=f"Update it, or give {argument('weight_dtype', 'int8-dynamic')}.",
        )


def quantize_weights(model: ir.Model, weights: str, rounding: blocked.Rounding | None = None) -> ir.Model:
    """Store the model's linear layers in fewer bits, and return the model; the given one must not be used afterwards.

    Args:
        model: traced, fp32, with or without ONNX functions.
        weights: a key of `WEIGHT_KINDS`.
        rounding: how matrices are rounded, for kinds in blocks; the same one for every graph of an export.

    Raises:
        MissingDependency: onnxruntime is not installed, whose quantizer makes int8 matrices.
        ExportFailed: there is no linear layer, or the quantizer failed.
    """
    kind = WEIGHT_KINDS[weights]
    if not kind.bits:
        return kind.quantize(model)
    return kind.quantize(model, blocked.Rounding(bits=kind.bits) if rounding is None else rounding)


def check_rounding(weights: str | None, table: str | None, *, calibrated: bool) -> None:
    """Refuse options of rounding that have no effect.

    Args:
        weights: the kind of weights.
        table: element type of the tables.
        calibrated: a file with inputs was given.

    Raises:
        UsageError: such an option was given.
    """
    kind = WEIGHT_KINDS.get(weights or "")
    if table is not None and (kind is None or not kind.bits):
        raise UsageError(
            f"{argument('table_dtype', table)} does not apply here.",
            why="Tables are stored in few bits together with the linear layers.",
            fix=f"Add {argument('weight_dtype', 'int4')} or {argument('weight_dtype', 'int8')}.",
        )
    if table not in (None, *TABLE_BITS):
        raise UsageError(f"Unknown tables {table!r}.", fix=f"Known: {', '.join(TABLE_BITS)}.")
    four = weights == "int4" or table == "int4"
    if calibrated and not four:
        raise UsageError(
            f"{argument('calibration')} has no effect here.",
            why="Only weights and tables in int4 are rounded on inputs.",
            fix=f"Add {argument('weight_dtype', 'int4')}, or leave {argument('calibration')} out.",
        )


def in_blocks(weights: str | None) -> bool:
    """Return whether a kind of weights stores matrices in blocks, and multiplies activations by them in fp32."""
    return weights is not None and bool(WEIGHT_KINDS[weights].bits)


def spans_tokens(weights: str | None) -> bool:
    """Return whether a token influences how others are rounded."""
    return weights is not None and WEIGHT_KINDS[weights].spans_tokens
