"""`parity`: compare an exported file with the float64 reference of its checkpoint, over a sweep of inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.documents.sidecar import Sidecar, class_title
from ..core.error_texts import argument
from ..core.errors import UsageError
from ..core.progress import timed_steps
from ..core.tensors import BATCH, POSITION_IDS, SEQUENCE, TensorSpec
from ..onnx_graph.windows import windows_of_sidecar
from ..runtime.inputs.size_sweep import OPEN_BATCH
from ..runtime.parity.compare import compare_models
from ..runtime.parity.files import was_proven
from ..runtime.parity.golden import Golden, GoldenSample
from ..runtime.parity.report import FLOAT64, ParityReport, ParityRequest, altered
from ..runtime.parity.runner import FileRunner, StepRunner, open_runner
from .checkpoint.config import RawConfig
from .checkpoint.open_checkpoint import open_checkpoint
from .checks.golden import tried
from .checks.steps import whole_sequence
from .options import ShapeRequest
from .source.reference_runner import ReferenceRunner
from .source.source_model import SourceModel, signature
from .source.step_source import StepSource
from .source.untouched_module import untouched_module
from .user_module.golden_causes import causes_in
from .user_module.of_file import OwnReference, is_own_module, notes_on_weights, own_module

_log = logging.getLogger(__name__)


@timed_steps(_log)
def run_parity(request: ParityRequest, progress: Callable[[str], None] = lambda _: None) -> ParityReport:
    """Run the file and the float64 reference on the same inputs, and compare their outputs.

    Raises:
        UsageError: a file that cannot be read, or that does not belong to the checkpoint.
        CheckFailed: an output is missing or has another shape than the reference.
        MissingDependency: onnxruntime, or the provider asked for, is not installed.
    """
    progress("Loading the model")
    candidate = open_runner(
        request.model,
        request.provider,
        request.plugin,
        prefill=False,
        runtime=request.runtime,
        rounds=request.rounds,
    )
    if request.factory is not None or is_own_module(candidate.sidecar):
        return _own_parity(request, candidate, progress)
    source, notes = source_of_file(request, candidate)
    if isinstance(candidate, StepRunner):
        if request.lengths:
            raise UsageError(
                f"{argument('seq_len')} does not apply to a step file.",
                why="It is fed as many tokens as show that its caches are right.",
                fix=f"Leave it out, or give the tokens in a file: {argument('inputs')}.",
            )
        step = StepSource(source, candidate.record.chunk)
        check_signature(candidate, source, step.inputs(candidate.dtype))
        reference = ReferenceRunner(whole_sequence(step), candidate.dtype, few_sequences=True)
    else:
        reference = ReferenceRunner(source, candidate.dtype, dynamic_axes(candidate), samples=True)
        check_signature(candidate, source, reference.inputs)
    notes += [*altered(candidate.file), *candidate.notes]
    unproven = () if was_proven(candidate) else source.not_in_weights
    module = partial(untouched_module, reference.source, candidate.precision)
    windows = reference.source.window_views()
    report = compare_models(request, candidate, reference, FLOAT64, windows, notes, progress, module, unproven)
    _explain(report, request, candidate, partial(tried, source), progress)
    return report


def _own_parity(request: ParityRequest, candidate: FileRunner, progress: Callable[[str], None]) -> ParityReport:
    """Compare a file with the user's own untouched module."""
    progress("Making the module")
    weights = None if str(request.against) == request.factory else request.against
    module, origin = own_module(
        request.model, candidate.sidecar, request.factory, request.factory_args, weights, request.entry, "parity"
    )
    reference = OwnReference(module, candidate)
    notes = [*notes_on_weights(request.model, candidate.sidecar, origin), *reference.notes]
    notes += [*altered(candidate.file), *candidate.notes]
    windows, baseline = windows_of_sidecar(candidate.sidecar), reference.baseline(candidate.precision)
    report = compare_models(request, candidate, reference, FLOAT64, windows, notes, progress, baseline)
    _explain(report, request, candidate, causes_in(reference), progress)
    return report


def _explain(
    report: ParityReport,
    request: ParityRequest,
    candidate: FileRunner,
    causes: Callable[[GoldenSample], str],
    progress: Callable[[str], None],
) -> None:
    """Try what would explain golden outputs that differ, and note it in the report."""
    if request.golden is None or report.golden is None or report.golden.status != "failed":
        return
    progress("Trying other arguments")
    samples = Golden.read(request.golden).bind(candidate.inputs, candidate.outputs)
    report.fits = causes(next(iter(samples)))


def dynamic_axes(candidate: FileRunner) -> list[str]:
    """List the dynamic axes of a file's inputs, of those that a checkpoint has."""
    sizes = {size for spec in candidate.inputs for size in spec.shape}
    return [name for name in (BATCH, SEQUENCE) if name in sizes]


def source_of_file(request: ParityRequest, candidate: FileRunner) -> tuple[SourceModel, list[str]]:
    """Open the checkpoint at the shapes of the file.

    Dynamic sizes are taken at their largest; for a step or chunk file any length the class accepts is taken.

    Raises:
        UsageError: the file does not belong to the checkpoint, or does not accept the requested lengths.
    """
    sidecar, known, notes = candidate.sidecar, None, []
    if sidecar is not None:
        known = RawConfig(sidecar.class_name, sidecar.kwargs, sidecar.hyper_connections, "the sidecar")
    entry = request.entry
    if entry is None and sidecar is not None and request.against.name == sidecar.checkpoint_name:
        entry = sidecar.options.get("entry")
    opened = open_checkpoint(request.against, request.config, known=known, entry=entry)
    if sidecar is not None and sidecar.checkpoint_sha256 != opened.loaded.sha256:
        notes.append(f"{request.against} is not the checkpoint {request.model} was exported from")
    inputs = {spec.name: spec for spec in candidate.signature}
    stepwise = sidecar is not None and sidecar.step is not None
    optional = {name: name in inputs for name in ("mask", "attn_bias", "full_mask", POSITION_IDS)}
    wanted = signature(opened.resolved.class_name, opened.resolved.args, **optional)
    caches = {spec.name for spec in candidate.signature} - {spec.name for spec in wanted} if stepwise else set()
    title = class_title(opened.resolved.class_name, opened.resolved.args.model_dump(include={"architecture"}))
    ranks = [(spec.name, len(spec.shape)) for spec in candidate.signature if spec.name not in caches]
    if ranks != [(spec.name, len(spec.shape)) for spec in wanted]:
        raise _other_inputs(candidate.signature, wanted, title)
    # By name, the file's sizes where the class leaves the size to the file.
    sizes = {
        size: inputs[spec.name].shape[axis]
        for spec in reversed(wanted)
        for axis, size in enumerate(spec.shape)
        if isinstance(size, str)
    }
    if not all(isinstance(sizes.get(name, 1), int) for name in ("heads", "dim_head")):
        raise _other_inputs(candidate.signature, wanted, title, "There heads and dim_head are fixed numbers.")
    if stepwise:  # any length that the class accepts
        sizes[SEQUENCE] = getattr(opened.resolved.args, "window_size", 1)
    shapes = replace(_shapes(request, sidecar, sizes), **optional)
    opened.resolved.check_keys()
    try:
        return opened.source(shapes), [*notes, *opened.warnings, *opened.notes]
    except UsageError as error:
        if not all(isinstance(size, int) for spec in candidate.signature for size in spec.shape):
            raise
        raise _other_inputs(candidate.signature, wanted, title, error.what) from error


def _shapes(request: ParityRequest, sidecar: Sidecar | None, sizes: Mapping[str, int | str]) -> ShapeRequest:
    """Return the shapes to compare at.

    Args:
        request: the request.
        sidecar: the sidecar next to the file, if there are any.
        sizes: the file's batch and seq, a name where one is dynamic; where its inputs have them, heads and dim_head.

    Raises:
        UsageError: a length is asked for that the file does not take.
    """
    fixed = {name: size for name, size in sizes.items() if isinstance(size, int)}
    causal = request.causal
    if causal is None:
        causal = bool(sidecar is not None and sidecar.options.get("causal"))
    return ShapeRequest(
        batch=fixed.get(BATCH, OPEN_BATCH if sidecar is None else sidecar.batch),
        seq_len=fixed[SEQUENCE] if SEQUENCE in fixed else _longest(request, sidecar),
        heads=fixed.get("heads"),
        dim_head=fixed.get("dim_head"),
        causal=causal,
    )


def _longest(request: ParityRequest, sidecar: Sidecar | None) -> int | None:
    """Return the longest sequence to compare for a file with a dynamic length; None for the model's own."""
    longest, wanted = None if sidecar is None else sidecar.seq_len, max(request.lengths, default=None)
    if longest is not None and wanted is not None and wanted > longest:
        raise UsageError(f"{argument('seq_len', wanted)} is beyond the {longest} positions of {request.model}.")
    return longest if wanted is None else wanted


def check_signature(candidate: FileRunner, source: SourceModel, wanted: Sequence[TensorSpec]) -> None:
    """Refuse a file whose inputs differ from this checkpoint's.

    Raises:
        UsageError: the inputs differ; the text lists both.
    """
    if list(candidate.signature) != list(wanted):
        raise _other_inputs(candidate.signature, wanted, source.title)


def _other_inputs(
    found: Sequence[TensorSpec], wanted: Sequence[TensorSpec], title: str, detail: str = ""
) -> UsageError:
    return UsageError(
        "The model and the checkpoint do not belong together.",
        why=f"The model takes {_listed(found) or 'nothing'}; the checkpoint's {title} takes {_listed(wanted)}. "
        f"{detail}".rstrip(),
        fix="Give the checkpoint and configuration the model was exported from.",
    )


def _listed(specs: Sequence[Any]) -> str:
    return ", ".join(spec.describe() for spec in specs)
