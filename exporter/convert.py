"""`convert`: write an exported file in another form, and compare it with the file it is made from.

The checkpoint is not needed. The results of the export's checks are carried over if the two files are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import onnx_ir as ir

from ..core.documents.sidecar import CheckRecord, Sidecar, read_sidecar, sidecar_path
from ..core.error_texts import argument
from ..core.errors import UsageError
from ..core.storage.file_kinds import ONNX, REWRITTEN
from ..core.storage.files import is_file, sha256
from ..core.storage.outputs import Output, writing
from ..core.storage.publishing import publish_together, sealed
from ..onnx_graph import block_weights
from ..onnx_graph.library_errors import refused_as
from ..onnx_graph.onnx_file import OnnxFile
from ..onnx_graph.standard_ops import rewrite
from ..runtime.backends.step_file import prefill_path
from ..runtime.parity.comparison import unproven_outputs
from ..runtime.parity.files import run_file_parity
from ..runtime.parity.report import ParityRequest
from .artifact.form import EXTERNAL_DATA_FROM
from .artifact.publish import companion_path, demand, held_tensors, package_versions, publish_models, save_model
from .artifact.shared_weights import share_weights
from .checks.checked_file import ConvertedFile
from .checks.options import CheckOptions
from .checks.outcome import failed, not_proven, passed
from .checks.table import names_of, run_checks


@dataclass(frozen=True)
class Converted:
    """A converted file.

    Args:
        path: the ONNX file.
        checks: the records of its checks.
        sidecar: the facts beside it; None if the source has none.
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


@dataclass
class _Part:
    """One of the files to write: its source, its final path, and the converted model."""

    source: Path
    path: Path
    facts: Sidecar | None
    model: ir.Model
    staged: Path
    data: str | None = None


def to_standard_ops(
    model: Path,
    output: Path,
    *,
    overwrite: bool = False,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Converted]:
    """Write an ONNX file in standard operators alone, and for a step file also the prefill file beside it.

    Args:
        model: the file; its weights may lie beside it.
        output: the file to write; weights that lie beside the model are copied beside it.
        overwrite: replace an existing file.
        quick: leave out the checks that the table of checks calls long, and compare on one set of inputs.
        progress: called with the name of each step as it begins.

    Returns:
        The written files, `output` first.

    Raises:
        UsageError: the file cannot be read, or has nodes that neither ONNX nor a function in it defines.
        CheckFailed: the file was altered after its export, or the converted file does not compute the same.
    """
    sources = {model: output}
    facts = read_sidecar(model)
    companion = None if facts is None or facts.step is None else prefill_path(model, facts.step)
    if companion is not None and is_file(companion):
        sources[companion] = companion_path(output)
    kind = REWRITTEN if facts is None else ONNX
    outputs = [Output(path, kind) for path in reversed(list(sources.values()))]
    if facts is None and is_file(sidecar_path(output)):
        raise UsageError(
            f"{sidecar_path(output)} exists, and would not describe the new file.",
            why=f"{model} has no facts beside it that could replace them.",
            fix="Choose another name for the output.",
        )
    with writing(*outputs, inputs=sources, overwrite=overwrite) as folder:
        parts = []
        for source, path in sources.items():
            progress(f"Rewriting {source.name}")
            parts.append(_Part(source, path, read_sidecar(source), _rewritten(source), folder / path.name))
        shared = share_weights([part.model for part in parts], folder, output.name) if len(parts) > 1 else None
        for part in parts:
            outside = any(isinstance(tensor, ir.ExternalTensor) for tensor in held_tensors(part.model))
            part.data = save_model(part.model, part.staged, 0 if outside else EXTERNAL_DATA_FROM, shared)
        options = CheckOptions(quick=quick)
        written = [_checked(part, output, options, progress) for part in parts]
        progress("Writing")
        data = sorted({part.data for part in parts if part.data is not None})
        described = [
            (part.staged, x.sidecar, part.path) for part, x in zip(parts, written, strict=True) if x.sidecar is not None
        ]
        if described:
            publish_models(described[::-1], data)
        else:
            beside = {folder / name: output.with_name(name) for name in data}
            publish_together(beside | {parts[0].staged: output}, folder)
    return written


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


def _checked(part: _Part, output: Path, options: CheckOptions, progress: Callable[[str], None]) -> Converted:
    """Check the written file, and return it with its facts.

    Raises:
        CheckFailed: a check failed.
    """
    facts = part.facts
    if facts is not None:
        step = facts.step
        if step is not None and step.prefill is not None:
            step = step.model_copy(update={"prefill": companion_path(output).name})
        changed = {
            "step": step,
            "standard_ops": True,
            "external_data": part.data,
            "versions": facts.versions | package_versions(),
            "model_sha256": sha256(part.staged),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        facts = facts.model_copy(update=changed)
        # A step file is run as its facts describe.
        sidecar_path(part.staged).write_text(sealed(facts.to_json()), encoding="utf-8")
    checks = demand(run_checks(_ConvertedFile(part, options, progress)))
    if facts is not None:
        carried = [check for check in facts.checks if check.name not in names_of("convert")]
        before = [check.model_copy(update={"detail": f"{check.detail}; of {part.source.name}"}) for check in carried]
        facts = facts.model_copy(update={"checks": [*checks, *before]})
    return Converted(part.path, checks, facts)


class _ConvertedFile(ConvertedFile):
    """The written file, with the file that it was made from."""

    kind = "convert"

    def __init__(self, part: _Part, options: CheckOptions, progress: Callable[[str], None]) -> None:
        super().__init__(part.staged, options, lambda step: progress(f"{step}, {part.path.name}"))
        self._source = part.source

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
