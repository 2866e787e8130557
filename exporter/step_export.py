"""`export_steps`: write a checkpoint as files that run it a few tokens at a time.

A step file takes one token per call. Its companion takes chunks of a prompt and returns the same caches; both refer to
one file of weights. Everything is written to a temporary folder, checked there, and only then moved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..core.documents.sidecar import CheckRecord
from ..core.documents.step_facts import StepFacts
from ..core.error_texts import argument
from ..core.errors import UsageError
from ..core.progress import timed_steps
from ..core.storage.file_kinds import ONNX
from ..core.storage.outputs import Output, check_outputs, writing
from ..core.tensors import SEQUENCE
from ..runtime.parity.golden import Golden
from ..runtime.session import Session
from .artifact.companions import copy_companions
from .artifact.form import written_form
from .artifact.publish import Part, companion_path, finish_export
from .artifact.serialize import read_message
from .checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from .checks.golden import check_golden, open_golden
from .checks.loads import check_loads, check_model
from .checks.quadratic_memory import allowed
from .checks.steps import check_step_parity, step_runner
from .checks.wide_integers import check_wide_integers
from .export import (
    ExportReport,
    ExportRequest,
    Progress,
    check_precision,
    folder_companions,
    model_facts,
    unproven_choices,
)
from .lowering.quantize.weights import quantize_weights
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
    opened = open_checkpoint(
        asked.checkpoint, asked.config, task=asked.task, shapes=asked.shapes, steps=True, entry=asked.entry
    )
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
        checks = _Checks(asked, _golden(asked, files), progress)
        prefill = next((path.name for path in files if path != asked.output), None)
        parts = []
        for path, source in files.items():
            progress(f"Tracing the model, {source.chunk} token(s) a call")
            model = trace_step(source, asked.dtype, asked.opset)
            if asked.weights is not None:
                model = quantize_weights(model, asked.weights)
            form = written_form(model, step_nodes(model), asked)
            mode: Mode = request.mode if path == asked.output else "prefill"
            facts = source.facts(asked.dtype, mode=mode, prefill=prefill if path == asked.output else None)
            describe = partial(_facts, asked, opened, source, facts)
            parts.append(Part(path, form, check=partial(checks.run, source), describe=describe))
        sidecar, *others = finish_export(parts, folder, asked, progress)
        copied = copy_companions(beside, asked.output, folder)
    chosen = unproven_choices(opened, sidecar)
    reports = [ExportReport(asked.output, sidecar, opened.notes, copied=copied, chosen=chosen)]
    return reports + [ExportReport(part.path, other, []) for part, other in zip(parts[1:], others, strict=True)]


def _golden(asked: ExportRequest, files: Mapping[Path, StepSource]) -> Golden | None:
    """Open the golden outputs of whole sequences that the files will be compared with, call by call."""
    source = files[asked.output]
    limits = (source.chunk, source.max_positions)
    inputs = source.data(asked.dtype, SEQUENCE)
    outputs, tokens = source.source.outputs, source.source.token_limit
    return open_golden(asked.golden, inputs, outputs, tokens, lambda name, axis: limits)


@dataclass
class _Checks:
    """The checks of the files of one export, the step file first.

    Args:
        asked: the export.
        golden: golden outputs to compare with, if there are any.
        progress: called with the name of each step as it begins.
        step: the session of the step file once it is open; it continues where its companion's chunks end.
    """

    asked: ExportRequest
    golden: Golden | None
    progress: Progress
    step: Session | None = None

    def run(self, source: StepSource, staged: Path) -> Iterator[CheckRecord]:
        """Run each check of a file, cheapest first."""
        asked = self.asked
        yield check_model(staged)
        record, session = check_loads(staged)
        yield record
        if self.golden is not None:
            self.progress(f"Checking: {staged.name} with golden outputs")
            fed = step_runner(session, source, asked.dtype, self.step, 0)
            yield check_golden(fed, self.golden, asked.tolerance, asked.precision, source.source)
        self.progress(f"Checking: {staged.name} token by token against the float64 reference")
        yield check_step_parity(session, source, asked.dtype, asked.tolerance(asked.precision), self.step)
        if source.chunk == 1:
            self.step = session
        wide = check_wide_integers(read_message(staged), staged.parent, source.integer_limits(asked.dtype))
        yield allowed(wide, asked.allow_wide_integers)


def _facts(
    asked: ExportRequest, opened: OpenedCheckpoint, source: StepSource, step: StepFacts, checks: Sequence[CheckRecord]
) -> dict[str, Any]:
    """Return what the sidecar records about the model, with what differs from a whole-sequence file's."""
    own = {"inputs": source.inputs(asked.dtype), "seq_len": source.chunk, "step": step}
    return model_facts(asked, opened, source.source, checks) | own
