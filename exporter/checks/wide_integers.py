"""Check that every integer of the graph fits in 32 bits, for runtimes that silently compute int64 in 32 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx.inliner

from ...core.documents.sidecar import CheckRecord
from ...core.tensors import POSITION_IDS, SEQUENCE, TensorSpec
from .integer_ranges import IntegerRanges
from .outcome import failed, not_proven, passed, skipped

# Batch size to check, if the batch is dynamic.
_LARGEST_BATCH = 1024
_NAMED = 3


def check_wide_integers(
    model: onnx.ModelProto, folder: Path, limits: Mapping[str, int | None], sizes: Mapping[str, int] | None = None
) -> CheckRecord:
    """Bound every integer that the written file computes, including those inside ONNX functions.

    Args:
        model: the written file; its weights may be absent, its integers must be present.
        folder: the folder of its external data.
        limits: for each integer input by name, one more than its largest value (the smallest is 0); None if unknown.
        sizes: the largest sizes of dynamic axes, by name.
    """
    known = {name: limit for name, limit in limits.items() if limit is not None}
    found = IntegerRanges(onnx.inliner.inline_local_functions(model), folder, known, sizes or {})
    if found.beyond:
        detail = f"a runtime that computes int64 in 32 bits would silently give wrong results: {_few(found.beyond)}"
        return failed(detail)
    if found.unknown:
        detail = f"the range of some integers is unknown, so int32 may be too small: {_few(found.unknown)}"
        return not_proven(detail)
    at = f" at {' '.join(f'{axis}={size}' for axis, size in sizes.items())}" if sizes else ""
    if not found.count:
        return skipped("no node computes with 64-bit integers")
    return passed(f"largest integer is {found.largest:,}{at}; int32 is enough", largest=found.largest)


def dynamic_sizes(axes: Sequence[str], longest: int) -> dict[str, int]:
    """Return the sizes of dynamic axes to check: the longest sequence, and a large batch."""
    return {axis: longest if axis == SEQUENCE else _LARGEST_BATCH for axis in axes}


def token_limits(inputs: Sequence[TensorSpec], limit: int | None, length: int) -> dict[str, int | None]:
    """Return each integer input's limit, by name: the vocabulary for tokens, the longest sequence for positions."""
    return {spec.name: length if spec.name == POSITION_IDS else limit for spec in inputs if "int" in spec.dtype}


def _few(sentences: Sequence[str]) -> str:
    more = len(sentences) - _NAMED
    return "; ".join(sentences[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
