"""Time, size and memory of exporting a checkpoint, checks included, each time in a fresh process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from .memory import MIB, in_child


def measure(checkpoint: Path, repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored: medians over the repeats.

    Args:
        checkpoint: with its configuration beside it.
        repeats: exports.
        tell: told each step.
    """
    reports = []
    for repeat in range(repeats):
        tell(f"Exporting {checkpoint.name}, {repeat + 1} of {repeats}")
        reports.append(in_child("export", str(checkpoint.resolve())))
    first = reports[0]
    weights, size = first["weights_fp32_bytes"], first["file_bytes"]
    return {
        "checkpoint": checkpoint.name,
        **{name: first[name] for name in ("class_name", "seq_len", "attention_nodes", "checks")},
        "repeats": repeats,
        "seconds": {step: round(median(report["seconds"][step] for report in reports), 3) for step in first["seconds"]},
        "total_seconds": round(median(report["total_seconds"] for report in reports), 3),
        "checkpoint_bytes": checkpoint.stat().st_size,
        "weights_fp32_bytes": weights,
        "file_bytes": size,
        "file_over_weights": round(size / weights, 4),
        "peak_mib": round(median(report["peak_bytes"] for report in reports) / MIB, 1),
        "libraries_mib": round(median(report["libraries_bytes"] for report in reports) / MIB, 1),
    }
