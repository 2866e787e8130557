"""Write numbers for reports: three significant digits, no exponents, a unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def digits(value: float | None, unit: str = "") -> str:
    """Write three significant digits: `0.0123`, `4.56`, `78.9`, `1,235`; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        text = "0"
    else:
        # Rounded first, so that 9.996 becomes 10.0, not 10.00.
        value = float(f"{value:.3g}") if abs(value) < 1000 else value
        places = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{places}f}" if places < 7 else f"{value:.2e}"
    return f"{text} {unit}" if unit else text


def figure(value: float | int | str) -> str:
    """Write a figure of a comparison in three digits, as programs do: `2.81e-05`, `0.999`, `inf`."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def cosine(value: float | int | str, passed: bool) -> str:
    """Write a cosine: near 1 as its distance from 1, so that a failed row never reads as equal."""
    if not isinstance(value, float | int) or abs(1 - value) >= 0.0005:
        return figure(value)
    if value == 1:
        return "1" if passed else "1 - <1e-16"
    return f"1 - {1 - value:.1e}"


def figures_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return which of these figures the rows of comparisons have; some outputs have more than others."""
    return [name for name in names if any(name in row for row in rows)]


def comparison_figure(row: Mapping[str, Any], name: str) -> str:
    """Write one figure of a comparison's row; a dash where its output has no such figure."""
    if name not in row:
        return "–"
    return cosine(row[name], bool(row["passed"])) if name.endswith("cosine") else figure(row[name])


def percent(value: float | None) -> str:
    """Write a share as a percentage: `4.2 %`, `100 %`."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if 0 < value < 0.9995 else f"{100 * value:.0f} %"


def size(value: int | None) -> str:
    """Write a number of bytes for people: `14.8 MB`."""
    if value is None:
        return "–"
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")
