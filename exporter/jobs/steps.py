"""Export a checkpoint as files that run it a few tokens at a time.

A step file takes one token per call. The prefill file next to it takes chunks of a prompt and returns the same caches;
both refer to one file of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.documents.sidecar import CheckRecord, Sidecar
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.file_kinds import ONNX
from ...core.storage.outputs import Output
from ...core.tensors import SEQUENCE
from ...runtime.parity.golden import Golden
from ...runtime.parity.runner import StepRunner
from ...runtime.session import Session
from ...runtime.text_inputs.tokens import Tokens
from ..artifact.publish import prefill_output
from ..checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from ..checks.checked_file import ExportedFile
from ..checks.constants import check_constants
from ..checks.golden import check_golden, open_golden
from ..checks.judged import Judged
from ..checks.quality import ROW as QUALITY_ROW
from ..checks.quality import check_quality, has_quality
from ..checks.rounded import Cut, check_rounded
from ..checks.steps import at_length, check_step_parity, step_runner
from ..checks.wide_integers import check_wide_integers
from ..export_report import ExportReport
from ..lowering.quantize.on_text import CALIBRATION_ROW, rounding_on_text
from ..lowering.quantize.weights import in_blocks, quantize_weights
from ..lowering.trace import check_opset, step_nodes, trace_step
from ..options import ExportRequest
from ..pipeline import Part, Progress
from ..source.reference_runner import ReferenceRunner
from ..source.step_source import StepSource, largest_chunk
from ..source.tokens import tokens_of
from .checkpoint import RequestJob, check_request_precision, files_to_copy, model_entries

DEFAULT_CHUNK = 64
# Positions of a row on which a file is compared with its own weights, one call after the other.
_ROUNDED = 48


class StepsJob(RequestJob):
    """The export of a step file with the prefill file next to it, or of a prefill file alone.

    Args:
        request: what to export, with `mode` "step" or "prefill". Of its shapes `seq_len` is not used. `chunk` 1 with
            mode "step": no prefill file. By default it is 64, or fewer if the model has few positions or its xpos
            decays fast.
    """

    files: dict[Path, StepSource]

    def __init__(self, request: ExportRequest) -> None:
        super().__init__(request)
        self.sessions: dict[int, StepFile] = {}

    def outputs(self) -> list[Output]:
        request = self.request
        pair = request.mode == "step" and request.chunk != 1
        paths = [prefill_output(request.output), request.output] if pair else [request.output]
        return [Output(path, ONNX) for path in paths]

    def open(self, progress: Progress) -> None:
        progress("Reading the checkpoint")
        request = self.request
        self.opened, self.files = open_steps(request)
        main = self.files[request.output]
        self.accompanying_files = files_to_copy(request, main.source)
        # Golden outputs are of whole sequences, which the files are fed call by call.
        limits = (main.chunk, main.max_positions)
        inputs = main.data(request.dtype, SEQUENCE)
        outputs, tokens = main.source.outputs, main.source.token_limit
        self.golden = open_golden(request.golden, inputs, outputs, tokens, lambda name, axis: limits)

    def trace(self, progress: Progress) -> list[Part]:
        request = self.request
        main = self.files[request.output]
        # The files have no length of their own: the text that weights are rounded on is as long as rows of text are.
        self.rounding = rounding_on_text(request, at_length(main, min(main.max_positions, CALIBRATION_ROW)))
        parts = []
        for path, source in self.files.items():
            progress(f"Tracing the model, {source.chunk} token(s) a call")
            model = trace_step(source, request.dtype, request.opset)
            if request.weight_dtype is not None:
                self.keep_unrounded(model, path)
                model = quantize_weights(model, request.weight_dtype, self.rounding)
            parts.append(Part(path, model, list(step_nodes(model))))
        return parts

    def written(self) -> None:
        self.files[self.request.output].source.forget_weights()

    def checked(self, part: Part, progress: Progress) -> StepFile:
        return StepFile(part, self, progress)

    def sidecar_entries(self, part: Part) -> dict[str, Any]:
        request, source = self.request, self.files[part.path]
        asked_for = part.path == request.output
        prefill = next((path.name for path in self.files if path != request.output), None) if asked_for else None
        step = source.record(request.dtype, mode=request.mode if asked_for else "prefill", prefill=prefill)
        own = {"inputs": source.inputs(request.dtype), "seq_len": source.chunk, "step": step}
        return model_entries(request, self.opened, source.source, part.checks) | own

    def report(self, parts: Sequence[tuple[Part, Sidecar | None]]) -> ExportReport:
        main, *others = [(part.path, sidecar) for part, sidecar in parts if sidecar is not None]
        prefill = next((ExportReport(path, sidecar, []) for path, sidecar in others), None)
        doubts = tuple(self.opened.warnings)
        return ExportReport(*main, self.notes(), prefill=prefill, copied=self.copied, doubts=doubts)


def open_steps(request: ExportRequest) -> tuple[OpenedCheckpoint, dict[Path, StepSource]]:
    """Open the checkpoint and the files to write, and refuse a request that cannot succeed, before work begins.

    Raises:
        UsageError: the request or one of its files cannot be used, or the model cannot stream.
    """
    check_request_precision(request)
    check_opset(request.opset)
    for option, given in (("seq_len", request.shapes.seq_len is not None), ("dynamic", bool(request.dynamic))):
        if given:
            raise UsageError(
                f"{argument(option)} does not apply to {argument('mode', request.mode)}.",
                why="A step file takes a fixed number of tokens a call, and any number of calls.",
                fix=f"Leave {argument(option)} out.",
            )
    opened = open_checkpoint(
        request.checkpoint, request.config, task=request.task, shapes=request.shapes, steps=True, entry=request.entry
    )
    opened = opened.for_steps(request.shapes)
    # Any length the class accepts, because the files do not depend on it.
    some_length = getattr(opened.resolved.args, "window_size", 1)
    source = opened.source(replace(request.shapes, seq_len=some_length))
    step = StepSource(source, 1)
    chunk = request.chunk
    if chunk is None:
        half = (step.max_positions + 1) // 2
        chunk = min(limit for limit in (DEFAULT_CHUNK, half, largest_chunk(source)) if limit is not None)
    chunked = StepSource(source, chunk)
    if request.mode == "prefill":
        files = {request.output: chunked}
    else:
        files = {request.output: step} | ({prefill_output(request.output): chunked} if chunk > 1 else {})
    return opened, files


class StepFile(ExportedFile):
    """The written file of a checkpoint that takes a few tokens a call.

    The step file continues where the chunks of the prefill file end.
    """

    kind = "steps"

    def __init__(self, part: Part, job: StepsJob, progress: Progress) -> None:
        super().__init__(part.staged, job.request, lambda step: progress(f"{step}, {part.path.name}"))
        self._source, self._asked, self.golden, self._sessions = (
            job.files[part.path],
            job.request,
            job.golden,
            job.sessions,
        )
        self.judged: Judged | None = None
        self._pair = len(job.files) > 1
        self._sessions[self._source.chunk] = self
        self._job, self._graph = job, job.graphs.get(part.path)
        self._tolerance = job.request.tolerance(job.request.precision, proven=self._states_quality)

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

    @property
    def has_own_constants(self) -> bool:
        return self._source.source.family.loads_reference and self._source.source.original is not None

    def constants(self) -> CheckRecord:
        return check_constants(self.model, self._source.source.loaded_original())

    def rounded(self) -> CheckRecord:
        assert self._graph is not None
        blocks = in_blocks(self._asked.weight_dtype)
        return check_rounded(self.path, self.session, self._graph, self._fed, blocks=blocks, cut=self._cut)

    def remedy(self) -> str:
        return self._job.remedy(self._graph, self._fed, self._cut)

    def _fed(self, session: Session) -> StepRunner:
        return step_runner(session, self._source, self._asked.dtype, None, None)

    @property
    def _cut(self) -> Cut:
        source = self._source
        return Cut(
            source.record(self._asked.dtype, mode="step", prefill=None).sequence_axis,
            max(_ROUNDED, source.chunk),
            source.chunk,
        )

    def parity(self) -> CheckRecord:
        return self._parity

    @cached_property
    def _parity(self) -> CheckRecord:
        asked = self._asked
        tolerance = self._tolerance
        then = self._then
        self.judged = judged = Judged.open(self.path, self.session, asked.dtype, asked.precision, self._tokens)
        judged.others = [] if then is None else [then]
        later = self._pair and self._source.chunk == 1
        judged.graph = graph = self._graph
        step = self._sessions.get(1)
        if graph is not None and then is not None and step is not None:
            graph.then = step._graph
        record = check_step_parity(
            judged, self._source, asked.dtype, tolerance, then, quick=asked.quick, wraps_later=later
        )
        if graph is not None:
            graph.finish(ReferenceRunner(self._source.source), judged.describe())
        return record

    def halves(self) -> CheckRecord | None:
        return None if self.judged is None else self.judged.range_record()

    @property
    def _states_quality(self) -> bool:
        """Return whether the quality of this file or of its prefill file is stated, and its proofs are made."""
        return self._graph is not None and has_quality(self._source.source, self._tokens)

    @property
    def has_quality(self) -> bool:
        rounded = self._asked.weight_dtype is not None and has_quality(self._source.source, self._tokens)
        return rounded and not (self._pair and self._source.chunk == 1)

    def quality(self) -> CheckRecord:
        tokens, source = self._tokens, self._source
        assert tokens is not None
        runner = step_runner(self.session, source, self._asked.dtype, None, None)
        longest = at_length(source, min(source.max_positions, QUALITY_ROW))
        return check_quality(runner, longest, tokens, self.path, dtype=self._asked.dtype, multiple=source.chunk)

    @cached_property
    def _tokens(self) -> Tokens | None:
        return tokens_of(self._asked.checkpoint, self._source.source)

    def integers(self) -> CheckRecord:
        return check_wide_integers(self.model, self.path.parent, self._source.integer_limits(self._asked.dtype))
