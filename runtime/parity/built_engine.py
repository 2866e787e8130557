"""Compare a newly built engine with the ONNX file it was built from, on the same random inputs."""

from __future__ import annotations

from pathlib import Path

from ...core.documents.sidecar import PARITY, CheckRecord
from ...core.errors import CheckFailed, LocalAttnError
from .compare import worst_of
from .files import run_file_parity
from .report import ParityRequest

# One set of inputs at each size, because a build waits for the comparison.
_SEEDS = (0,)


def check_built_engine(engine: Path, model: Path, library: Path | None = None, provider: str = "auto") -> CheckRecord:
    """Run an engine and its ONNX file on the same inputs, and compare.

    The file is run by onnxruntime on the CPU, from its functions.

    Args:
        engine: the engine, its facts beside it.
        model: the ONNX file.
        library: the plugin library that the engine was built with.
        provider: where the engine runs, "cuda:1" for GPU 1.

    Returns:
        A record, failed where an output is out of tolerance; skipped where one of the two cannot be run here.
    """
    plugin = "auto" if library is None else str(library)
    request = ParityRequest(engine, model, seeds=_SEEDS, plugin=plugin, provider=provider)
    try:
        report = run_file_parity(request)
    except LocalAttnError as error:
        why = " ".join(filter(None, (error.what, error.why)))
        if isinstance(error, CheckFailed):
            return CheckRecord(name=PARITY, status="failed", detail=why)
        return CheckRecord(name=PARITY, status="skipped", detail=f"{model.name} and the engine did not both run: {why}")
    sets, (where, worst) = report.comparisons, worst_of(report.comparisons, report.tolerance)
    detail = (
        f"max error {max(comparison.max_abs for _, comparison in sets):.1e} against {model.name} in "
        f"{report.reference.backend} on the CPU ({report.tolerance.describe()}), worst at {where}"
    )
    return CheckRecord(
        name=PARITY, status="passed" if report.passed else "failed", detail=detail, figures=worst.figures()
    )
