"""Describe the result of a comparison, for a row of the report and for a terminal."""

from __future__ import annotations

import platform
from typing import Any

Report = dict[str, Any]

ONLY_IF_TOLD = "A bundle's libraries are code: they run only with --run-libraries or --manifest-sha256."

SUMMED_IN_FP16 = (
    "Note: on Arm processors onnxruntime sums fp16 products in fp16 from 1.29 on, which is less accurate. "
    "On the CPU use a model in fp32."
)


# Tolerances of `core/tolerance.py` by a model's element type; others are displayed.
USUAL: dict[str, dict[str, float | None]] = {
    "float32": {"atol": 1e-4, "rtol": 1e-4, "cosine": None},
    "float16": {"atol": 1e-2, "rtol": 1e-2, "cosine": 0.999},
    "bfloat16": {"atol": 5e-2, "rtol": 2e-2, "cosine": 0.999},
}
# The text of a row for a sample without expected outputs.
NO_OUTPUTS: Report = {
    "output": "",
    "dtype": "",
    "passed": False,
    "why": "the sample has no expected outputs, so nothing was compared",
}


def unusual_tolerance(model: Report) -> str:
    """Describe a model's tolerance if it is not the usual one of its element type; else ""."""
    bounds, types = model["tolerance"], {spec["dtype"] for spec in (*model["inputs"], *model["outputs"])}
    usual = USUAL[next((name for name in ("bfloat16", "float16") if name in types), "float32")]
    if all(bounds[name] == value for name, value in usual.items()):
        return ""
    text = f"atol {bounds['atol']:g} + rtol {bounds['rtol']:g}"
    return text if bounds["cosine"] is None else f"{text}, cosine at least {bounds['cosine']:g}"


def that_prove_something(rows: list[Report]) -> list[Report]:
    """Return a model's rows; if no row proves anything, mark them as failed for this reason."""
    if not all(row["passed"] and row["proves_nothing"] for row in rows):
        return rows
    return [row | {"passed": False, "why": f"this proves nothing: {row['proves_nothing']}"} for row in rows]


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
    """Write control characters as escapes, because names in a bundle come from outside."""
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
            output = f", {row['output']}" if row["output"] else ""
            shown_tolerance = f" (tolerance {row['tolerance']})" if row.get("tolerance") else ""
            lines.append(f"FAIL {place}{output}: {figures}{row['why']}{shown_tolerance}")
        unusual = f", within {rows[0]['tolerance']}" if rows[0].get("tolerance") else ""
        if all(row["passed"] for row in rows):
            worst = max(row["max_abs"] for row in rows)
            figures = f"{len(rows)} output(s), max error {worst:.2e}{unusual}"
            lines.append(f"ok   {place}: {figures}, {_computed_by(rows[0])}")
    if any(_summed_in_fp16(row) for row in report["rows"] if not row["passed"]):
        lines.append(SUMMED_IN_FP16)
    lines += [f"not run: {entry['model']}: {entry['why']}" for entry in report["not_run"]]
    lines += [f"not run: {library}. {ONLY_IF_TOLD}" for library in report.get("libraries_not_run", ())]
    if not report["rows"] and not report["not_run"]:
        lines.append("The files are intact. The bundle has no samples, so no model was run.")
    elif report.get("no_samples"):
        lines += [f"not run: {model}: the bundle has no samples for it" for model in report["no_samples"]]
    return [shown(line) for line in lines]


def _computed_by(row: Report) -> str:
    """Name the kernels that computed the attention, for a terminal."""
    computed = row["kernels"]
    if not computed["sha256"]:
        return f"by {computed['source']}"
    return f"by {', '.join(computed['ops']) or 'no kernel'} of SHA-256 {computed['sha256'][:12]}…"
