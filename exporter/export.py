"""`export`: from a checkpoint to an ONNX file that has passed its checks, with its sidecar.

The file is written to a temporary folder, checked there, and only then moved to its place: it appears
whole and checked, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, cast

import onnx_ir as ir

from ..core.documents.sidecar import CheckRecord, Sidecar
from ..core.errors import UsageError
from ..core.machine.resident_memory import release_memory
from ..core.storage.file_kinds import ONNX
from ..core.storage.files import sha256
from ..core.storage.outputs import Output, check_outputs, writing
from ..runtime.inputs.arrays import check_drawable
from .artifact.options import FileOptions
from .artifact.publish import finish_export, output_specs, package_versions, window_facts
from .artifact.serialize import message, read_message
from .checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from .checks.loads import check_loads, check_model
from .checks.parity import check_parity
from .checks.quadratic_memory import Shape, Taken, allowed, check_quadratic_memory, freest, graph_shapes
from .checks.sweep import dynamic_checks
from .checks.window import check_window
from .lowering import functions, trace
from .lowering.quantize import quantize_weights
from .models.family import TORCH_DTYPE, ShapeRequest
from .source.dynamic_axes import at_dynamic_sizes, check_axes, dimensions, dynamic_specs
from .source.source_model import SourceModel

# Sequence length from which one set of random inputs has to do.
LONG_INPUT = 2048


@dataclass(frozen=True)
class ExportRequest(FileOptions):
    """What to export and how, the options of every file besides.

    `dynamic` names axes of "batch" and "seq"; the length is then the longest. By default there are two seeds, or one
    for long inputs, whose reference is slow.

    Args:
        checkpoint: the weights.
        output: the ONNX file to write.
        config: configuration file; by default the one beside the checkpoint.
        shapes: static shapes and optional inputs.
        dtype: "fp32" or "fp16".
        weights: "int8" for linear layers in dynamic int8, None for the dtype.
    """

    checkpoint: Path
    output: Path
    config: Path | None = None
    shapes: ShapeRequest = field(default_factory=ShapeRequest)
    dtype: str = "fp32"
    weights: str | None = None

    @property
    def inputs(self) -> list[Path]:
        """The files that are read, besides those that are found beside them."""
        return [self.checkpoint] if self.config is None else [self.checkpoint, self.config]

    @property
    def precision(self) -> str:
        """The entry of `core.tolerance` that judges the file."""
        return self.weights or self.dtype


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Args:
        path: the ONNX file.
        sidecar: the facts beside it, checks included.
        notes: what was assumed on the way.
    """

    path: Path
    sidecar: Sidecar
    notes: list[str]


Progress = Callable[[str], None]


def open_request(request: ExportRequest) -> tuple[OpenedCheckpoint, SourceModel]:
    """Everything that can be refused before work begins.

    Raises:
        UsageError: the request or one of its files cannot be used.
        MissingDependency: the inputs do not fit into memory.
    """
    check_precision(request)
    trace.check_opset(request.opset)
    check_outputs([Output(request.output, ONNX)], inputs=request.inputs, overwrite=request.overwrite)
    sizes = {"heads": request.shapes.heads, "dim_head": request.shapes.dim_head}
    overrides = {name: size for name, size in sizes.items() if size is not None}
    opened = open_checkpoint(request.checkpoint, request.config, overrides)
    source = opened.source(request.shapes)
    check_axes(source, request.dynamic)
    check_drawable(source.inputs(request.dtype))  # the checks of the written file draw them
    return opened, at_dynamic_sizes(source, request.shapes, request.dynamic) if request.dynamic else source


def check_precision(request: ExportRequest) -> None:
    """Refuse an unknown element type or sort of weights, or two that do not go together.

    Raises:
        UsageError: it is one of these.
    """
    if request.dtype not in TORCH_DTYPE:
        raise UsageError(f"Unknown dtype {request.dtype!r}.", fix=f"Known: {', '.join(TORCH_DTYPE)}.")
    if request.weights not in (None, "int8"):
        raise UsageError(f"Unknown weights {request.weights!r}.", fix="Known: int8.")
    if request.weights is not None and request.dtype != "fp32":
        raise UsageError(
            f"int8 weights do not go with {request.dtype}.",
            why="onnxruntime's dynamic int8 products take and give fp32.",
            fix="Use fp32.",
        )


def export(request: ExportRequest, progress: Progress = lambda _: None) -> ExportReport:
    """Export, check, publish.

    Args:
        request: what to export.
        progress: told each step as it begins.

    Raises:
        UsageError: the request or one of its files cannot be used.
        ExportFailed: the graph could not be made.
        CheckFailed: a check found a fault; nothing was written.
    """
    with writing(Output(request.output, ONNX), inputs=request.inputs, overwrite=request.overwrite) as folder:
        progress("Reading the checkpoint")
        opened, source = open_request(request)
        release_memory(request.checkpoint)
        progress("Tracing the model")
        axes = dimensions(source, request.dynamic) if request.dynamic else None
        model = trace.trace(source, request.dtype, request.opset, axes)
        functions.attach_functions(model)
        if request.weights is not None:
            progress("Quantizing")
            model = quantize_weights(model)
        sidecar = finish_export(
            model,
            folder,
            request.output,
            function_body=request.function_body,
            external_data_from=request.external_data_from,
            check=lambda staged: _run_checks(staged, source, request, progress),
            describe=lambda *written: sidecar_of(request, opened, source, model, *written),
            progress=progress,
            mapped=request.checkpoint,
        )
    return ExportReport(request.output, sidecar, opened.notes)


def _run_checks(path: Path, source: SourceModel, request: ExportRequest, progress: Progress) -> Iterator[CheckRecord]:
    """Each check of a written file, cheapest first."""
    if request.dynamic:
        progress("Checking, over a sweep of sizes")
        tolerance = request.tolerance(request.precision)
        yield from dynamic_checks(path, source, request.dtype, request.dynamic, tolerance)
        return
    progress("Checking: ONNX")
    yield check_model(path)
    progress("Checking: onnxruntime")
    record, session = check_loads(path)
    yield record
    progress("Checking: parity with the float64 reference")
    tolerance = request.tolerance(request.precision)
    seeds = request.seeds or ((0, 1) if source.shapes.seq_len <= LONG_INPUT else (0,))
    first_run: dict[str, dict[str, Any]] = {}
    yield check_parity(session, source, request.dtype, tolerance, seeds, first_run)
    model = read_message(path)
    session.wake()
    release_memory()
    progress("Checking: window witness")
    yield check_window(model, session, source, request.dtype, first_run, nodes_only=request.weights is not None)
    progress("Checking: memory audit")
    audit = check_quadratic_memory(model, source, lambda taken: _retrace(request, source, taken))
    yield allowed(audit) if request.allow_quadratic else audit


def _retrace(request: ExportRequest, source: SourceModel, taken: Taken) -> tuple[set[int], dict[str, Shape]]:
    """Shapes of the same model's graph some tokens shorter, or windows where it takes whole windows only."""
    length, window = source.shapes.seq_len, source.window_size
    step = 1 if getattr(source.args, "autopad", True) else window

    def with_padding(n: int) -> set[int]:
        return {n, -(-n // window) * window}

    other = next(freest(range(length - step, 0, -step), with_padding, taken))
    shorter = source.at(replace(request.shapes, seq_len=other))
    model = trace.trace(shorter, request.dtype, request.opset)
    if request.weights is not None:  # tensors are told apart by their names
        model = quantize_weights(model)
    return with_padding(other), graph_shapes(message(model))


def sidecar_of(
    request: ExportRequest,
    opened: OpenedCheckpoint,
    source: SourceModel,
    model: ir.Model,
    staged: Path,
    data: str | None,
    checks: list[CheckRecord],
    **others: Any,
) -> Sidecar:
    """What is known about the file, for those who find it later; `others` replace facts of a whole-sequence file."""
    facts: dict[str, Any] = {
        "class_name": source.class_name,
        "kwargs": source.args.model_dump(mode="json"),
        "hyper_connections": opened.resolved.hyper_connections,
        "inputs": dynamic_specs(source, request.dtype, request.dynamic),
        "outputs": output_specs(model),
        "seq_len": source.shapes.seq_len,
        "batch": source.shapes.batch,
        "dynamic": list(request.dynamic),
        "dtype": cast(Literal["fp32", "fp16", "bf16"], request.dtype),
        "options": ({"causal": True} if source.shapes.causal else {})
        | ({} if request.weights is None else {"weights": request.weights}),
        "opset": request.opset,
        "windows": [window_facts(node) for node in trace.attention_nodes(model)],
        "function_body": request.function_body,
        "external_data": data,
        "versions": package_versions(),
        "checkpoint_sha256": opened.loaded.sha256,
        "checkpoint_name": request.checkpoint.name,
        "model_sha256": sha256(staged),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "checks": checks,
    }
    return Sidecar(**(facts | others))
