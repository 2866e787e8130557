"""`parity`: an exported file beside the fp64 oracle of its checkpoint, over a sweep of inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.engine_facts import read_model_facts
from ..core.errors import UsageError
from ..core.sidecar import Sidecar
from ..core.size_sweep import OPEN_BATCH
from ..core.tensors import TensorSpec
from ..core.tolerance import tolerance_for
from ..core.window_view import WindowView, bias_views, views
from ..runtime.inspect_onnx import inspect_onnx
from ..runtime.parity_report import ParityReport, ParityRequest, altered, not_finite
from ..runtime.session import Session, load
from .checkpoint.config import RawConfig
from .checkpoint.open_checkpoint import open_checkpoint
from .models.family import NUMPY_DTYPE, ShapeRequest
from .open_sizes import BATCH, SEQUENCE
from .parity_ways import StepByStep, Way, Whole
from .source import SourceModel
from .steps.source import StepSource


def run_parity(request: ParityRequest, progress: Callable[[str], None] = lambda _: None) -> ParityReport:
    """Run the file and the oracle on the same inputs.

    Raises:
        UsageError: a file that cannot be read, or that does not belong to the checkpoint.
        CheckFailed: an output is missing or has another shape than the reference.
        MissingDependency: onnxruntime, or the provider asked for, is not there.
    """
    progress("Loading the model")
    session = load(
        request.model, provider=request.provider, plugin=request.plugin, verify=False
    )  # the numbers judge it
    sidecar = read_model_facts(request.model)
    source, notes = _source(request, session, sidecar)
    notes += [*altered(request.model), *session.notes]
    dtype = dtype_of_file(request.model, session, source, sidecar)
    way = _way(session, source, dtype, sidecar)
    _check_inputs(session.inputs, way.specs, source)
    precision = dtype if sidecar is None else str(sidecar.options.get("weights", dtype))
    tolerance = tolerance_for(precision, request.atol, request.rtol)
    report = ParityReport(
        precision,
        session.provider,
        request.model,
        request.against,
        tolerance,
        windows_of(way.source),
        session.plugin,
        sidecar,
        notes=notes,
    )
    for name, inputs in way.inputs(request.seeds, request.inputs, request.lengths):
        progress(f"Comparing: {name}")
        report.notes += not_finite(inputs)
        outputs, comparisons = way.compare(inputs, tolerance)
        report.take(name, inputs, outputs, comparisons)
    report.notes += way.notes
    if request.keep_reference:
        expected = way.reference(report.inputs)
        report.outputs = report.outputs | {f"{name}.reference": x for name, x in expected.items()}
    return report


def windows_of(source: SourceModel) -> list[WindowView]:
    """The windows of a checkpoint's attention layers."""
    length = source.shapes.seq_len
    if source.geometry is None:
        return bias_views(source.class_name, source.window_size, source.shapes.causal, length)
    names = [f"layer {index + 1}" for index in range(source.depth)] if source.depth > 1 else [source.class_name]
    return views([(name, source.geometry) for name in names], length)


def _way(session: Session, source: SourceModel, dtype: str, sidecar: Sidecar | None) -> Way:
    if sidecar is not None and sidecar.step is not None:
        return StepByStep(session, StepSource(source, sidecar.step.chunk), dtype)
    return Whole(session, source, dtype, _open_axes(session))


def _open_axes(session: Session) -> list[str]:
    sizes = {size for spec in session.inputs for size in spec.shape}
    return [name for name in (BATCH, SEQUENCE) if name in sizes]


def source_of_file(request: ParityRequest, session: Session, sidecar: Sidecar | None) -> tuple[SourceModel, list[str]]:
    """The checkpoint at the shapes of a file that takes whole sequences of one length.

    Raises:
        UsageError: some of its sizes are open, or it does not belong to the checkpoint.
    """
    if not all(isinstance(size, int) for spec in session.inputs for size in spec.shape):
        raise UsageError(f"{request.model} has open dimensions.", why="This needs a file with static shapes.")
    return _source(request, session, sidecar)


def _source(request: ParityRequest, session: Session, sidecar: Sidecar | None) -> tuple[SourceModel, list[str]]:
    """The checkpoint at the shapes of the file; at the largest where they are open, at any where it takes steps."""
    known = None
    notes = []
    if sidecar is not None:
        known = RawConfig(sidecar.class_name, sidecar.kwargs, sidecar.hyper_connections, "the sidecar")
    opened = open_checkpoint(request.against, request.config, known=known)
    if sidecar is not None and sidecar.checkpoint_sha256 != opened.loaded.sha256:
        notes.append(f"{request.against} is not the checkpoint {request.model} was exported from")
    inputs = {spec.name: spec for spec in session.inputs}
    data = session.inputs[0]
    is_attention, is_aft = "q" in inputs, "query" in inputs
    causal = request.causal
    if causal is None:
        causal = bool(sidecar is not None and sidecar.options.get("causal"))
    length: int | str | None = data.shape[2 if is_attention else 0 if is_aft else 1]
    batch = data.shape[1 if is_aft else 0]
    if isinstance(batch, str):
        batch = OPEN_BATCH if sidecar is None else sidecar.batch
    if sidecar is not None and sidecar.step is not None:  # any length that the class accepts
        length = getattr(opened.resolved.args, "window_size", 1)
    if isinstance(length, str):
        longest = None if sidecar is None else sidecar.seq_len  # None: the model's own
        if longest is not None and max(request.lengths, default=0) > longest:
            wanted = max(request.lengths)
            raise UsageError(f"--seq-len {wanted} is beyond the {longest} positions of {request.model}.")
        length = max(request.lengths, default=longest)
    shapes = ShapeRequest(
        batch=batch,
        seq_len=length,
        heads=int(data.shape[1]) if is_attention else None,
        dim_head=int(data.shape[3]) if is_attention else None,
        mask="mask" in inputs,
        attn_bias="attn_bias" in inputs,
        causal=causal,
        full_mask="full_mask" in inputs,
    )
    return opened.source(shapes), notes + opened.notes


def dtype_of_file(model: Path, session: Session, source: SourceModel, sidecar: Sidecar | None) -> str:
    """The element type a file was exported in: the sidecar's word, else its weights' or its output's."""
    if sidecar is not None:
        return sidecar.dtype
    if "bfloat16" in inspect_onnx(model).weight_bytes:
        return "bf16"
    element = next((x.dtype for x in session.outputs if x.name == source.output_name), "float32")
    return next((name for name, numpy_name in NUMPY_DTYPE.items() if numpy_name == element), "fp32")


def check_signature(session: Session, source: SourceModel, dtype: str) -> None:
    """The file must take what this checkpoint takes."""
    _check_inputs(session.inputs, source.inputs(dtype), source)


def _check_inputs(found: list[TensorSpec], wanted: list[TensorSpec], source: SourceModel) -> None:
    if wanted != found:
        raise UsageError(
            "The model and the checkpoint do not belong together.",
            why=f"The model takes {_listed(found)}; the checkpoint's {source.class_name} takes {_listed(wanted)}.",
            fix="Give the checkpoint and configuration the model was exported from.",
        )


def _listed(specs: list[Any]) -> str:
    return ", ".join(spec.describe() for spec in specs)
