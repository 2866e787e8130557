"""Convert an exported file to another form, and compare it with the file it is made from.

The checkpoint is not needed. The results of the export's checks are carried over if the two files are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from ...core.documents.report import outcomes_text
from ...core.documents.sidecar import CheckRecord, Sidecar, read_sidecar, sidecar_path
from ...core.dtypes import IO_NAME
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.file_kinds import ONNX, REWRITTEN
from ...core.storage.files import is_file, sha256
from ...core.storage.outputs import Output
from ...core.storage.publishing import sealed
from ...core.tensors import TensorSpec
from ...onnx_graph import block_weights
from ...onnx_graph.graph_values import put_back, take_weights
from ...onnx_graph.library_errors import infer_shapes, refused_as
from ...onnx_graph.onnx_file import OnnxFile
from ...onnx_graph.precision import fp32_to_half
from ...onnx_graph.standard_ops import rewrite
from ...runtime.backends.onnxruntime.session import open_file
from ...runtime.backends.step_file import prefill_path
from ...runtime.parity.comparison import unproven_outputs
from ...runtime.parity.files import run_file_parity
from ...runtime.parity.report import ParityRequest
from ..artifact.form import WrittenForm
from ..artifact.publish import held_tensors, package_versions, prefill_output
from ..checks.checked_file import ConvertedFile as CheckedConversion
from ..checks.model_checker import check_model
from ..checks.outcome import failed, not_proven, passed
from ..checks.table import names_of
from ..options import EXTERNAL_DATA_FROM, Checks, Dtype, FileOptions
from ..pipeline import Job, Part, Progress, run

# The element types that a file can be converted to.
_NARROW = ("fp16", "bf16")
_NOT_VALID = "Export the model again; this file was not made by an exporter."


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        """Return the file and the outcomes of its checks."""
        return f"<{self.path}: {outcomes_text(check.status for check in self.checks)}>"


def to_standard_ops(
    model: Path,
    output: Path,
    *,
    overwrite: bool = False,
    checks: Checks = "all",
    progress: Progress = lambda _: None,
) -> list[Converted]:
    """Write an ONNX file in standard operators alone, and for a step file also the prefill file next to it.

    As `convert` with `standard_ops`.
    """
    return convert(model, output, standard_ops=True, overwrite=overwrite, checks=checks, progress=progress)


def convert(
    model: Path,
    output: Path,
    *,
    standard_ops: bool = False,
    dtype: Dtype | None = None,
    overwrite: bool = False,
    checks: Checks = "all",
    progress: Progress = lambda _: None,
) -> list[Converted]:
    """Write an ONNX file in another form, and compare it with the given one.

    Args:
        model: the file; its weights may lie next to it.
        output: the file to write; weights that lie next to the model are copied next to it.
        standard_ops: write standard operators alone, and for a step file also the prefill file next to it.
        dtype: "fp16" or "bf16": compute in half precision; the given file has to be fp32.
        overwrite: replace an existing file.
        checks: "quick" leaves out the checks that the table of checks calls long, and compares on one set of inputs.
        progress: called with the name of each step as it begins.

    Returns:
        The written files, `output` first.

    Raises:
        UsageError: the file cannot be read or is not fp32, has nodes that neither ONNX nor a function in it defines, or
            weights beyond the range of the type.
        CheckFailed: the file was altered after its export, or the converted file does not compute the same.
    """
    options = FileOptions(checks=checks, overwrite=overwrite, standard_ops=standard_ops)
    return run(ConvertJob(model, output, options, dtype), progress)


class ConvertJob(Job[list[Converted]]):
    """The conversion of a file, and for a step file also of the prefill file next to it, to another form.

    Args:
        model: the file.
        output: the file to write.
        options: of its checks, its form, and whether an existing file is replaced.
        dtype: the element type to compute in; None keeps the file's.

    Raises:
        UsageError: the sidecar next to the file cannot be read, that of the output would describe another file, or
            the file is not one that can be of this type.
    """

    def __init__(self, model: Path, output: Path, options: FileOptions, dtype: Dtype | None = None) -> None:
        self.options, self._output, self._dtype = options, output, dtype
        # Final path → the file it is made from.
        self._sources = {output: model}
        sidecar = read_sidecar(model)
        if dtype is not None:
            _check_narrows(model, dtype, sidecar)
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
            parts.append(Part(path, _rewritten(source, self._dtype, standard_ops=self.options.standard_ops)))
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
        source, rounds = self._sources[part.path], self._dtype == "fp16"
        return ConvertedFile(part, source, self.options, progress, rounds=rounds)

    def _converted_sidecar(self, part: Part) -> Sidecar | None:
        """Return the sidecar of the source with what is different in the new file."""
        sidecar = self._sidecars[part.path]
        if sidecar is None:
            return None
        step = sidecar.step
        if step is not None and step.prefill is not None:
            step = step.model_copy(update={"prefill": prefill_output(self._output).name})
        changed: dict[str, Any] = {
            "step": step,
            "standard_ops": sidecar.standard_ops or self.options.standard_ops,
            "external_data": part.data,
            "versions": sidecar.versions | package_versions(),
            "model_sha256": sha256(part.staged),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        if self._dtype is not None:
            element = IO_NAME[self._dtype]
            changed["dtype"] = self._dtype
            for name in ("inputs", "outputs"):
                specs: list[TensorSpec] = getattr(sidecar, name)
                changed[name] = [replace(x, dtype=element) if x.dtype == "float32" else x for x in specs]
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


def _check_narrows(model: Path, dtype: str, sidecar: Sidecar | None) -> None:
    """Refuse a file that cannot be converted to half precision.

    Raises:
        UsageError: an unknown type, or a file of steps, of half precision or of rounded weights.
    """
    if dtype not in _NARROW:
        raise UsageError(f"A file cannot be converted to {dtype!r}.", fix=f"Known: {', '.join(_NARROW)}.")
    why = ""
    if sidecar is not None and sidecar.step is not None:
        why = "It is a step file, whose caches are of its element type."
    elif sidecar is not None and sidecar.dtype != "fp32":
        why = f"It is {sidecar.dtype} already."
    elif sidecar is not None and sidecar.options.get("weight_dtype") is not None:
        why = f"Its weights are {sidecar.options['weight_dtype']} already."
    if why:
        raise UsageError(
            f"{model} cannot be converted to {dtype}.",
            why=why,
            fix=f"Export the model again with {argument('dtype', dtype)}.",
        )


def _narrowed(proto: onnx.ModelProto, source: Path, dtype: str) -> ir.Model:
    """Return a file's model in half precision.

    Raises:
        UsageError: nothing in it is fp32, or a weight is beyond the range of the type.
    """
    weights = take_weights(proto)
    typed = infer_shapes(proto)
    put_back(typed, weights)
    model = ir.serde.deserialize_model(typed)
    ir.external_data.set_base_dir(model.graph, source.absolute().parent)
    if not any(x.dtype == ir.DataType.FLOAT for x in (*model.graph.inputs, *model.graph.outputs)):
        raise UsageError(f"{source} cannot be converted to {dtype}.", why="None of its inputs and outputs is fp32.")
    narrow: ir.Model = fp32_to_half.apply(model, dtype)
    return narrow


def _rewritten(source: Path, dtype: str | None, *, standard_ops: bool) -> ir.Model:
    """Rewrite the file in another form; data in other files is only read when the result is written.

    Raises:
        UsageError: it is not an ONNX model, has nodes that neither ONNX nor a function in it defines, or weights beyond
            the range of the type.
        CheckFailed: it was altered after its export.
    """
    file = OnnxFile.read(source)
    file.check_unchanged()
    file.check()
    with refused_as(f"{source} cannot be converted.", _NOT_VALID):
        proto = file.parse()
        if dtype is not None:
            model = _narrowed(proto, source, dtype)
        else:
            model = ir.serde.deserialize_model(proto)
            ir.external_data.set_base_dir(model.graph, source.absolute().parent)
        if not standard_ops:
            return model
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

    def __init__(
        self, part: Part, source: Path, options: FileOptions, progress: Progress, *, rounds: bool = False
    ) -> None:
        super().__init__(part.staged, options, lambda step: progress(f"{step}, {part.path.name}"))
        self._source, self._rounds = source, rounds

    def valid(self) -> CheckRecord:
        """Run ONNX's full checker; it is the source's fault if it refuses that too, or onnxruntime does.

        Raises:
            UsageError: the source is not valid.
        """
        what = f"{self._source} cannot be converted."
        with refused_as(what, _NOT_VALID):
            found = super().valid()
            if found.status == "failed":
                given = check_model(self._source)
                if given.status == "failed":
                    raise UsageError(what, why=f"ONNX's checker refuses it: {given.detail}", fix=_NOT_VALID)
                open_file(self._source, provider="cpu", plugin="none", lean=True)
        return found

    def same(self) -> CheckRecord:
        seeds = self.options.seeds or ((0,) if self.options.quick else (0, 1, 2))
        asked = ParityRequest(
            self.path,
            self._source,
            seeds=seeds,
            provider="cpu",
            plugin="none",
            folder=self._source.parent,
            rounds=self._rounds,
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
