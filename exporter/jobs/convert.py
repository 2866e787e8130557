"""Convert an exported file to another form, and compare it with the file it is made from.

The checkpoint is not needed. The results of the export's checks are carried over if the two files are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import onnx_ir as ir

from ...core.documents.sidecar import CheckRecord, Sidecar, read_sidecar, sidecar_path
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.file_kinds import ONNX, REWRITTEN
from ...core.storage.files import is_file, sha256
from ...core.storage.outputs import Output
from ...core.storage.publishing import sealed
from ...onnx_graph import block_weights
from ...onnx_graph.library_errors import refused_as
from ...onnx_graph.onnx_file import OnnxFile
from ...onnx_graph.standard_ops import rewrite
from ...runtime.backends.step_file import prefill_path
from ...runtime.parity.comparison import unproven_outputs
from ...runtime.parity.files import run_file_parity
from ...runtime.parity.report import ParityRequest
from ..artifact.form import WrittenForm
from ..artifact.publish import held_tensors, package_versions, prefill_output
from ..checks.checked_file import ConvertedFile as CheckedConversion
from ..checks.outcome import failed, not_proven, passed
from ..checks.table import names_of
from ..options import EXTERNAL_DATA_FROM, Checks, FileOptions
from ..pipeline import Job, Part, Progress, run


@dataclass(frozen=True)
class Converted:
    """A converted file.

    Args:
        path: the ONNX file.
        checks: the records of its checks.
        sidecar: its sidecar; None if the source has none.
    """

    path: Path
    checks: list[CheckRecord]
    sidecar: Sidecar | None

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "failed" for check in self.checks)

    def __bool__(self) -> bool:
        """Return `passed`."""
        return self.passed


def to_standard_ops(
    model: Path,
    output: Path,
    *,
    overwrite: bool = False,
    checks: Checks = "all",
    progress: Progress = lambda _: None,
) -> list[Converted]:
    """Write an ONNX file in standard operators alone, and for a step file also the prefill file beside it.

    Args:
        model: the file; its weights may lie beside it.
        output: the file to write; weights that lie beside the model are copied beside it.
        overwrite: replace an existing file.
        checks: "quick" leaves out the checks that the table of checks calls long, and compares on one set of inputs.
        progress: called with the name of each step as it begins.

    Returns:
        The written files, `output` first.

    Raises:
        UsageError: the file cannot be read, or has nodes that neither ONNX nor a function in it defines.
        CheckFailed: the file was altered after its export, or the converted file does not compute the same.
    """
    return run(ConvertJob(model, output, FileOptions(checks=checks, overwrite=overwrite)), progress)


class ConvertJob(Job[list[Converted]]):
    """The conversion of a file, and for a step file also of the prefill file beside it, to standard operators.

    Args:
        model: the file.
        output: the file to write.
        options: of its checks, and whether an existing file is replaced.

    Raises:
        UsageError: the sidecar beside the file cannot be read, or that of the output would describe another file.
    """

    def __init__(self, model: Path, output: Path, options: FileOptions) -> None:
        self.options, self._output = options, output
        # Final path → the file it is made from.
        self._sources = {output: model}
        sidecar = read_sidecar(model)
        prefill = None if sidecar is None or sidecar.step is None else prefill_path(model, sidecar.step)
        if prefill is not None and is_file(prefill):
            self._sources[prefill_output(output)] = prefill
        self._kind = REWRITTEN if sidecar is None else ONNX
        if sidecar is None and is_file(sidecar_path(output)):
            raise UsageError(
                f"{sidecar_path(output)} exists, and would not describe the new file.",
                why=f"{model} has no sidecar that could replace it.",
                fix="Choose another name for the output.",
            )

    def outputs(self) -> list[Output]:
        return [Output(path, self._kind) for path in reversed(self._sources)]

    def inputs(self) -> list[Path]:
        return list(self._sources.values())

    def open(self, progress: Progress) -> None:
        self._sidecars = {path: read_sidecar(source) for path, source in self._sources.items()}

    def trace(self, progress: Progress) -> list[Part]:
        parts = []
        for path, source in self._sources.items():
            progress(f"Rewriting {source.name}")
            parts.append(Part(path, _rewritten(source)))
        return parts

    def lower(self, part: Part) -> WrittenForm:
        return WrittenForm(part.model, [])

    def external_data_from(self, model: ir.Model) -> int:
        outside = any(isinstance(tensor, ir.ExternalTensor) for tensor in held_tensors(model))
        return 0 if outside else EXTERNAL_DATA_FROM

    def checked(self, part: Part, progress: Progress) -> ConvertedFile:
        sidecar = self._sidecars[part.path] = self._converted_sidecar(part)
        if sidecar is not None:  # a step file is run as its sidecar describes
            sidecar_path(part.staged).write_text(sealed(sidecar.to_json()), encoding="utf-8")
        return ConvertedFile(part, self._sources[part.path], self.options, progress)

    def _converted_sidecar(self, part: Part) -> Sidecar | None:
        """Return the sidecar of the source with what is different in the new file."""
        sidecar = self._sidecars[part.path]
        if sidecar is None:
            return None
        step = sidecar.step
        if step is not None and step.prefill is not None:
            step = step.model_copy(update={"prefill": prefill_output(self._output).name})
        changed = {
            "step": step,
            "standard_ops": True,
            "external_data": part.data,
            "versions": sidecar.versions | package_versions(),
            "model_sha256": sha256(part.staged),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        return sidecar.model_copy(update=changed)

    def sidecar(self, part: Part) -> Sidecar | None:
        sidecar = self._sidecars[part.path]
        if sidecar is None:
            return None
        source = self._sources[part.path]
        carried = [check for check in sidecar.checks if check.name not in names_of("convert")]
        before = [check.model_copy(update={"detail": f"{check.detail}; of {source.name}"}) for check in carried]
        return sidecar.model_copy(update={"checks": [*part.checks, *before]})

    def report(self, parts: Sequence[tuple[Part, Sidecar | None]]) -> list[Converted]:
        return [Converted(part.path, part.checks, sidecar) for part, sidecar in parts]


def _rewritten(source: Path) -> ir.Model:
    """Rewrite the file in standard operators; data in other files is only read when the result is written.

    Raises:
        UsageError: it is not an ONNX model, or has nodes that neither ONNX nor a function in it defines.
        CheckFailed: it was altered after its export.
    """
    file = OnnxFile.read(source)
    file.check_unchanged()
    file.check()
    with refused_as(f"{source} cannot be converted.", "Export the model again; this file was not made by an exporter."):
        model = ir.serde.deserialize_model(file.parse())
        ir.external_data.set_base_dir(model.graph, source.absolute().parent)
        opset = model.graph.opset_imports.get("", 0)
        plain: ir.Model = rewrite.apply(model)
    unknown = sorted({f"{node.domain}::{node.op_type}" for node in plain.graph.all_nodes() if node.domain})
    if unknown == [f"{block_weights.DOMAIN}::{block_weights.OP_TYPE}"] and opset < block_weights.OPSET:
        raise UsageError(
            f"{source} cannot be written in standard operators.",
            why=f"Its weights have 4 bits, which takes opset {block_weights.OPSET}; the file has {opset}.",
            fix=f"Export the model again with {argument('opset', block_weights.OPSET)}, and convert that file.",
        )
    if unknown:
        raise UsageError(
            f"{source} cannot be written in standard operators.",
            why=f"The file has no function for {', '.join(unknown[:4])}, and ONNX has no such operator.",
            fix=f"Export the model without {argument('function_body', False)}, and convert that file.",
        )
    return plain


class ConvertedFile(CheckedConversion):
    """The written file, with the file that it was made from."""

    kind = "convert"

    def __init__(self, part: Part, source: Path, options: FileOptions, progress: Progress) -> None:
        super().__init__(part.staged, options, lambda step: progress(f"{step}, {part.path.name}"))
        self._source = source

    def same(self) -> CheckRecord:
        seeds = self.options.seeds or ((0,) if self.options.quick else (0, 1, 2))
        asked = ParityRequest(
            self.path,
            self._source,
            seeds=seeds,
            provider="cpu",
            plugin="none",
            folder=self._source.parent,
            rounds=False,
        )
        report = run_file_parity(asked)
        worst = max(comparison.figures()["max_abs"] for _, comparison in report.comparisons)
        difference = "equal bit for bit" if worst == 0 else f"max difference {worst:.1e}"
        detail = f"{difference} to {self._source.name} in onnxruntime, {len(report.comparisons)} comparison(s)"
        detail += f": {report.judged_on}" if report.judged_on else ""
        if not report.passed:
            return failed(detail, max_abs=worst)
        nothing, why = unproven_outputs(report.overall().values(), report.tolerance)
        detail += f"; {why}" if why else ""
        return not_proven(detail, max_abs=worst) if nothing else passed(detail, max_abs=worst)
