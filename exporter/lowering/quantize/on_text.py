"""Decide how the weights of a checkpoint are rounded: calibrated on text if the model has token inputs."""

from __future__ import annotations

from pathlib import Path

import torch

from ....core.tensors import TensorSpec
from ....runtime.inputs.arrays import random_inputs
from ....runtime.text_inputs.rows import Row, arrays_of_rows
from ....runtime.text_inputs.tokens import Tokens
from ...source.source_model import SourceModel
from ...source.tokens import tokens_of
from ..trace import entry_of
from .blocked import Rounding
from .calibration import Calibration
from .weights import WEIGHT_KINDS

# The most tokens for moments, in all rows and in one row.
_TOKENS, _ROW = 4096, 512
# Tokens of other rows, for measuring effects.
_JUDGED = 512
_MOST_ROWS = 64
# Passages of a row.
_PASSAGES = 2


def rounding_on_text(weights: str | None, source: SourceModel, checkpoint: Path) -> Rounding | None:
    """Return how the weights of an export are rounded; None for kinds of weights that need no inputs.

    The text is the part of the shipped text that nothing is judged on.

    Args:
        weights: a key of `WEIGHT_KINDS`, or None.
        source: the model.
        checkpoint: the file or folder; its folder may contain a tokenizer.
    """
    if weights is None or not WEIGHT_KINDS[weights].calibrates:
        return None
    tokens = tokens_of(checkpoint, source, "calibration")
    if tokens is None:
        return Rounding(notes=["weights rounded without calibration: the model has no token input"])
    longest = source.shapes.seq_len
    length = min(_ROW, longest)
    count, judged = (min(_MOST_ROWS, max(1, tokens_of_all // length)) for tokens_of_all in (_TOKENS, _JUDGED))
    at = source.resized(seq_len=length, batch=1)
    rows = _rows(at, tokens, range(count + judged))
    words = tokens.describe(count, count * length)
    return Rounding(
        Calibration(entry_of(at, "fp32"), rows[:count], rows[count:], words), logits=source.outputs[0] == "logits"
    )


def _rows(source: SourceModel, tokens: Tokens, starts: range) -> list[tuple[torch.Tensor, ...]]:
    """Return the inputs of calls with one row each, at the sizes of the model."""
    specs: list[TensorSpec] = source.inputs("fp32")
    drawn = random_inputs(specs, 0, source.token_limit)
    found = []
    for start in starts:
        row = Row("", tokens.row(start % tokens.kinds, source.shapes.seq_len, pieces=_PASSAGES))
        arrays = arrays_of_rows([row], specs, drawn, tokens.pad)
        found.append(tuple(torch.from_numpy(arrays[spec.name]) for spec in specs))
    return found
