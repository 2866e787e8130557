"""`parity`: an exported file beside the float64 reference of its checkpoint, over a sweep of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.documents.sidecar import Sidecar
from ..core.documents.window_view import WindowView, bias_views, views
from ..core.errors import UsageError
from ..core.tensors import TensorSpec
from ..runtime.inputs.size_sweep import OPEN_BATCH
from ..runtime.parity.compare import compare_models
from ..runtime.parity.report import ORACLE, ParityReport, ParityRequest, altered
from ..runtime.parity.runner import FileRunner, StepRunner, open_runner
from .checkpoint.config import RawConfig
from .checkpoint.open_checkpoint import open_checkpoint
from .checks.steps import whole_sequence
from .models.family import ShapeRequest
from .source.dynamic_axes import BATCH, SEQUENCE
from .source.reference_runner import ReferenceRunner
from .source.source_model import SourceModel, signature
from .source.step_source import StepSource


def run_parity(request: ParityRequest, progress: Callable[[str], None] = lambda _: None) -> ParityReport:
    """Run the file and the float64 reference on the same inputs.

    Raises:
        UsageError: a file that cannot be read, or that does not belong to the checkpoint.
        CheckFailed: an output is missing or has another shape than the reference.
        MissingDependency: onnxruntime, or the provider asked for, is not there.
    """
    progress("Loading the model")
    candidate = open_runner(request.model, request.provider, request.plugin, prefill=False)
    source, notes = source_of_file(request, candidate)
    if isinstance(candidate, StepRunner):
        if request.lengths:
            raise UsageError(
                "--seq-len does not apply to a step file.",
                why="It is fed as many tokens as show that its caches are right.",
                fix="Leave it out, or give the tokens with --load-inputs.",
            )
        step = StepSource(source, candidate.facts.chunk)
        check_signature(candidate, source, step.inputs(candidate.dtype))
        reference = ReferenceRunner(whole_sequence(step), candidate.dtype, few_sequences=True)
    else:
        reference = ReferenceRunner(source, candidate.dtype, _open_axes(candidate), samples=True)
        check_signature(candidate, source, reference.inputs)
    notes += [*altered(candidate.file), *candidate.notes]
    return compare_models(request, candidate, reference, ORACLE, _windows(reference.source), notes, progress)


def _windows(source: SourceModel) -> list[WindowView]:
    """The windows of a checkpoint's attention layers."""
    length = source.shapes.seq_len
    if source.geometry is None:
        return bias_views(source.class_name, source.window_size, source.shapes.causal, length)
    names = [f"layer {index + 1}" for index in range(source.depth)] if source.depth > 1 else [source.class_name]
    return views([(name, source.geometry) for name in names], length)


def _open_axes(candidate: FileRunner) -> list[str]:
    sizes = {size for spec in candidate.inputs for size in spec.shape}
    return [name for name in (BATCH, SEQUENCE) if name in sizes]


def source_of_file(request: ParityRequest, candidate: FileRunner) -> tuple[SourceModel, list[str]]:
    """The checkpoint at the shapes of the file; at the largest where they are dynamic, at any where it takes steps.

    Raises:
        UsageError: the file does not belong to the checkpoint, or lengths are asked for that it does not have.
    """
    sidecar, known, notes = candidate.sidecar, None, []
    if sidecar is not None:
        known = RawConfig(sidecar.class_name, sidecar.kwargs, sidecar.hyper_connections, "the sidecar")
    opened = open_checkpoint(request.against, request.config, known=known)
    if sidecar is not None and sidecar.checkpoint_sha256 != opened.loaded.sha256:
        notes.append(f"{request.against} is not the checkpoint {request.model} was exported from")
    inputs = {spec.name: spec for spec in candidate.signature}
    stepwise = sidecar is not None and sidecar.step is not None
    wanted = signature(
        opened.resolved.class_name, opened.resolved.args, *(x in inputs for x in ("mask", "attn_bias", "full_mask"))
    )
    caches = {spec.name for spec in candidate.signature} - {spec.name for spec in wanted} if stepwise else set()
    ranks = [(spec.name, len(spec.shape)) for spec in candidate.signature if spec.name not in caches]
    if ranks != [(spec.name, len(spec.shape)) for spec in wanted]:
        raise _other_inputs(candidate.signature, wanted, opened.resolved.class_name)
    data = candidate.signature[0]
    is_attention, is_aft = "q" in inputs, "query" in inputs
    causal = request.causal
    if causal is None:
        causal = bool(sidecar is not None and sidecar.options.get("causal"))
    length: int | str | None = data.shape[2 if is_attention else 0 if is_aft else 1]
    batch = data.shape[1 if is_aft else 0]
    if isinstance(batch, str):
        batch = OPEN_BATCH if sidecar is None else sidecar.batch
    if stepwise:  # any length that the class accepts
        length = getattr(opened.resolved.args, "window_size", 1)
    if isinstance(length, str):
        length = _longest(request, sidecar)
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
    opened.resolved.check_keys()
    try:
        return opened.source(shapes), notes + opened.notes
    except UsageError as error:
        if not all(isinstance(size, int) for spec in candidate.signature for size in spec.shape):
            raise
        raise _other_inputs(candidate.signature, wanted, opened.resolved.class_name, error.what) from error


def _longest(request: ParityRequest, sidecar: Sidecar | None) -> int | None:
    """The longest sequence that is compared of a file with a dynamic length; None: the model's own."""
    longest, wanted = None if sidecar is None else sidecar.seq_len, max(request.lengths, default=None)
    if longest is not None and wanted is not None and wanted > longest:
        raise UsageError(f"--seq-len {wanted} is beyond the {longest} positions of {request.model}.")
    return longest if wanted is None else wanted


def check_signature(candidate: FileRunner, source: SourceModel, wanted: Sequence[TensorSpec]) -> None:
    """Refuse a file that does not take what this checkpoint takes.

    Raises:
        UsageError: they differ; the text lists both.
    """
    if list(candidate.signature) != list(wanted):
        raise _other_inputs(candidate.signature, wanted, source.class_name)


def _other_inputs(
    found: Sequence[TensorSpec], wanted: Sequence[TensorSpec], class_name: str, detail: str = ""
) -> UsageError:
    return UsageError(
        "The model and the checkpoint do not belong together.",
        why=f"The model takes {_listed(found) or 'nothing'}; the checkpoint's {class_name} takes {_listed(wanted)}. "
        f"{detail}".rstrip(),
        fix="Give the checkpoint and configuration the model was exported from.",
    )


def _listed(specs: Sequence[Any]) -> str:
    return ", ".join(spec.describe() for spec in specs)
