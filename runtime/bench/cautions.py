"""Warnings about benchmark figures that are not reliable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.documents.bench_report import OTHERS, BenchRow
from .statistics import drift, spread

# Above these shares the figures reflect the machine more than the models.
SPREAD, DRIFT = 0.10, 0.10


def find_warnings(rows: Sequence[BenchRow], percentiles: Sequence[float]) -> list[str]:
    """List warnings, one per line, with the affected candidates."""

    def thin(row: BenchRow) -> str:
        # With no call above it, a percentile is only the slowest call.
        names = [p for p in sorted(percentiles) if p < 100 and row.calls * (1 - p / 100) < 1 - 1e-9]
        return f"{', '.join(f'p{p:g}' for p in names)} of {row.calls} calls" if names else ""

    dangers: tuple[tuple[str, Callable[[BenchRow], str], str], ...] = (
        ("Other programs used the processors during the measurement", _others, "Measure again on a quiet machine."),
        ("The rounds differ much", _apart, "A longer --duration or a quieter machine helps."),
        ("The first rounds were slower than the last", _settling, "If it persists, raise --warmup."),
        ("There are too few calls for a percentile", thin, "Raise --duration or --iterations."),
    )
    found = _unequal(rows)
    for what, measure, fix in dangers:
        figures = [f"{row.label} {figure}" for row in rows if (figure := measure(row))]
        if figures:
            found.append(f"{what} ({'; '.join(figures)}). {fix}")
    return found


def _unequal(rows: Sequence[BenchRow]) -> list[str]:
    """Warn of models compared at different sizes; one model at several lengths is intended."""
    by_label = {row.label: row for row in rows}
    figures = []
    for row in rows:
        other = None if row.ratio is None else by_label[row.ratio.against]
        if other is not None and row.model != other.model and (row.batch, row.seq_len) != (other.batch, other.seq_len):
            figures.append(f"{row.label} {row.batch}×{row.seq_len}; {other.label} {other.batch}×{other.seq_len}")
    if not figures:
        return []
    return [f"Models were compared at different sizes ({'; '.join(figures)}). Give --batch and --seq-len."]


def _others(row: BenchRow) -> str:
    return f"{row.others:.0%}" if row.others is not None and row.others > OTHERS else ""


def _apart(row: BenchRow) -> str:
    apart = spread(row.rounds_ms)
    return f"{apart:.0%}" if apart > SPREAD else ""


def _settling(row: BenchRow) -> str:
    slower = drift(row.rounds_ms)
    return f"{slower:.0%}" if slower > DRIFT else ""
