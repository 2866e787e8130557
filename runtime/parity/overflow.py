"""Name the values of a file in fp16 that are beyond fp16's largest number, where a GPU computes infinity.

Sessions of onnxruntime on the CPU watch such values, if they are asked to (`Halves` of its `session.py`). A value
counts where the file is fp16: what a function or a kernel computes in fp32 by its definition does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.documents.sidecar import CheckRecord
from ...core.error_texts import argument
from ...core.errors import CheckFailed
from ..session import Session

FP16_RANGE = "fp16 range"
# The largest number of fp16; from halfway to the next power of two on, rounding gives infinity.
LARGEST = 65504.0
_ROUNDS_UP = 65520.0
_SHOWN = 5
_FIX = f"Use bf16, which has the range of fp32: {argument('dtype', 'bf16')}; or keep these modules in fp32."


@dataclass(frozen=True)
class Beyond:
    """A value beyond fp16's largest number.

    Args:
        value: its name in the file.
        module: what computes it, "" where the file does not say.
        size: its largest magnitude, before it is rounded.
    """

    value: str
    module: str
    size: float

    def __str__(self) -> str:
        return f"{self.module or self.value} reaches {self.size:,.0f}"


def beyond_fp16(sessions: Iterable[Session]) -> list[Beyond]:
    """Return the values beyond fp16 in the runs of these sessions so far, in the order in which they are computed."""
    return [
        Beyond(value, module, float(peak))
        for session in sessions
        for (value, module), peak in zip(session.watched, session.peaks, strict=True)
        if math.isfinite(peak) and peak >= _ROUNDS_UP
    ]


def describe(found: Sequence[Beyond]) -> str:
    """Name values beyond fp16: each module once, with its largest."""
    largest: dict[str, Beyond] = {}
    for one in found:
        name = one.module or one.value
        if name not in largest or one.size > largest[name].size:
            largest[name] = one
    shown = [str(one) for one in largest.values()][:_SHOWN]
    more = len(largest) - len(shown)
    return "; ".join(shown) + (f"; and {more} more modules" if more > 0 else "")


def range_record(sessions: Sequence[Session], where: str) -> CheckRecord | None:
    """Return the result of watching fp16; None if no session watched it.

    Args:
        sessions: of the file.
        where: on which inputs.
    """
    sizes = [float(peak) for session in sessions for peak in session.peaks if math.isfinite(peak)]
    if not sizes:
        return None
    found = beyond_fp16(sessions)
    if found:
        detail = (
            f"{describe(found)}, and the largest fp16 number is {LARGEST:,.0f}: a GPU computes infinity there; {where}"
        )
        return CheckRecord(name=FP16_RANGE, status="failed", detail=detail, figures={"largest": max(sizes)})
    detail = f"the largest of {len(sizes)} values is {max(sizes):,.4g}; fp16 ends at {LARGEST:,.0f}; {where}"
    return CheckRecord(name=FP16_RANGE, status="passed", detail=detail, figures={"largest": max(sizes)})


def refuse_overflow(sessions: Sequence[Session], path: Path, inputs: str, more: Sequence[Beyond] = ()) -> None:
    """Refuse a file whose fp16 overflowed.

    Args:
        sessions: of the file.
        path: the file.
        inputs: the inputs of the last run.
        more: all values beyond fp16 on the same inputs, where they were measured without rounding: a NaN hides others.

    Raises:
        CheckFailed: a value is beyond fp16.
    """
    found = beyond_fp16(sessions)
    if found:
        every = list(more) or found
        others = f" Also too large: {describe(every)}." if len(every) > 1 else ""
        raise CheckFailed(
            f"{path.name} overflows in fp16: {every[0]}, and the largest fp16 number is {LARGEST:,.0f}.",
            why=f"On {inputs or 'the inputs'} a GPU computes infinity or NaN from there on.{others}",
            fix=_FIX,
        )
