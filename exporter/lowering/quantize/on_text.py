"""Decide how the weights of a checkpoint are rounded: on text if the model has token inputs, or on a user's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....core.error_texts import argument
from ....core.errors import UsageError
from ....core.tensors import INTEGER_MASKS
from ....runtime.inputs.arrays import load_arrays, random_inputs
from ....runtime.text_inputs.rows import Row, arrays_of_rows, token_names
from ....runtime.text_inputs.tokens import Opening, Tokens
from ...options import ExportRequest
from ...source.source_model import SourceModel
from ...source.tokens import tokens_of, tokens_of_text
from ..trace import entry_of
from .blocked import Rounding
from .calibration import Calibration
from .weights import TABLE_BITS, WEIGHT_KINDS

# The most tokens for moments, in all rows and in one row.
_TOKENS, CALIBRATION_ROW = 4096, 512
# Tokens of other rows, for measuring effects.
_JUDGED = 512
_MOST_ROWS = 64
# Passages of a row.
_PASSAGES = 2
# Tokens of the rows, one for each way to begin, on which a rounding of activations is measured; the lengths of such a
# row that are tried where nothing else is measured.
_BEGUN, _SHORT = 2048, (64, 128, 256)

Inputs = tuple[torch.Tensor, ...]


def rounding_on_text(request: ExportRequest, source: SourceModel) -> Rounding | None:
    """Return how the weights of an export are rounded; None for kinds of weights that are not stored in blocks.

    Without `calibration` the text is the part of the shipped text that nothing is judged on.

    Args:
        request: its kind of weights, its checkpoint, whose folder may contain a tokenizer, and its calibration.
        source: the model.

    Raises:
        UsageError: the calibration cannot be used.
    """
    kind = WEIGHT_KINDS.get(request.weight_dtype or "")
    if kind is None or not kind.bits:
        return None
    table_bits = TABLE_BITS[request.table_dtype or "int8"]
    logits = source.outputs[0] == "logits"
    if min(kind.bits, table_bits) == max(TABLE_BITS.values()):
        measured = _calibration(request, source, rounds=False)
        calibration = None if isinstance(measured, str) else measured
        return Rounding(calibration, bits=kind.bits, table_bits=table_bits, logits=logits)
    found = _calibration(request, source)
    if isinstance(found, str):
        return Rounding(bits=kind.bits, table_bits=table_bits, logits=logits, notes=[found])
    return Rounding(found, bits=kind.bits, table_bits=table_bits, logits=logits)


def _calibration(request: ExportRequest, source: SourceModel, *, rounds: bool = True) -> Calibration | str:
    """Return the model with inputs to calibrate on, or why there are none; without `rounds` weights are not rounded."""
    path = None if request.calibration is None else Path(request.calibration)
    if path is not None and path.suffix == ".npz":
        return _on_arrays(path, source)
    if path is None:
        tokens = tokens_of(request.checkpoint, source, "calibration")
    else:
        tokens = tokens_of_text(request.checkpoint, source, path)
    if tokens is None:
        return (
            "weights rounded without calibration: the model has no token input; an .npz with inputs of the model as "
            f"{argument('calibration')} rounds them better"
        )
    at = _of_one_row(source, (CALIBRATION_ROW,) if rounds else _SHORT)
    length = at.shapes.seq_len
    count, judged = (min(_MOST_ROWS, max(1, most // length)) if rounds else 0 for most in (_TOKENS, _JUDGED))
    rows = _rows(at, tokens, [(start, None) for start in range(count + judged)])
    openings = [None, *tokens.openings][: max(1, _BEGUN // length)]
    begun = _rows(at, tokens, list(enumerate(openings)))
    words = tokens.describe(count, count * length) + ("" if path is None else f" of {path.name}")
    return Calibration(entry_of(at, "fp32"), rows[:count], rows[count:], words, begun)


def _of_one_row(source: SourceModel, lengths: Sequence[int]) -> SourceModel:
    """Return the model at the first of these lengths that it accepts, else at its own, with a batch of one row."""
    for length in lengths:
        try:
            return source.resized(seq_len=min(length, source.shapes.seq_len), batch=1)
        except UsageError:
            continue
    return source.resized(batch=1)


def _rows(source: SourceModel, tokens: Tokens, kinds: Sequence[tuple[int, Opening | None]]) -> list[Inputs]:
    """Return the inputs of calls with one row each, at the sizes of the model.

    Args:
        source: the model.
        tokens: where the tokens come from.
        kinds: of each row, which passage it begins with, and its opening; None for the usual one.
    """
    specs = source.inputs("fp32")
    drawn = random_inputs(specs, 0, source.token_limit)
    found = []
    for start, opening in kinds:
        row = Row("", tokens.row(start % tokens.kinds, source.shapes.seq_len, opening, pieces=_PASSAGES))
        arrays = arrays_of_rows([row], specs, drawn, tokens.pad)
        found.append(tuple(torch.from_numpy(arrays[spec.name]) for spec in specs))
    return found


def _on_arrays(path: Path, source: SourceModel) -> Calibration:
    """Calibrate on a user's arrays: each row of the first input's batch axis is a call.

    Raises:
        UsageError: an input is missing, or has other sizes than the model takes.
    """
    arrays, specs = load_arrays(path), source.inputs("fp32")
    main = next((name for name in token_names(specs)), specs[0].name)
    needed = [spec.name for spec in specs if spec.name not in (*INTEGER_MASKS, "mask")]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise UsageError(
            f"{path} has no array {missing[0]!r}.",
            why=f"The model takes {', '.join(needed)}.",
            fix="Save it there too.",
        )
    given = arrays[main]
    wanted = next(spec for spec in specs if spec.name == main)
    if given.ndim != len(wanted.shape) or not given.size:
        sizes = " × ".join(map(str, given.shape))
        raise UsageError(
            f"{main!r} of {path} does not fit the model.", why=f"It is {sizes}; {len(wanted.shape)} axes are needed."
        )
    length = min(CALIBRATION_ROW, source.shapes.seq_len, given.shape[1])
    at = source.resized(seq_len=length, batch=1)
    rows = [_row(path, at, arrays, place) for place in range(min(_MOST_ROWS, len(given)))]
    judged = max(1, len(rows) // 8)
    words = f"{len(rows)} rows of {path.name}, {len(rows) * length:,} positions"
    return Calibration(entry_of(at, "fp32"), rows[:-judged] or rows, rows[-judged:], words)


def _row(path: Path, source: SourceModel, arrays: dict[str, NDArray[Any]], place: int) -> Inputs:
    """Return one row of a user's arrays, cut to the length of the model; masks that are missing keep everything."""
    found = []
    for spec in source.inputs("fp32"):
        shape = tuple(int(size) for size in spec.shape)
        given = arrays.get(spec.name)
        if given is None:
            found.append(torch.ones(shape, dtype=getattr(torch, spec.dtype)))
            continue
        row = given[place : place + 1, : shape[1]].astype(spec.dtype)
        limit = source.token_limit
        beyond = limit is not None and "int" in spec.dtype and row.size and not 0 <= row.min() <= row.max() < limit
        if row.shape != shape or beyond:
            why = f"Row {place} has tokens outside of 0 … {(limit or 1) - 1}." if beyond else f"Row {place} is shorter."
            raise UsageError(f"{spec.name!r} of {path} does not fit the model.", why=why)
        found.append(torch.from_numpy(np.ascontiguousarray(row)))
    return tuple(found)
