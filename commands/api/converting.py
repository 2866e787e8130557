"""Define `localattn.convert`: an exported file in standard operators, or in half precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.wrong_file import check_exists
from .notebook import IN_NOTEBOOKS
from .packages import packages_named

if TYPE_CHECKING:
    from ...exporter.jobs.convert import Converted
    from ...exporter.options import Checks, Dtype

Progress = Callable[[str], None]


def convert(
    model: str | Path,
    output: str | Path,
    *,
    standard_ops: bool = False,
    dtype: Dtype | None = None,
    checks: Checks = "all",
    overwrite: bool = False,
    progress: Progress = IN_NOTEBOOKS,
) -> Converted:
    """Write an exported file in another form; it appears only if it computes the same as the given one.

    Args:
        model: the file; a prefill file beside a step file is converted with it.
        output: the file to write.
        standard_ops: standard operators alone, without ONNX functions.
        dtype: "fp16" or "bf16": compute in half precision; the given file has to be fp32.
        checks: "quick" compares on one set of inputs.
        overwrite: replace an existing file.
        progress: called with each step as it begins.

    Raises:
        UsageError: the file cannot be read or converted, or nothing is asked for.
        CheckFailed: the new file does not compute the same.
        MissingDependency: a package is not installed.

    Examples:
        >>> localattn.convert("model.onnx", "half.onnx", dtype="fp16").path.name
        'half.onnx'
    """
    if not standard_ops and dtype is None:
        raise UsageError(
            "Nothing is asked for.", fix=f"Give {argument('standard_ops', True)}, {argument('dtype', 'fp16')}, or both."
        )
    check_exists(Path(model))
    with packages_named():
        from ...exporter.jobs.convert import convert as run

    options = {"standard_ops": standard_ops, "dtype": dtype, "checks": checks, "overwrite": overwrite}
    return run(Path(model), Path(output), **options, progress=progress)[0]  # type: ignore[arg-type]
