"""Choose the rows on which a file is judged, and put them into its input arrays.

A file is run on one row at a time, so that only figures are kept of each: logits of a large vocabulary are large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.tensors import INTEGER_MASKS, POSITION_IDS, TensorSpec
from .tokens import Ids, Opening, Tokens

Arrays = dict[str, NDArray[Any]]

# Rows of mixed passages, each of this many passages.
_MIXED, _PASSAGES = 8, 4
# Tokens of such a row, at most and at least, and of a row behind another opening.
_LONGEST, _SHORTEST, _OPENED = 256, 32, 48
# The share of text in a padded row.
_KEPT = 5 / 8
# Names of masks that say which tokens of a row are kept.
_MASKS = frozenset({*INTEGER_MASKS, "mask"})


@dataclass(frozen=True)
class Row:
    """One row of tokens.

    Args:
        name: what reports call it.
        ids: its tokens.
        before: padding before them.
        after: padding after them.
        opened: it begins otherwise than rows usually do.
    """

    name: str
    ids: Ids
    before: int = 0
    after: int = 0
    opened: bool = False

    @property
    def length(self) -> int:
        """Its length, padding included."""
        return self.before + len(self.ids) + self.after


def rows_of_use(tokens: Tokens, longest: int, spans: int, most: int, *, pads: bool, multiple: int = 1) -> list[Row]:
    """Return the rows on which a file is judged: longer than two windows, mixed passages, padded, other openings.

    Args:
        tokens: where the tokens come from.
        longest: the most positions that the model has.
        spans: tokens of two windows; 0 without a window.
        most: tokens of all rows together, where that is enough for them; the rows become shorter, not fewer.
        pads: whether the model takes a mask of padding.
        multiple: lengths are multiples of it.
    """
    long = _whole(min(longest, max(spans + 1, _SHORTEST)), multiple, longest)
    others = _MIXED + len(tokens.openings)
    share = max(0, most - long) // max(1, others)
    short = _whole(min(longest, max(_SHORTEST, min(_LONGEST, share))), multiple, longest)
    rows = [Row("the longest row", tokens.row(0, long))]
    for place in range(_MIXED):
        # Rows of the same shape use different passages, so that every passage is used.
        kept = max(1, int(short * _KEPT)) if pads and place in (1, 2) else short
        ids = tokens.row(place, kept, pieces=_PASSAGES)
        gap = short - kept
        left = (place == 1) == tokens.left  # first as the tokenizer pads, then on the other side
        name = f"row {place + 2}" + (f", padded on the {'left' if left else 'right'}" if gap else "")
        rows.append(Row(name, ids, gap if left else 0, 0 if left else gap))
    for place, opening in enumerate(tokens.openings):
        length = _whole(min(longest, max(_OPENED, len(opening.ids) + _SHORTEST)), multiple, longest)
        rows.append(Row(opening.name, tokens.row(place, length, opening), opened=True))
    return rows


def _whole(length: int, multiple: int, longest: int) -> int:
    """Round a length up to a multiple, within the longest."""
    rounded = -(-length // multiple) * multiple
    return max(multiple, min(rounded, longest // multiple * multiple))


def token_names(specs: Sequence[TensorSpec]) -> list[str]:
    """List the inputs of tokens."""
    return [x.name for x in specs if "int" in x.dtype and x.name not in {*INTEGER_MASKS, POSITION_IDS} and x.shape]


def fill(
    arrays: Mapping[str, NDArray[Any]],
    specs: Sequence[TensorSpec],
    tokens: Tokens,
    start: int,
    opening: Opening | None = None,
) -> Arrays:
    """Replace the tokens of random inputs by rows of text; a mask of the same shape marks tokens.

    Args:
        arrays: inputs that fit the specs.
        specs: of the inputs.
        tokens: where the tokens come from.
        start: which passage the first row begins with.
        opening: the beginning of every row, instead of the usual one.
    """
    filled = dict(arrays)
    for name in token_names(specs):
        array = np.asarray(arrays[name])
        if array.ndim == 0:
            continue
        masks = [arrays[x] for x in arrays if x in _MASKS and np.shape(arrays[x]) == array.shape]
        kept = np.ones(array.shape, np.bool_) if not masks else np.asarray(masks[0]) != 0
        flat = np.full((int(np.prod(array.shape[:-1], dtype=np.int64)), array.shape[-1]), tokens.pad, array.dtype)
        for place, (row, used) in enumerate(zip(flat, kept.reshape(flat.shape), strict=True)):
            row[used] = tokens.row((start + place) % tokens.kinds, int(used.sum()), opening)
        filled[name] = flat.reshape(array.shape)
    return filled


def arrays_of_rows(
    rows: Sequence[Row], specs: Sequence[TensorSpec], drawn: Mapping[str, NDArray[Any]], pad: int
) -> Arrays:
    """Put rows of one length into the inputs of a call; repeat them if the batch is larger.

    Args:
        rows: the tokens and the padding around them.
        specs: of the inputs.
        drawn: inputs of the rows' length; tokens, masks and positions are replaced.
        pad: the token that padding has.
    """
    found, length = dict(drawn), rows[0].length
    kept = np.zeros((len(rows), length), np.bool_)
    ids = np.full(kept.shape, pad, np.int64)
    for place, row in enumerate(rows):
        inside = slice(row.before, length - row.after)
        kept[place, inside], ids[place, inside] = True, row.ids
    positions = np.maximum(np.cumsum(kept, axis=1) - 1, 0)
    values = {**dict.fromkeys(token_names(specs), ids), **dict.fromkeys(_MASKS, kept), POSITION_IDS: positions}
    for spec in specs:
        array = np.asarray(drawn[spec.name])
        if spec.name in values and array.ndim and array.shape[-1] == length:
            flat = array.size // length
            chosen = values[spec.name][np.arange(flat) % len(rows)]
            found[spec.name] = chosen.reshape(array.shape).astype(array.dtype)
    return found


def count_tokens(arrays: Mapping[str, NDArray[Any]], specs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Return how many rows and tokens the inputs of a call have, without padding."""
    name = next(iter(token_names(specs)), None)
    array = np.asarray(arrays[name]) if name is not None else np.zeros(0)
    if not array.size:
        return 0, 0
    masks = [arrays[x] for x in arrays if x in _MASKS and np.shape(arrays[x]) == array.shape]
    return array.size // array.shape[-1], int(np.count_nonzero(masks[0])) if masks else array.size
