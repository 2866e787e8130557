"""Define `localattn convert`: write an exported file in another form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..core.documents.report import count_outcomes
from ..core.storage.file_kinds import ONNX
from .parts.console import bytes_text, print_checks, print_json, progress, say, suggest
from .parts.options import ChecksOption, FormatOption
from .parts.paths import INPUT, ForceOption, OutputPath

if TYPE_CHECKING:
    from ..exporter.jobs.convert import Converted


# The element types that a file can be converted to.
HalfDtype = Literal["fp16", "bf16"]


def convert(
    model: Annotated[Path, typer.Argument(help="The exported model (model.onnx).", show_default=False), INPUT],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", show_default=False), OutputPath(ONNX)
    ],
    standard_ops: Annotated[
        bool, typer.Option("--standard-ops", help="Convert to standard operators only, without ONNX functions.")
    ] = False,
    dtype: Annotated[
        HalfDtype | None,
        typer.Option("--dtype", help="Convert an fp32 file to this element type.", show_default=False),
    ] = None,
    checks: ChecksOption = "all",
    force: ForceOption = False,
    output_format: FormatOption = "console",
) -> None:
    """Convert an exported model to another form, and check that it computes the same.

    With --standard-ops the file runs where functions are unknown: in OpenVINO, tract and others. A prefill file
    next to a step file is converted with it. With --dtype it computes in half precision. No checkpoint is needed: the
    result is compared with the given file.
    """
    if not standard_ops and dtype is None:
        raise typer.BadParameter("say what to convert to: --standard-ops, --dtype fp16 or both", param_hint="--dtype")
    with progress() as step:
        from ..exporter.jobs.convert import convert as run

        written = run(
            model, output, standard_ops=standard_ops, dtype=dtype, overwrite=force, checks=checks, progress=step
        )
    if output_format == "json":
        passed = all(x.passed for x in written)
        print_json({"model": str(output), "passed": passed, "files": [_document(x) for x in written]})
        return
    for x in written:
        say(f"{x.path}  {_form(dtype, standard_ops=standard_ops)}, {bytes_text(x.path.stat().st_size)}")
        print_checks(x.checks)
    steps = any(x.sidecar is not None and x.sidecar.step is not None for x in written)
    suggest("localattn", "inspect" if steps else "run", output)


def _form(dtype: str | None, *, standard_ops: bool) -> str:
    """Say in words what a file was converted to."""
    return ", ".join(([] if dtype is None else [dtype]) + (["standard operators"] if standard_ops else []))


def _document(written: Converted) -> dict[str, object]:
    entries = {} if written.sidecar is None else written.sidecar.to_dict()
    checks = [check.model_dump(mode="json") for check in written.checks]
    verdict = {"passed": written.passed, "outcomes": count_outcomes(check["status"] for check in checks)}
    return {"model": str(written.path), **verdict, **entries, "checks": checks}
