"""`export_steps`: write a checkpoint as files that run it a few tokens at a time.

A step file takes one token per call. Its companion takes chunks of a prompt and returns the same caches; both refer to
one file of weights. Everything is written to a temporary folder, checked there, and only then moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from ..core.documents.sidecar import CheckRecord, Sidecar
from ..core.error_texts import argument
from ..core.errors import UsageError
from ..core.progress import timed_steps
from ..core.storage.file_kinds import ONNX
from ..core.storage.outputs import Output, check_outputs, writing
from ..core.tensors import SEQUENCE
from ..runtime.parity.golden import Golden
from ..runtime.session import Session
from .artifact.companions import copy_companions
from .artifact.form import WrittenForm, written_form
from .artifact.publish import (
    check_without_body,
    companion_path,
    demand,
    drop_attention_functions,
    publish_models,
    save_model,
)
from .artifact.serialize import read_message
from .checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from .checks.golden import check_golden, open_golden
from .checks.loads import check_loads, check_model
from .checks.quadratic_memory import allowed
from .checks.steps import check_step_parity, step_runner
from .checks.wide_integers import check_wide_integers
from .export import ExportReport, ExportRequest, Progress, check_precision, folder_companions, sidecar_of
from .lowering.quantize.weights import quantize_weights
from .lowering.shared_weights import share_weights
from .lowering.trace import check_opset, step_nodes, trace_step
from .source.step_source import StepSource, largest_chunk

_log = logging.getLogger(__name__)

DEFAULT_CHUNK = 64

Mode = Literal["step", "prefill"]


@dataclass(frozen=True)
class StepRequest:
    """What to export as a step graph.

    Args:
        export: checkpoint, output, batch and options of the export; its `seq_len` is not used.
        mode: "step" for a step file with its companion, "prefill" for a chunk file alone.
        chunk: tokens per call of the chunk file; 1 with mode "step": no companion. By default 64, or fewer if the
            model has few positions or its xpos decays fast.
    """

    export: ExportRequest
    mode: Mode = "step"
    chunk: int | None = None


@dataclass
class _Part:
    """One of the files to write."""

    mode: Mode
    source: StepSource
    path: Path
    form: WrittenForm
    data: str | None = None
    staged: Path = Path()
    checks: tuple[CheckRecord, ...] = ()


def open_steps(request: StepRequest) -> tuple[OpenedCheckpoint, dict[Path, StepSource]]:
    """Open the checkpoint and the files to write, and refuse a request that cannot succeed, before work begins.

    Raises:
        UsageError: the request or one of its files cannot be used, or the model cannot stream.
    """
    asked = request.export
    check_precision(asked)
    check_opset(asked.opset)
    for option, given in (("seq_len", asked.shapes.seq_len is not None), ("dynamic", bool(asked.dynamic))):
        if given:
            raise UsageError(
                f"{argument(option)} does not apply to {argument('mode', request.mode)}.",
                why="A step file takes a fixed number of tokens a call, and any number of calls.",
                fix=f"Leave {argument(option)} out.",
            )
    opened = open_checkpoint(asked.checkpoint, asked.config, task=asked.task, shapes=asked.shapes, steps=True)
    opened = opened.for_steps(asked.shapes)
    # Any length the class accepts, because the files do not depend on it.
    some_length = getattr(opened.resolved.args, "window_size", 1)
    source = opened.source(replace(asked.shapes, seq_len=some_length))
    step = StepSource(source, 1)
    chunk = request.chunk
    if chunk is None:
        half = (step.max_positions + 1) // 2
        chunk = min(limit for limit in (DEFAULT_CHUNK, half, largest_chunk(source)) if limit is not None)
    chunked = StepSource(source, chunk)
    if request.mode == "prefill":
        files = {asked.output: chunked}
    else:
        files = {asked.output: step} | ({companion_path(asked.output): chunked} if chunk > 1 else {})
    check_outputs(_outputs(files), inputs=asked.inputs, overwrite=asked.overwrite)
    return opened, files


def _outputs(files: Iterable[Path]) -> list[Output]:
    """List the outputs to write, the requested file last."""
    return [Output(path, ONNX) for path in reversed(list(files))]


@timed_steps(_log)
def export_steps(request: StepRequest, progress: Progress = lambda _: None) -> list[ExportReport]:
    """Export, check and publish the files; the report on the requested file comes first, then its companion's.

    Args:
        request: what to export.
        progress: called with the name of each step as it begins.

    Raises:
        UsageError: the request or one of its files cannot be used, or the model cannot stream.
        ExportFailed: a graph could not be made.
        CheckFailed: a check found a fault; nothing was written.
    """
    progress("Reading the checkpoint")
    opened, files = open_steps(request)
    asked = request.export
    with writing(*_outputs(files), inputs=asked.inputs, overwrite=asked.overwrite) as folder:
        beside = folder_companions(asked, files[asked.output].source)
        golden = _golden(asked, files)
        parts = []
        for path, source in files.items():
            mode: Mode = request.mode if path == asked.output else "prefill"
            progress(f"Tracing the model, {source.chunk} token(s) a call")
            model = trace_step(source, asked.dtype, asked.opset)
            if asked.weights is not None:
                model = quantize_weights(model, asked.weights)
            parts.append(_Part(mode, source, path, written_form(model, step_nodes(model), asked)))
        shared = (
            share_weights([part.form.model for part in parts], folder, asked.output.name) if len(parts) > 1 else None
        )
        for part in parts:
            part.staged = folder / part.path.name
            part.data = save_model(part.form.model, part.staged, asked.external_data_from) if shared is None else shared
            if shared is not None:
                ir.save(part.form.model, part.staged)
        _check(parts, asked, progress, golden)
        if not asked.function_body:
            progress("Removing the function definition")
            _remove_functions(parts, asked, shared)
        progress("Writing")
        reports = [
            ExportReport(part.path, _sidecar(part, parts, asked, opened), opened.notes if part is parts[0] else [])
            for part in parts
        ]
        finished = [
            (part.staged, report.sidecar, part.path)
            for part, report in zip(reversed(parts), reversed(reports), strict=True)
        ]
        publish_models(finished, sorted({part.data for part in parts if part.data is not None}))
        reports[0].copied.extend(copy_companions(beside, asked.output, folder))
    return reports


def _golden(asked: ExportRequest, files: Mapping[Path, StepSource]) -> Golden | None:
    """Open the golden outputs of whole sequences that the files will be compared with, call by call."""
    source = files[asked.output]
    limits = (source.chunk, source.max_positions)
    inputs = source.data(asked.dtype, SEQUENCE)
    outputs, tokens = source.source.outputs, source.source.token_limit
    return open_golden(asked.golden, inputs, outputs, tokens, lambda name, axis: limits)


def _check(parts: list[_Part], asked: ExportRequest, progress: Callable[[str], None], golden: Golden | None) -> None:
    """Run every check of every file.

    Raises:
        CheckFailed: a check failed; the later ones are not run.
    """
    tolerance = asked.tolerance(asked.precision)
    sessions: dict[int, Session] = {}

    def run(part: _Part) -> Iterator[CheckRecord]:
        yield check_model(part.staged)
        record, session = check_loads(part.staged)
        yield record
        then = sessions.get(1) if part.source.chunk > 1 else None
        if golden is not None:
            progress(f"Checking: {part.path.name} with golden outputs")
            fed = step_runner(session, part.source, asked.dtype, then, 0)
            yield check_golden(fed, golden, asked.tolerance, asked.precision, part.source.source)
        progress(f"Checking: {part.path.name} token by token against the float64 reference")
        sessions[part.source.chunk] = session
        yield check_step_parity(session, part.source, asked.dtype, tolerance, then)
        limits = part.source.integer_limits(asked.dtype)
        wide = check_wide_integers(read_message(part.staged), part.staged.parent, limits)
        yield allowed(wide, asked.allow_wide_integers)

    for part in parts:
        part.checks = tuple(demand(run(part)))


def _remove_functions(parts: list[_Part], asked: ExportRequest, shared: str | None) -> None:
    for part in parts:
        drop_attention_functions(part.form.model)
        if shared is None:
            part.data = save_model(part.form.model, part.staged, asked.external_data_from)
        else:
            ir.save(part.form.model, part.staged)
        part.checks = (*part.checks, check_without_body(part.staged))


def _sidecar(part: _Part, parts: list[_Part], asked: ExportRequest, opened: OpenedCheckpoint) -> Sidecar:
    """Build the sidecar of one file, with the facts that differ from a whole-sequence file's."""
    companions = [other.path.name for other in parts if part.mode == "step" and other.mode == "prefill"]
    return sidecar_of(
        asked,
        opened,
        part.source.source,
        part.form,
        part.staged,
        part.data,
        part.checks,
        inputs=part.source.inputs(asked.dtype),
        seq_len=part.source.chunk,
        step=part.source.facts(asked.dtype, mode=part.mode, prefill=companions[0] if companions else None),
    )
