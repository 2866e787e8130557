"""Describe the result of a comparison, for a row of the report and for a terminal."""

from __future__ import annotations

import platform
from typing import Any

Report = dict[str, Any]

ONLY_IF_TOLD = "Libraries of a bundle are code: they run only with --run-libraries, or with --manifest-sha256."

SUMMED_IN_FP16 = (
    "Note: on Arm processors onnxruntime sums fp16 products in fp16 from 1.29 on, which costs digits. "
    "On the CPU use a model in fp32."
)


def verdict(figures: Any, passed: bool, tolerance: Report) -> Report:
    """Return the result of a comparison as part of a row."""
    lost = figures.not_finite + figures.expected_not_finite
    if lost:
        return {"passed": passed, "why": f"{lost} values are NaN or Inf"}
    why = "" if passed else f"above atol {tolerance['atol']:g} + rtol {tolerance['rtol']:g}"
    if why and tolerance["cosine"] is not None:
        why += f", or cosine below {tolerance['cosine']}"
    return {"passed": passed, "max_abs": figures.max_abs, "cosine": figures.cosine, "why": why}


def arch() -> str:
    """Return this processor's name, as folders of libraries use it."""
    found = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(found, found)


def _summed_in_fp16(row: Report) -> bool:
    return arch() == "aarch64" and row["provider"].startswith("cpu") and row["dtype"] == "float16"


def shown(text: str) -> str:
    """Write what would steer a terminal as escapes: names in a bundle come from outside."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def report_lines(report: Report) -> list[str]:
    """Return the lines of a report for a terminal."""
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
    return [shown(line) for line in lines]


def _computed_by(row: Report) -> str:
    """Name the kernels that computed the attention, for a terminal."""
    computed = row["kernels"]
    if not computed["sha256"]:
        return f"by {computed['source']}"
    return f"by {', '.join(computed['ops']) or 'no kernel'} of SHA-256 {computed['sha256'][:12]}…"
