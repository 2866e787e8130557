"""Name the values of a file in fp16 that are beyond fp16's largest number, where a GPU computes infinity.

Sessions of onnxruntime on the CPU watch such values, if they are asked to (`Halves` of its `session.py`). A value
counts where the file is fp16: what a function or a kernel computes in fp32 by its definition does not.

Infinity does no harm where a later operator ends it with the number that the true value gives too: gelu in basic
operators cubes its gate, and the tanh of a cube beyond fp16 is 1, as that of infinity is. So each input on which a
value is beyond fp16 is run a second time, with such values kept in fp32. Where both runs give the same outputs, to the
bit, the value is named and the file passes: it makes no difference whether a GPU's kernel rounds it (infinity) or
holds it in fp32. Any other difference fails, also within the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.documents.sidecar import CheckRecord
from ...core.dtypes import LARGEST_NUMBER
from ...core.error_texts import argument
from ...core.errors import CheckFailed
from ...onnx_graph.precision.half_to_fp32 import FP16_ROUNDS_UP
from ..session import Session

FP16_RANGE = "fp16 range"
LARGEST = LARGEST_NUMBER["fp16"]
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


def beyond_fp16(sessions: Iterable[Session], *, without_overflow: bool = False) -> list[Beyond]:
    """Return the values beyond fp16 in the runs of these sessions so far, in the order in which they are computed.

    Args:
        sessions: of the file.
        without_overflow: take the sizes of the runs in which nothing overflows: behind a NaN the others have none.
    """
    return [
        Beyond(value, module, float(peak))
        for session in sessions
        for (value, module), peak in zip(
            session.watched, session.peaks_without_overflow if without_overflow else session.peaks, strict=False
        )
        if math.isfinite(peak) and peak >= FP16_ROUNDS_UP
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


def _what(sessions: Sequence[Session]) -> str:
    """Name the values that are beyond fp16; else the first that is infinite or NaN, inside a loop or by a quotient."""
    values = [
        f"{module or value} is infinite or NaN"
        for session in sessions
        for (value, module), wrong in zip(session.watched, session.not_finite, strict=False)
        if wrong
    ]
    return describe(beyond_fp16(sessions)) or next(iter(values), "an output is infinite or NaN")


def range_record(sessions: Sequence[Session], where: str) -> CheckRecord | None:
    """Return the result of watching fp16; None if no session watched it.

    Args:
        sessions: of the file.
        where: on which inputs.
    """
    if not any(session.watched for session in sessions):
        return None
    sizes = [float(peak) for session in sessions for peak in session.peaks if math.isfinite(peak)]
    shows = any(session.overflow_shows for session in sessions)
    figures: dict[str, float | int | str] = {"largest": max(sizes, default=0.0)}
    if beyond_fp16(sessions) or shows:
        detail = f"{_what(sessions)}; fp16 ends at {LARGEST:,.0f}, and a GPU computes infinity beyond it"
        detail += ": the outputs change" if shows else ", which changes no bit of the outputs"
    elif not any(sizes):
        return unproven(f"no number but 0 was computed in fp16; {where}")
    else:
        detail = f"the largest of {len(sizes)} values is {max(sizes):,.4g}; fp16 ends at {LARGEST:,.0f}"
    return CheckRecord(
        name=FP16_RANGE, status="failed" if shows else "passed", detail=f"{detail}; {where}", figures=figures
    )


def unproven(why: str) -> CheckRecord:
    """Return the record of a file in fp16 in which no value was watched."""
    return CheckRecord(name=FP16_RANGE, status="not proven", detail=why)


def refuse_overflow(sessions: Sequence[Session], path: Path, inputs: str) -> None:
    """Refuse a file whose fp16 overflowed so that an output changed.

    Args:
        sessions: of the file.
        path: the file.
        inputs: the inputs of the last run.

    Raises:
        CheckFailed: an output is infinite or NaN, or is another one than without the overflow.
    """
    if not any(session.overflow_shows for session in sessions):
        return
    every = beyond_fp16(sessions, without_overflow=True)
    others = f" Also too large: {describe(every)}." if len(every) > 1 else ""
    first = next(iter(beyond_fp16(sessions)), None) or _what(sessions)
    raise CheckFailed(
        f"{path.name} overflows in fp16: {first}, and the largest fp16 number is {LARGEST:,.0f}.",
        why=f"On {inputs or 'the inputs'} a GPU computes infinity or NaN there, and the outputs change.{others}",
        fix=_FIX,
    )
