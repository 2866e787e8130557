"""`export_steps`: from a checkpoint to the files that run it a few tokens at a time.

A step file takes one token a call. Its companion takes chunks of a prompt and leaves the same caches; both refer
to one file of weights. Everything is written to a temporary folder, checked there, and only then moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from ..core.documents.sidecar import CheckRecord, Sidecar
from ..core.errors import UsageError
from ..core.storage.file_kinds import ONNX
from ..core.storage.outputs import Output, check_outputs, writing
from ..runtime.session import Session
from .artifact.publish import demand, drop_attention_bodies, output_specs, publish_models, save_model, window_facts
from .checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from .checks.loads import check_loads, check_model
from .checks.steps import check_step_parity
from .export import ExportReport, ExportRequest, Progress, check_precision, sidecar_of
from .lowering.quantize import quantize_weights
from .lowering.shared_weights import share_weights
from .lowering.trace import check_opset
from .lowering.trace_step import step_nodes, trace_step
from .source.step_source import StepSource, largest_chunk

DEFAULT_CHUNK = 64

Mode = Literal["step", "prefill"]


@dataclass(frozen=True)
class StepRequest:
    """What to export as a step graph.

    Args:
        export: checkpoint, output, batch and options of the export; its `seq_len` stays open.
        mode: "step" for a step file with its companion, "prefill" for a chunk file alone.
        chunk: tokens a call of the chunk file; 1 with mode "step": no companion. By default 64, or
            fewer where the model has few positions or a steep xpos.
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
    model: ir.Model
    data: str | None = None
    staged: Path = Path()
    checks: tuple[CheckRecord, ...] = ()


def companion_path(step: Path) -> Path:
    """Where the chunk file of a step file lies: `model_step.onnx` → `model_step.prefill.onnx`."""
    return step.with_name(f"{step.stem}.prefill{step.suffix}")


def open_steps(request: StepRequest) -> tuple[OpenedCheckpoint, dict[Path, StepSource]]:
    """Everything that can be refused before work begins: the checkpoint, and the files to write.

    Raises:
        UsageError: the request or one of its files cannot be used, or the model cannot stream.
    """
    asked = request.export
    check_precision(asked)
    check_opset(asked.opset)
    for option, given in (("--seq-len", asked.shapes.seq_len is not None), ("--dynamic", bool(asked.dynamic))):
        if given:
            raise UsageError(
                f"{option} does not apply to --mode {request.mode}.",
                why="A step file takes a fixed number of tokens a call, and any number of calls.",
                fix=f"Leave {option} out.",
            )
    sizes = {"heads": asked.shapes.heads, "dim_head": asked.shapes.dim_head}
    opened = open_checkpoint(asked.checkpoint, asked.config, {k: v for k, v in sizes.items() if v is not None})
    # Any length the class accepts: the files do not depend on it.
    some_length = getattr(opened.resolved.args, "window_size", 1)
    source = opened.source(replace(asked.shapes, seq_len=some_length))
    step = StepSource(source, 1)
    chunk = request.chunk
    if chunk is None:
        half = None if step.max_positions is None else (step.max_positions + 1) // 2
        chunk = min(limit for limit in (DEFAULT_CHUNK, half, largest_chunk(source)) if limit is not None)
    chunked = StepSource(source, chunk)
    if request.mode == "prefill":
        files = {asked.output: chunked}
    else:
        files = {asked.output: step} | ({companion_path(asked.output): chunked} if chunk > 1 else {})
    check_outputs(_outputs(files), inputs=asked.inputs, overwrite=asked.overwrite)
    return opened, files


def _outputs(files: Iterable[Path]) -> list[Output]:
    """What is written, the file asked for last."""
    return [Output(path, ONNX) for path in reversed(list(files))]


def export_steps(request: StepRequest, progress: Progress = lambda _: None) -> list[ExportReport]:
    """Export, check, publish; the file asked for comes first, then its companion.

    Args:
        request: what to export.
        progress: told each step as it begins.

    Raises:
        UsageError: the request or one of its files cannot be used, or the model cannot stream.
        ExportFailed: a graph could not be made.
        CheckFailed: a check found a fault; nothing was written.
    """
    progress("Reading the checkpoint")
    opened, files = open_steps(request)
    asked = request.export
    with writing(*_outputs(files), inputs=asked.inputs, overwrite=asked.overwrite) as folder:
        parts = []
        for path, source in files.items():
            mode: Mode = request.mode if path == asked.output else "prefill"
            progress(f"Tracing the model, {source.chunk} token(s) a call")
            model = trace_step(source, asked.dtype, asked.opset)
            parts.append(_Part(mode, source, path, model if asked.weights is None else quantize_weights(model)))
        shared = share_weights([part.model for part in parts], folder, asked.output.name) if len(parts) > 1 else None
        for part in parts:
            part.staged = folder / part.path.name
            part.data = save_model(part.model, part.staged, asked.external_data_from) if shared is None else shared
            if shared is not None:
                ir.save(part.model, part.staged)
        _check(parts, asked, progress)
        if not asked.function_body:
            progress("Removing the function body")
            _remove_bodies(parts, asked, shared)
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
    return reports


def _check(parts: list[_Part], asked: ExportRequest, progress: Callable[[str], None]) -> None:
    """Every check of every file.

    Raises:
        CheckFailed: the first that fails.
    """
    tolerance = asked.tolerance(asked.precision)
    sessions: dict[int, Session] = {}

    def run(part: _Part) -> Iterator[CheckRecord]:
        yield check_model(part.staged)
        record, session = check_loads(part.staged)
        yield record
        progress(f"Checking: {part.path.name} token by token against the float64 reference")
        then = sessions.get(1) if part.source.chunk > 1 else None
        sessions[part.source.chunk] = session
        yield check_step_parity(session, part.source, asked.dtype, tolerance, then)

    for part in parts:
        part.checks = tuple(demand(run(part)))


def _remove_bodies(parts: list[_Part], asked: ExportRequest, shared: str | None) -> None:
    for part in parts:
        drop_attention_bodies(part.model)
        if shared is None:
            part.data = save_model(part.model, part.staged, asked.external_data_from)
        else:
            ir.save(part.model, part.staged)
        bare = {"name": "onnx checker, no body", "detail": "checked above with the body attached"}
        part.checks = (*part.checks, check_model(part.staged).model_copy(update=bare))


def _sidecar(part: _Part, parts: list[_Part], asked: ExportRequest, opened: OpenedCheckpoint) -> Sidecar:
    """The facts of one file; those of a whole-sequence file do not fit it."""
    companions = [other.path.name for other in parts if part.mode == "step" and other.mode == "prefill"]
    return sidecar_of(
        asked,
        opened,
        part.source.source,
        part.model,
        part.staged,
        part.data,
        list(part.checks),
        inputs=part.source.inputs(asked.dtype),
        outputs=output_specs(part.model),
        seq_len=part.source.chunk,
        windows=[window_facts(node) for node in step_nodes(part.model)],
        step=part.source.facts(asked.dtype, mode=part.mode, prefill=companions[0] if companions else None),
    )
