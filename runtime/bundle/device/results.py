"""Compare outputs with those expected, and write the result for a terminal."""

from __future__ import annotations

import math
import platform
from typing import Any

Report = dict[str, Any]

ONLY_IF_TOLD = "Libraries of a bundle are code: they run only with --run-libraries, or with --manifest-sha256."

SUMMED_IN_FP16 = (
    "Note: on Arm processors onnxruntime sums fp16 products in fp16 from 1.29 on, which costs digits. "
    "On the CPU use a model in fp32."
)


def compare(actual: Any, expected: Any, tolerance: Report) -> Report:
    """Figures of one output against what is expected, in float64, and whether they meet the tolerance.

    The criterion is `|a - e| <= atol + rtol * |e|` everywhere, a cosine not below the floor, and nothing NaN or Inf.
    """
    import numpy as np

    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or not expected.size:
        return {"passed": False, "why": f"shape {list(actual.shape)}, expected {list(expected.shape)}"}
    a, e = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return {"passed": False, "why": f"{int((~np.isfinite(a)).sum())} values are NaN or Inf"}
    error = np.abs(a - e)
    excess = float((error - (tolerance["atol"] + tolerance["rtol"] * np.abs(e))).max())
    norms = math.sqrt(float(a @ a)) * math.sqrt(float(e @ e))
    cosine = min(1.0, float(a @ e) / norms) if norms else float(not a.any() and not e.any())
    floor = tolerance["cosine"]
    passed = excess <= 0 and (floor is None or cosine >= floor)
    why = "" if passed else f"above atol {tolerance['atol']:g} + rtol {tolerance['rtol']:g}, or cosine below {floor}"
    return {"passed": passed, "max_abs": float(error.max()), "cosine": cosine, "why": why}


def arch() -> str:
    """This processor, as folders of libraries are named."""
    found = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(found, found)


def _summed_in_fp16(row: Report) -> bool:
    return arch() == "aarch64" and row["provider"].startswith("cpu") and row["dtype"] == "float16"


def report_lines(report: Report) -> list[str]:
    """The result for a terminal."""
    lines = []
    samples: dict[tuple[str, str, str], list[Report]] = {}
    for row in report["rows"]:
        samples.setdefault((row["model"], row["provider"], row["sample"]), []).append(row)
    for (model, provider, sample), rows in samples.items():
        place = f"{model} on {provider}, {sample}"
        for row in (row for row in rows if not row["passed"]):
            figures = f"max error {row['max_abs']:.2e}, " if "max_abs" in row else ""
            lines.append(f"FAIL {place}, {row['output']}: {figures}{row['why']}")
        if all(row["passed"] for row in rows):
            worst = max(row["max_abs"] for row in rows)
            lines.append(f"ok   {place}: {len(rows)} output(s), max error {worst:.2e}, {_computed_by(rows[0])}")
    if any(_summed_in_fp16(row) for row in report["rows"] if not row["passed"]):
        lines.append(SUMMED_IN_FP16)
    lines += [f"not run: {entry['model']}: {entry['why']}" for entry in report["not_run"]]
    lines += [f"not run: {library}. {ONLY_IF_TOLD}" for library in report.get("libraries_not_run", ())]
    if not report["rows"] and not report["not_run"]:
        lines.append("The files are intact. The bundle has no samples, so nothing was run.")
    return lines


def _computed_by(row: Report) -> str:
    """Name the kernels that computed the attention, for a terminal."""
    computed = row["kernels"]
    if not computed["sha256"]:
        return f"by {computed['source']}"
    return f"by {', '.join(computed['ops']) or 'no kernel'} of SHA-256 {computed['sha256'][:12]}…"
