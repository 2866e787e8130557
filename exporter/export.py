"""`export`: write a checkpoint as an ONNX file that has passed its checks, with its sidecar.

The file is written to a temporary folder, checked there, and only then moved to its place, so that it appears whole
and checked, or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.documents.proof import no_window, not_proven, proven_by_golden
from ..core.documents.report import Report
from ..core.documents.sidecar import CheckRecord, Sidecar, sidecar_path
from ..core.errors import UsageError
from ..core.machine.resident_memory import release_memory
from ..core.progress import timed_steps
from ..core.storage.file_kinds import ONNX
from ..core.storage.outputs import Output, check_outputs, writing
from ..core.tensors import BATCH, SEQUENCE
from ..core.tolerance import coarsest
from ..runtime.inputs.arrays import check_drawable
from ..runtime.parity.golden import Golden
from ..runtime.parity.runner import SessionRunner
from .artifact.companions import check_companions, copy_companions
from .artifact.form import FileOptions, WrittenForm, written_form
from .artifact.publish import Part, finish_export
from .artifact.serialize import message
from .checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from .checks.checked_file import SequenceFile
from .checks.golden import check_golden, open_golden
from .checks.judged import Judged, tokens_of
from .checks.layers import check_layer_windows
from .checks.parity import check_parity
from .checks.quadratic_memory import Shape, Taken, check_quadratic_memory, freest, graph_shapes
from .checks.sweep import check_dynamic_memory, check_sweep, rows_of_checkpoint
from .checks.wide_integers import check_wide_integers, dynamic_sizes, token_limits
from .checks.window import check_window
from .lowering import functions, trace
from .lowering.quantize.blocked import Rounding
from .lowering.quantize.fp8_attention import check_attention, measure, quantize_attention
from .lowering.quantize.on_text import rounding_on_text
from .lowering.quantize.weights import check_weights, quantize_weights, spans_tokens
from .models.family import TORCH_DTYPE, ShapeRequest
from .models.forms import FolderFamily
from .source.dynamic_axes import check_axes, dimensions, dynamic_specs
from .source.reference_runner import ReferenceRunner
from .source.source_model import SourceModel

_log = logging.getLogger(__name__)

# Sequence length above which only one set of random inputs is compared.
LONG_INPUT = 2048


@dataclass(frozen=True)
class ExportRequest(FileOptions):
    """What to export and how, in addition to the options of every file.

    By default there are two seeds, or one for long inputs because their reference is slow.

    Args:
        checkpoint: the weights.
        output: the ONNX file to write.
        config: configuration file; by default the one beside the checkpoint.
        shapes: static shapes and optional inputs.
        dtype: "fp32" or "fp16".
        weights: "int8" for linear layers in dynamic int8, "int4" for 4 bits in blocks, "fp8" or "int8-qdq" for
            8-bit products of TensorRT, None for the dtype.
        attention: "fp8" for attention that the plugin library computes in fp8, None for the dtype.
        dynamic: the dynamic axes, of "batch" and "seq"; the sequence length is then the longest one. None: the
            family's default, for most families no dynamic axes.
        task: what a model in a folder is for; None for what it was saved for.
        entry: the set of weights to read, where the checkpoint holds several; None chooses.
    """

    checkpoint: Path
    output: Path
    config: Path | None = None
    shapes: ShapeRequest = field(default_factory=ShapeRequest)
    dtype: str = "fp32"
    weights: str | None = None
    attention: str | None = None
    dynamic: tuple[str, ...] | None = None
    task: str | None = None
    entry: str | None = None

    @property
    def inputs(self) -> list[Path]:
        """The files that are read, except those that are found beside them."""
        return [path for path in (self.checkpoint, self.config, self.golden) if path is not None]

    @property
    def precision(self) -> str:
        """The entry of `core.tolerance` with the file's tolerance."""
        return coarsest([self.weights or self.dtype, self.attention or "fp32"])


@dataclass(frozen=True)
class ExportReport(Report):
    """What was written.

    Args:
        path: the ONNX file.
        sidecar: the facts beside it, checks included.
        notes: what was assumed.
        companion: for a step file, the chunk file for prompts beside it.
        copied: files of the model's folder that were copied beside it.
        doubts: what may be wrong in the model itself and no check of the file sees.
    """

    path: Path
    sidecar: Sidecar
    notes: list[str]
    companion: ExportReport | None = field(default=None, kw_only=True)
    copied: list[Path] = field(default_factory=list, kw_only=True)
    doubts: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def files(self) -> list[Path]:
        """The written files: the model, its facts, its weights if separate, copies, and its companion's."""
        data = [] if self.sidecar.external_data is None else [self.path.with_name(self.sidecar.external_data)]
        others = [] if self.companion is None else self.companion.files
        return list(dict.fromkeys([self.path, sidecar_path(self.path), *data, *self.copied, *others]))

    @property
    def checks(self) -> list[CheckRecord]:
        """The checks of the file and of its companion."""
        return [*self.sidecar.checks, *([] if self.companion is None else self.companion.checks)]

    @property
    def warnings(self) -> list[str]:
        """Warnings about older releases, a window that was not found, and arguments that no check proves."""
        sidecar, model = self.sidecar, str(self.path)
        doubts = () if proven_by_golden(sidecar.checks) else self.doubts
        return [*doubts, *no_window(sidecar.windows, sidecar.checks, model), *not_proven(sidecar.unproven, model)]

    def headline(self) -> str:
        """Describe the file in one line."""
        return f"{self.path}  {self.sidecar.title}, {self.sidecar.dtype}, opset {self.sidecar.opset}"


Progress = Callable[[str], None]


def open_request(
    request: ExportRequest, opened: OpenedCheckpoint | None = None
) -> tuple[OpenedCheckpoint, SourceModel]:
    """Open the checkpoint, unless it is open already, and refuse a request that cannot succeed, before work begins.

    Raises:
        UsageError: the request or one of its files cannot be used.
        MissingDependency: the inputs do not fit into memory.
    """
    check_precision(request)
    trace.check_opset(request.opset)
    check_outputs([Output(request.output, ONNX)], inputs=request.inputs, overwrite=request.overwrite)
    if opened is None:
        opened = open_checkpoint(
            request.checkpoint, request.config, task=request.task, shapes=request.shapes, entry=request.entry
        )
    source = opened.source(request.shapes)
    axes = dynamic_axes(request, source)
    check_axes(source, axes)
    check_drawable(source.inputs(request.dtype))  # the checks of the written file draw inputs of these sizes
    if axes:  # PyTorch's exporter would make dynamic axes of size 1 static
        batch = max(2, request.shapes.batch) if BATCH in axes else request.shapes.batch
        source = source.at(replace(request.shapes, batch=batch, dynamic_length=SEQUENCE in axes))
    return opened, source


def dynamic_axes(request: ExportRequest, source: SourceModel) -> tuple[str, ...]:
    """Return the dynamic axes of the file."""
    return source.family.dynamic if request.dynamic is None else request.dynamic


def check_precision(request: ExportRequest) -> None:
    """Refuse an unknown element type or kind of weights, or two that cannot be combined.

    Raises:
        UsageError: the precision is one of these.
    """
    if request.dtype not in TORCH_DTYPE:
        raise UsageError(f"Unknown dtype {request.dtype!r}.", fix=f"Known: {', '.join(TORCH_DTYPE)}.")
    check_weights(request.weights, request.dtype, request.opset, standard_ops=request.standard_ops)
    check_attention(request.attention, request.dtype, request.opset)


@timed_steps(_log)
def export(
    request: ExportRequest, progress: Progress = lambda _: None, opened: OpenedCheckpoint | None = None
) -> ExportReport:
    """Export a checkpoint, check the file and move it to its place.

    Args:
        request: what to export.
        progress: called with the name of each step as it begins.
        opened: the checkpoint, where it is no file but a live model.

    Raises:
        UsageError: the request or one of its files cannot be used.
        ExportFailed: the graph could not be made.
        CheckFailed: a check found a fault; nothing was written.
    """
    with writing(Output(request.output, ONNX), inputs=request.inputs, overwrite=request.overwrite) as folder:
        progress("Reading the checkpoint")
        opened, source = open_request(request, opened)
        beside = folder_companions(request, source)
        axes = dynamic_axes(request, source)
        request = replace(request, dynamic=axes)
        whole = ReferenceRunner(source, request.dtype, axes)
        golden = open_golden(request.golden, whole.inputs, whole.outputs, source.token_limit, whole.limits)
        release_memory(request.checkpoint)
        progress("Tracing the model")
        sizes = dimensions(source, axes) if axes else None
        model = trace.trace(source, request.dtype, request.opset, sizes)
        functions.attach_functions(model)
        if request.attention is not None:
            progress("Measuring attention")
            model = quantize_attention(model, measure(source, model))
        rounding = rounding_on_text(request.weights, source, request.checkpoint)
        if request.weights is not None:
            progress("Quantizing")
            model = quantize_weights(model, request.weights, rounding)
        form = written_form(model, trace.attention_nodes(model), request)
        part = Part(
            request.output,
            form,
            checked=lambda staged: _CheckpointFile(staged, source, request, form, golden, progress, rounding),
            describe=lambda checks: model_facts(request, opened, source, checks),
        )
        (sidecar,) = finish_export([part], folder, request, progress, mapped=request.checkpoint)
        copied = copy_companions(beside, request.output, folder)
    notes = [*opened.notes, *([] if rounding is None else rounding.notes)]
    return ExportReport(request.output, sidecar, notes, copied=copied, doubts=tuple(opened.warnings))


def folder_companions(request: ExportRequest, source: SourceModel) -> list[Path]:
    """Return the files of a model's folder that will be copied beside its file.

    Raises:
        UsageError: another file of one of these names lies there.
    """
    if not isinstance(source.family, FolderFamily) or not request.checkpoint.is_dir():
        return []
    return check_companions(request.checkpoint, source.family.companions, request.output)


class _CheckpointFile(SequenceFile):
    """The written file of a checkpoint."""

    kind = "checkpoint"

    def __init__(
        self,
        path: Path,
        source: SourceModel,
        request: ExportRequest,
        form: WrittenForm,
        golden: Golden | None,
        progress: Progress,
        rounding: Rounding | None,
    ) -> None:
        super().__init__(path, request, progress, form.nodes)
        self._rounding = rounding
        self._source, self._request, self.golden = source, request, golden
        self._tolerance = request.tolerance(request.precision)
        self._first_run: dict[str, dict[str, Any]] = {}
        self._range: CheckRecord | None = None

    def golden_outputs(self, golden: Golden) -> CheckRecord:
        request = self._request
        return check_golden(SessionRunner(self.session), golden, request.tolerance, request.precision, self._source)

    def parity(self) -> CheckRecord:
        request, source = self._request, self._source
        # Of a file in fp16 it holds a session of its own, which ends here.
        judged = Judged.open(
            self.path, self.session, request.dtype, request.precision, tokens_of(request.checkpoint, source)
        )
        record = self._compared(judged)
        self._range = judged.range_record()
        self.session.wake()
        return record

    def _compared(self, judged: Judged) -> CheckRecord:
        request, source = self._request, self._source
        if request.dynamic:
            return check_sweep(judged, source, request.dtype, request.dynamic, self._tolerance, quick=request.quick)
        one_set = request.quick or source.shapes.seq_len > LONG_INPUT
        seeds = request.seeds or ((0,) if one_set else (0, 1))
        return check_parity(judged, source, request.dtype, self._tolerance, seeds, self._first_run, few=one_set)

    def halves(self) -> CheckRecord | None:
        return self._range

    def rows(self) -> CheckRecord:
        request, axes = self._request, self._request.dynamic or ()
        return rows_of_checkpoint(self.session, self.model, self._source, request.dtype, axes, quick=request.quick)

    def window(self) -> CheckRecord:
        request = self._request
        if request.dynamic:
            return check_layer_windows(self.nodes, [])
        self.session.wake()
        release_memory()
        nodes_only = spans_tokens(request.weights)
        return check_window(
            self.nodes, self.session, self._source, request.dtype, self._first_run, nodes_only=nodes_only
        )

    def memory(self) -> CheckRecord:
        request, source = self._request, self._source
        if request.dynamic:
            return check_dynamic_memory(self.nodes, source, request.dynamic)
        return check_quadratic_memory(
            self.nodes, source, lambda taken: _retrace(request, source, taken, self._rounding)
        )

    def integers(self) -> CheckRecord:
        request, source = self._request, self._source
        limits = token_limits(source.inputs(request.dtype), source.token_limit, source.shapes.seq_len)
        sizes = dynamic_sizes(request.dynamic or (), source.shapes.seq_len)
        return check_wide_integers(self.model, self.path.parent, limits, sizes)


def _retrace(
    request: ExportRequest, source: SourceModel, taken: Taken, rounding: Rounding | None
) -> tuple[set[int], dict[str, Shape]]:
    """Trace the model at a shorter length, and return that length, also as it is padded, and the shapes by name."""
    length, window = source.shapes.seq_len, source.window_size
    step = 1 if getattr(source.args, "autopad", True) else window

    def with_padding(n: int) -> set[int]:
        return {n, -(-n // window) * window}

    other = next(freest(range(length - step, 0, -step), with_padding, taken))
    shorter = source.at(replace(request.shapes, seq_len=other))
    model = trace.trace(shorter, request.dtype, request.opset)
    if request.attention is not None:  # so that tensors have the same names
        model = quantize_attention(model, {})
    if request.weights is not None:
        model = quantize_weights(model, request.weights, rounding)
    return with_padding(other), graph_shapes(message(model))


def model_facts(
    request: ExportRequest, opened: OpenedCheckpoint, source: SourceModel, checks: Sequence[CheckRecord]
) -> dict[str, Any]:
    """Return what the sidecar of a whole-sequence file records about the model.

    Raises:
        UsageError: the checkpoint changed since it was read, so that its SHA-256 is that of other weights.
    """
    if opened.loaded.files is not None:
        opened.loaded.files.check()
    dynamic = request.dynamic or ()
    return {
        "class_name": source.class_name,
        "kwargs": source.args.model_dump(mode="json"),
        "hyper_connections": opened.resolved.hyper_connections,
        "inputs": dynamic_specs(source, request.dtype, dynamic),
        "seq_len": source.shapes.seq_len,
        "batch": source.shapes.batch,
        "dynamic": list(dynamic),
        "dtype": request.dtype,
        "options": ({"causal": True} if source.shapes.causal else {})
        | ({} if request.weights is None else {"weights": request.weights})
        | ({} if request.attention is None else {"attention": request.attention})
        | ({} if request.entry is None else {"entry": request.entry}),
        "checkpoint_sha256": opened.loaded.sha256,
        "checkpoint_name": request.checkpoint.name,
        "unproven": [] if proven_by_golden(checks) else list(source.not_in_weights),
    }
