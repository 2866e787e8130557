"""Time, size and memory of exporting a checkpoint, checks included, each time in a fresh process.

Memory counts twice: as it is, and beyond what is resident once PyTorch is imported, as a multiple of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from ..target import Target
from .memory import MIB, in_child

# The large model: 12 layers of width 768 over 8,192 tokens, 367 MB of weights.
LARGE = {
    "num_tokens": 256,
    "max_seq_len": 8192,
    "dim": 768,
    "depth": 12,
    "causal": True,
    "local_attn_window_size": 512,
    "heads": 12,
    "dim_head": 64,
}
SECONDS_TARGET, WEIGHTS_TARGET = 60.0, 3.0


def large_checkpoint(folder: Path) -> Path:
    """A checkpoint of the large model, its weights as upstream draws them, with its configuration beside it."""
    import torch
    from local_attention import LocalTransformer

    torch.manual_seed(0)
    checkpoint = folder / "large.pt"
    torch.save(LocalTransformer(**LARGE).state_dict(), checkpoint)
    versions = {"hyper_connections": version("hyper-connections")}
    config = {"class": "local_attention.LocalTransformer", "kwargs": LARGE, **versions}
    checkpoint.with_suffix(".json").write_text(json.dumps(config), encoding="utf-8")
    return checkpoint


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

    def over_weights(peak: Callable[[dict[str, Any]], int]) -> float:
        return round(median((peak(report) - report["libraries_bytes"]) / weights for report in reports), 2)

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
        "peak_over_weights": over_weights(lambda report: report["peak_bytes"]),
        "steps": {
            step: {
                "peak_mib": round(median(report["step_peak_bytes"][step] for report in reports) / MIB, 1),
                "peak_over_weights": over_weights(lambda report, step=step: report["step_peak_bytes"][step]),
            }
            for step in first["seconds"]
        },
    }


def measure_large(folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """One export of the large model, and whether it keeps to the targets."""
    tell("Making the large checkpoint")
    result = measure(large_checkpoint(folder), 1, tell)
    targets = [
        Target("seconds", result["total_seconds"], SECONDS_TARGET),
        Target("peak after imports / weights", result["peak_over_weights"], WEIGHTS_TARGET),
    ]
    return {**result, "targets": [target.to_dict() for target in targets]}
