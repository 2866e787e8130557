"""How numbers are written in reports: three digits that matter, no exponents, a thin unit."""

from __future__ import annotations

import math


def digits(value: float | None, unit: str = "") -> str:
    """Three significant digits: `0.0123`, `4.56`, `78.9`, `1,235`; a dash for nothing."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        text = "0"
    else:
        # Rounded first: 9.996 is 10.0, not 10.00.
        value = float(f"{value:.3g}") if abs(value) < 1000 else value
        places = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{places}f}" if places < 7 else f"{value:.2e}"
    return f"{text} {unit}" if unit else text


def figure(value: float | int | str) -> str:
    """A figure of a comparison, in three digits as a program would read them: `2.81e-05`, `0.999`, `inf`."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def percent(value: float | None) -> str:
    """A share as a percentage: `4.2 %`, `100 %`."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if 0 < value < 0.9995 else f"{100 * value:.0f} %"


def size(value: int | None) -> str:
    """Bytes as a person reads them: `14.8 MB`."""
    if value is None:
        return "–"
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")
