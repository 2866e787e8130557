"""`export_steps`: write a checkpoint as files that run it a few tokens at a time.

A step file takes one token per call. Its companion takes chunks of a prompt and returns the same caches; both refer to
one file of weights. Everything is written to a temporary folder, checked there, and only then moved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
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
from .checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from .checks.checked_file import ExportedFile
from .checks.golden import check_golden, open_golden
from .checks.judged import Judged
from .checks.steps import check_step_parity, step_runner
from .checks.wide_integers import check_wide_integers
from .export import ExportReport, ExportRequest, Progress, check_precision, folder_companions, model_facts
from .lowering.quantize.on_text import rounding_on_text
from .lowering.quantize.weights import quantize_weights
from .lowering.trace import check_opset, step_nodes, trace_step
from .source.step_source import StepSource, largest_chunk
from .source.tokens import tokens_of

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
        golden, sessions = _golden(asked, files), dict[int, _StepFile]()
        prefill = next((path.name for path in files if path != asked.output), None)
        parts = []
        rounding = rounding_on_text(asked.weights, files[asked.output].source, asked.checkpoint)
        for path, source in files.items():
            progress(f"Tracing the model, {source.chunk} token(s) a call")
            model = trace_step(source, asked.dtype, asked.opset)
            if asked.weights is not None:
                model = quantize_weights(model, asked.weights, rounding)
            form = written_form(model, step_nodes(model), asked)
            mode: Mode = request.mode if path == asked.output else "prefill"
            facts = source.facts(asked.dtype, mode=mode, prefill=prefill if path == asked.output else None)
            describe = partial(_facts, asked, opened, source, facts)
            checked = partial(
                _StepFile, source=source, asked=asked, golden=golden, progress=progress, sessions=sessions
            )
            parts.append(Part(path, form, checked=checked, describe=describe))
        sidecar, *others = finish_export(parts, folder, asked, progress)
        copied = copy_companions(beside, asked.output, folder)
    notes = [*opened.notes, *([] if rounding is None else rounding.notes)]
    reports = [ExportReport(asked.output, sidecar, notes, copied=copied, doubts=tuple(opened.warnings))]
    return reports + [ExportReport(part.path, other, []) for part, other in zip(parts[1:], others, strict=True)]


def _golden(asked: ExportRequest, files: Mapping[Path, StepSource]) -> Golden | None:
    """Open the golden outputs of whole sequences that the files will be compared with, call by call."""
    source = files[asked.output]
    limits = (source.chunk, source.max_positions)
    inputs = source.data(asked.dtype, SEQUENCE)
    outputs, tokens = source.source.outputs, source.source.token_limit
    return open_golden(asked.golden, inputs, outputs, tokens, lambda name, axis: limits)


class _StepFile(ExportedFile):
    """The written file of a checkpoint that takes a few tokens a call.

    Args:
        path: the file.
        source: what it computes.
        asked: the export.
        golden: golden outputs of whole sequences, if there are any.
        progress: called with the name of each check as it begins.
        sessions: the open files of the export by tokens a call; the step file continues where chunks end.
    """

    kind = "steps"

    def __init__(
        self,
        path: Path,
        source: StepSource,
        asked: ExportRequest,
        golden: Golden | None,
        progress: Progress,
        sessions: dict[int, _StepFile],
    ) -> None:
        super().__init__(path, asked, lambda step: progress(f"{step}, {path.name}"))
        self._source, self._asked, self.golden, self._sessions = source, asked, golden, sessions
        self.judged: Judged | None = None
        sessions[source.chunk] = self

    @property
    def _then(self) -> Session | None:
        """The session of the step file, for a file that takes chunks."""
        step = self._sessions.get(1)
        if step is None or step is self:
            return None
        return step.session if step.judged is None else step.judged.session

    def golden_outputs(self, golden: Golden) -> CheckRecord:
        asked, source = self._asked, self._source
        fed = step_runner(self.session, source, asked.dtype, self._then, 0)
        return check_golden(fed, golden, asked.tolerance, asked.precision, source.source)

    def parity(self) -> CheckRecord:
        asked = self._asked
        tolerance = asked.tolerance(asked.precision)
        then = self._then
        tokens = tokens_of(asked.checkpoint, self._source.source)
        self.judged = judged = Judged.open(self.path, self.session, asked.dtype, asked.precision, tokens)
        judged.others = [] if then is None else [then]
        return check_step_parity(judged, self._source, asked.dtype, tolerance, then, quick=asked.quick)

    def halves(self) -> CheckRecord | None:
        return None if self.judged is None else self.judged.range_record()

    def integers(self) -> CheckRecord:
        return check_wide_integers(self.model, self.path.parent, self._source.integer_limits(self._asked.dtype))


def _facts(
    asked: ExportRequest, opened: OpenedCheckpoint, source: StepSource, step: StepFacts, checks: Sequence[CheckRecord]
) -> dict[str, Any]:
    """Return what the sidecar records about the model, with what differs from a whole-sequence file's."""
    own = {"inputs": source.inputs(asked.dtype), "seq_len": source.chunk, "step": step}
    return model_facts(asked, opened, source.source, checks) | own
