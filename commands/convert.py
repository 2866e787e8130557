"""Define `localattn convert`: write an exported file in another form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.documents.report import count_outcomes
from ..core.storage.file_kinds import ONNX
from .parts.console import bytes_text, print_checks, print_json, progress, say
from .parts.options import ChecksOption, FormatOption
from .parts.paths import INPUT, ForceOption, OutputPath

if TYPE_CHECKING:
    from ..exporter.jobs.convert import Converted


def convert(
    model: Annotated[Path, typer.Argument(help="The exported model (model.onnx).", show_default=False), INPUT],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", show_default=False), OutputPath(ONNX)
    ],
    standard_ops: Annotated[
        bool, typer.Option("--standard-ops", help="Convert to standard operators only, without ONNX functions.")
    ] = False,
    checks: ChecksOption = "all",
    force: ForceOption = False,
    output_format: FormatOption = "console",
) -> None:
    """Convert an exported model to another form, and check that it computes the same.

    With --standard-ops the file runs where functions are unknown: in OpenVINO, tract and others. A prefill file
    beside a step file is converted with it. No checkpoint is needed.
    """
    if not standard_ops:
        raise typer.BadParameter("say what to convert to: --standard-ops", param_hint="--standard-ops")
    with progress() as step:
        from ..exporter.jobs.convert import to_standard_ops

        written = to_standard_ops(model, output, overwrite=force, checks=checks, progress=step)
    if output_format == "json":
        passed = all(x.passed for x in written)
        print_json({"model": str(output), "passed": passed, "files": [_document(x) for x in written]})
        return
    for x in written:
        say(f"{x.path}  standard operators, {bytes_text(x.path.stat().st_size)}")
        print_checks(x.checks)


def _document(written: Converted) -> dict[str, object]:
    entries = {} if written.sidecar is None else written.sidecar.to_dict()
    checks = [check.model_dump(mode="json") for check in written.checks]
    verdict = {"passed": written.passed, "outcomes": count_outcomes(check["status"] for check in checks)}
    return {"model": str(written.path), **verdict, **entries, "checks": checks}
