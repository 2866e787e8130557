"""Export a checkpoint as a file that takes whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...core.documents.proof import proven_by_golden
from ...core.documents.sidecar import CheckRecord, Sidecar
from ...core.error_texts import argument
from ...core.machine.resident_memory import release_memory
from ...core.storage.file_kinds import ONNX
from ...core.storage.outputs import Output
from ...core.tensors import BATCH, SEQUENCE
from ...runtime.inputs.arrays import check_drawable
from ...runtime.parity.golden import Golden
from ...runtime.parity.runner import SessionRunner
from ...runtime.text_inputs.tokens import Tokens
from ..artifact.accompanying_files import check_accompanying_files, copy_accompanying_files
from ..artifact.serialize import message
from ..checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from ..checks.checked_file import SequenceFile
from ..checks.constants import check_constants
from ..checks.golden import check_golden, open_golden
from ..checks.judged import Judged
from ..checks.layers import check_layer_windows
from ..checks.parity import check_parity
from ..checks.quadratic_memory import Shape, SizesInUse, check_quadratic_memory, graph_shapes, unused_first
from ..checks.quality import check_quality, has_quality
from ..checks.rounded import Cut, Feeds, GraphProof, check_rounded, keep_unrounded, passes_in_int8
from ..checks.sweep import check_dynamic_memory, check_sweep, rows_of_checkpoint
from ..checks.wide_integers import check_wide_integers, dynamic_sizes, token_limits
from ..checks.window import check_window
from ..export_report import ExportReport
from ..lowering import functions, trace
from ..lowering.quantize.blocked import Rounding
from ..lowering.quantize.fp8_attention import check_attention, measure, quantize_attention
from ..lowering.quantize.on_text import rounding_on_text
from ..lowering.quantize.weights import check_precision, check_rounding, in_blocks, quantize_weights, spans_tokens
from ..models.forms import FolderFamily
from ..options import ExportRequest, recorded
from ..pipeline import Job, Part, Progress
from ..source.dynamic_axes import check_axes, dimensions, dynamic_specs
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from ..source.tokens import tokens_of

# Sequence length above which only one set of random inputs is compared.
LONG_INPUT = 2048


class RequestJob(Job[ExportReport]):
    """What exports of a checkpoint have in common, whole or in steps.

    Args:
        request: what to export.

    Attributes:
        opened: the checkpoint.
        golden: the golden outputs to compare with, if there are any.
        rounding: how its weights are rounded, if they are.
        accompanying_files: the files of its folder that are copied next to the file.
    """

    opened: OpenedCheckpoint
    golden: Golden | None
    rounding: Rounding | None
    accompanying_files: list[Path]

    def __init__(self, request: ExportRequest) -> None:
        self.request = self.options = request
        self.graphs: dict[Path, GraphProof] = {}

    def remedy(self, graph: GraphProof | None, feeds: Feeds = SessionRunner, cut: Cut | None = None) -> str:
        """Say which other kind of weights would pass, measured, where a file with its weights is refused."""
        if graph is None or graph.record is None or graph.record.status != "passed":
            return ""
        weights = self.request.weight_dtype
        if weights != "int8":
            exact = None if self.rounding is None or self.rounding.exact is None else self.rounding.exact
            tolerance = self.request.tolerance("int8", proven=True)
            if passes_in_int8(graph, exact, tolerance, feeds, cut):
                return f"With {argument('weight_dtype', 'int8')} it would pass, measured on these inputs."
        return f"Without {argument('weight_dtype')} it would pass: its graph before rounding did."

    def keep_unrounded(self, model: ir.Model, path: Path) -> None:
        """Keep the graph of a file before its weights are rounded, for its proofs; fp32 alone has them."""
        request = self.request
        if request.dtype == "fp32" and request.attention_dtype is None:
            kept = keep_unrounded(model, self.folder, path.name)
            self.graphs[path] = GraphProof(kept, request.tolerance("fp32"))

    @property
    def precision(self) -> str:
        return self.request.precision

    def inputs(self) -> list[Path]:
        return self.request.inputs

    def published(self, folder: Path) -> None:
        self.copied = copy_accompanying_files(self.accompanying_files, self.request.output, folder)

    def notes(self) -> list[str]:
        """Return what was assumed of the checkpoint and of its rounding, one line each."""
        return [*self.opened.notes, *([] if self.rounding is None else self.rounding.notes)]


class CheckpointJob(RequestJob):
    """The export of a checkpoint, or of a live model that is read as its folder would be.

    Args:
        request: what to export.
        opened: the checkpoint, where it is no file but a live model.
    """

    source: SourceModel

    def __init__(self, request: ExportRequest, opened: OpenedCheckpoint | None = None) -> None:
        super().__init__(request)
        self.mapped = request.checkpoint
        self._live = opened

    def outputs(self) -> list[Output]:
        return [Output(self.request.output, ONNX)]

    def open(self, progress: Progress) -> None:
        progress("Reading the checkpoint")
        self.opened, self.source = open_request(self.request, self._live)
        request, source = self.request, self.source
        self.accompanying_files = files_to_copy(request, source)
        axes = dynamic_axes(request, source)
        self.request = replace(request, dynamic=axes)
        whole = ReferenceRunner(source, request.dtype, axes)
        self.golden = open_golden(request.golden, whole.inputs, whole.outputs, source.token_limit, whole.limits)
        release_memory(self.mapped)

    def trace(self, progress: Progress) -> list[Part]:
        progress("Tracing the model")
        request, source = self.request, self.source
        sizes = dimensions(source, request.dynamic) if request.dynamic else None
        model = trace.trace(source, request.dtype, request.opset, sizes)
        functions.attach_functions(model)
        if request.attention_dtype is not None:
            progress("Measuring attention")
            model = quantize_attention(model, measure(source, model))
        self.rounding = rounding_on_text(request, source)
        if request.weight_dtype is not None:
            self.keep_unrounded(model, request.output)
            progress("Quantizing")
            model = quantize_weights(model, request.weight_dtype, self.rounding)
        return [Part(request.output, model, list(trace.attention_nodes(model)))]

    def written(self) -> None:
        if self.request.dynamic:  # a file of one length is traced again at another one
            self.source.forget_weights()

    def checked(self, part: Part, progress: Progress) -> CheckpointFile:
        return CheckpointFile(part, self, progress)

    def sidecar_entries(self, part: Part) -> dict[str, Any]:
        return model_entries(self.request, self.opened, self.source, part.checks)

    def report(self, parts: Sequence[tuple[Part, Sidecar | None]]) -> ExportReport:
        ((part, sidecar),) = parts
        assert sidecar is not None
        doubts = tuple(self.opened.warnings)
        return ExportReport(part.path, sidecar, self.notes(), copied=self.copied, doubts=doubts)


def open_request(
    request: ExportRequest, opened: OpenedCheckpoint | None = None
) -> tuple[OpenedCheckpoint, SourceModel]:
    """Open the checkpoint, unless it is open already, and refuse a request that cannot succeed, before work begins.

    Raises:
        UsageError: the request or one of its files cannot be used.
        MissingDependency: the inputs do not fit into memory.
    """
    check_request_precision(request)
    trace.check_opset(request.opset)
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
    return source.family.dynamic if request.dynamic is None else tuple(request.dynamic)


def check_request_precision(request: ExportRequest) -> None:
    """Refuse the precision of a checkpoint's export, also of its tables and its attention, if it cannot be had.

    Raises:
        UsageError: an unknown value, or values that cannot be combined.
        MissingDependency: the installed onnxruntime cannot compute it.
    """
    check_precision(request)
    check_rounding(request.weight_dtype, request.table_dtype, calibrated=request.calibration is not None)
    check_attention(request.attention_dtype, request.dtype, request.opset)


def files_to_copy(request: ExportRequest, source: SourceModel) -> list[Path]:
    """Return the files of a model's folder that will be copied next to its file.

    Raises:
        UsageError: another file of one of these names lies there.
    """
    if not isinstance(source.family, FolderFamily) or not request.checkpoint.is_dir():
        return []
    return check_accompanying_files(request.checkpoint, source.family.accompanying_files, request.output)


class CheckpointFile(SequenceFile):
    """The written file of a checkpoint."""

    kind = "checkpoint"

    def __init__(self, part: Part, job: CheckpointJob, progress: Progress) -> None:
        super().__init__(part.staged, job.request, progress, part.lowered.nodes)
        self._source, self._request = job.source, job.request
        self._rounding, self.golden = job.rounding, job.golden
        self._job, self._graph = job, job.graphs.get(part.path)
        self._tolerance = job.request.tolerance(job.request.precision, proven=self.has_proofs and self.has_quality)
        self._first_run: dict[str, dict[str, Any]] = {}
        self._range: CheckRecord | None = None

    def golden_outputs(self, golden: Golden) -> CheckRecord:
        request = self._request
        return check_golden(SessionRunner(self.session), golden, request.tolerance, request.precision, self._source)

    @property
    def has_own_constants(self) -> bool:
        return self._source.family.loads_reference and self._source.original is not None

    def constants(self) -> CheckRecord:
        return check_constants(self.model, self._source.loaded_original())

    def remedy(self) -> str:
        return self._job.remedy(self._graph)

    def rounded(self) -> CheckRecord:
        assert self._graph is not None
        self.session.wake()
        return check_rounded(self.path, self.session, self._graph, blocks=in_blocks(self._request.weight_dtype))

    def parity(self) -> CheckRecord:
        return self._parity

    @cached_property
    def _parity(self) -> CheckRecord:
        request = self._request
        # Of a file in fp16 it holds a session of its own, which ends here.
        judged = Judged.open(self.path, self.session, request.dtype, request.precision, self._tokens)
        judged.graph = self._graph
        record = self._compared(judged)
        if self._graph is not None:
            self._graph.finish(ReferenceRunner(self._source), judged.describe())
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

    @property
    def has_quality(self) -> bool:
        request = self._request
        return request.weight_dtype is not None and has_quality(self._source, self._tokens)

    def quality(self) -> CheckRecord:
        request, source, tokens = self._request, self._source, self._tokens
        assert tokens is not None
        axes = request.dynamic or ()
        source = source.resized(batch=1) if BATCH in axes else source
        multiple = 1 if getattr(source.args, "autopad", True) else source.window_size
        self.session.wake()
        runner = SessionRunner(self.session, rests=True)
        return check_quality(
            runner, source, tokens, self.path, dtype=request.dtype, multiple=multiple if SEQUENCE in axes else 0
        )

    @cached_property
    def _tokens(self) -> Tokens | None:
        return tokens_of(self._request.checkpoint, self._source)

    def rows(self) -> CheckRecord:
        request, axes = self._request, self._request.dynamic or ()
        return rows_of_checkpoint(self.session, self.model, self._source, request.dtype, axes, quick=request.quick)

    def window(self) -> CheckRecord:
        request = self._request
        if request.dynamic:
            return check_layer_windows(self.nodes, [])
        self.session.wake()
        release_memory()
        nodes_only = spans_tokens(request.weight_dtype)
        return check_window(
            self.nodes, self.session, self._source, request.dtype, self._first_run, nodes_only=nodes_only
        )

    def memory(self) -> CheckRecord:
        request, source = self._request, self._source
        if request.dynamic:
            return check_dynamic_memory(self.nodes, source, request.dynamic)
        return check_quadratic_memory(
            self.nodes, source, lambda in_use: _retrace(request, source, in_use, self._rounding)
        )

    def integers(self) -> CheckRecord:
        request, source = self._request, self._source
        limits = token_limits(source.inputs(request.dtype), source.token_limit, source.shapes.seq_len)
        sizes = dynamic_sizes(request.dynamic or (), source.shapes.seq_len)
        return check_wide_integers(self.model, self.path.parent, limits, sizes)


def _retrace(
    request: ExportRequest, source: SourceModel, in_use: SizesInUse, rounding: Rounding | None
) -> tuple[set[int], dict[str, Shape]]:
    """Trace the model at a shorter length, and return that length, also as it is padded, and the shapes by name."""
    length, window = source.shapes.seq_len, source.window_size
    step = 1 if getattr(source.args, "autopad", True) else window

    def with_padding(n: int) -> set[int]:
        return {n, -(-n // window) * window}

    other = next(unused_first(range(length - step, 0, -step), with_padding, in_use))
    shorter = source.at(replace(request.shapes, seq_len=other))
    model = trace.trace(shorter, request.dtype, request.opset)
    if request.attention_dtype is not None:  # so that tensors have the same names
        model = quantize_attention(model, {})
    if request.weight_dtype is not None:
        model = quantize_weights(model, request.weight_dtype, rounding)
    return with_padding(other), graph_shapes(message(model))


def model_entries(
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
        "options": recorded(request, request.shapes),
        "checkpoint_sha256": opened.loaded.sha256,
        "checkpoint_name": request.checkpoint.name,
        "unproven": [] if proven_by_golden(checks) else list(source.not_in_weights),
    }
