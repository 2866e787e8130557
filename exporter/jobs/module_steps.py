"""Export a module of the user's own as files that run it a few tokens at a time.

Each operator of the captured module is computed position by position (`exporter/user_module/stepping`). The written
files are fed sequences call by call, and compared with the untouched module, which reads each sequence at once: several
lengths, so that the module itself is seen not to look ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ...core.documents.sidecar import CheckRecord, Sidecar
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.file_kinds import ONNX
from ...core.storage.outputs import Output
from ...core.tensors import SEQUENCE
from ...runtime.generation.array_step import ArrayStep
from ...runtime.inputs.arrays import random_inputs
from ...runtime.parity.compare import compare
from ...runtime.parity.comparison import Comparison
from ...runtime.parity.golden import Golden
from ...runtime.parity.inputs import WINDOWS_BEYOND, InputSet
from ...runtime.parity.runner import StepRunner
from ...runtime.session import Session
from ...runtime.text_inputs.rows import token_names
from ..artifact.publish import prefill_output
from ..checks.checked_file import ExportedFile
from ..checks.golden import check_golden, open_golden
from ..checks.judged import Judged
from ..checks.parity import parity_record
from ..checks.wide_integers import check_wide_integers
from ..export_report import ExportReport
from ..lowering.quantize.weights import quantize_weights
from ..lowering.trace import step_nodes
from ..options import ModuleOptions
from ..pipeline import Job, Part, Progress
from ..user_module.golden_causes import causes_in
from ..user_module.opened_module import Inputs, OpenedModule
from ..user_module.origin import Origin, remember_origin
from ..user_module.stepping.stepped import Stepped

# Tokens after the chunks, and the least length of the longest sequence.
_AFTER_CHUNKS, _LEAST = 32, 48


class ModuleStepsJob(Job[ExportReport]):
    """The export of a step file with its prefill file, or of a prefill file alone.

    Args:
        module: the user's module.
        inputs: its inputs; the axis of the sequence is named seq.
        output: the file that is asked for.
        options: how to export, with `mode` "step" or "prefill".
        origin: where the module came from.
    """

    options: ModuleOptions
    opened: OpenedModule
    stepped: Stepped
    golden: Golden | None

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        output: Path,
        options: ModuleOptions,
        origin: Origin | None,
    ) -> None:
        self.options, self._output, self._given = options, output, (module, inputs, origin)
        self.sessions: dict[int, ModuleStepFile] = {}

    @property
    def precision(self) -> str:
        return self.options.precision

    def outputs(self) -> list[Output]:
        pair = self.options.mode == "step" and self.options.chunk != 1
        return [Output(path, ONNX) for path in ([prefill_output(self._output)] if pair else [])] + [
            Output(self._output, ONNX)
        ]

    def inputs(self) -> list[Path]:
        return [] if self.options.golden is None else [Path(self.options.golden)]

    def open(self, progress: Progress) -> None:
        progress("Running the module")
        self.opened, self.stepped = open_stepped(*self._given, self.options)
        stepped = self.stepped
        limits = (1 if self.options.mode == "step" else stepped.chunk, stepped.max_positions)
        inputs, names = stepped.data(SEQUENCE), self.opened.output_names
        tokens = self.opened.token_limit
        self.golden = open_golden(self.options.golden, inputs, names, tokens, lambda name, axis: limits)

    def trace(self, progress: Progress) -> list[Part]:
        stepped, parts = self.stepped, []
        for path, chunk in self._files().items():
            progress(f"Tracing the module, {chunk} token(s) a call")
            model = stepped.trace(chunk, self.options.opset)
            if self.options.weight_dtype is not None:
                model = quantize_weights(model, self.options.weight_dtype, self.opened.rounding)
            parts.append(Part(path, model, list(step_nodes(model))))
        return parts

    def _files(self) -> dict[Path, int]:
        """List the files with their tokens per call, the one that is asked for first."""
        chunk = self.stepped.chunk
        if self.options.mode == "prefill":
            return {self._output: chunk}
        return {self._output: 1} | ({prefill_output(self._output): chunk} if chunk > 1 else {})

    def checked(self, part: Part, progress: Progress) -> ModuleStepFile:
        return ModuleStepFile(part, self, self._files()[part.path], progress)

    def sidecar_entries(self, part: Part) -> dict[str, Any]:
        files, stepped = self._files(), self.stepped
        chunk, asked_for = files[part.path], part.path == self._output
        prefill = next((path.name for path in files if path != self._output), None) if asked_for else None
        record = stepped.record(chunk, self.options.mode if asked_for else "prefill", prefill)
        own = {"inputs": stepped.inputs(chunk), "seq_len": chunk, "step": record, "dynamic": []}
        return self.opened.model_entries() | own

    def published(self, folder: Path) -> None:
        remember_origin(self.opened.origin)

    def report(self, parts: Sequence[tuple[Part, Sidecar | None]]) -> ExportReport:
        main, *others = [(part.path, sidecar) for part, sidecar in parts if sidecar is not None]
        prefill = next((ExportReport(path, sidecar, []) for path, sidecar in others), None)
        return ExportReport(*main, self.opened.notes, prefill=prefill, doubts=tuple(self.opened.warnings))


def open_stepped(
    module: nn.Module, inputs: Inputs, origin: Origin | None, options: ModuleOptions
) -> tuple[OpenedModule, Stepped]:
    """Open a module for steps, and refuse what cannot succeed before work begins.

    Raises:
        UsageError: options or inputs do not go with steps, or an operator of the module does not.
        ExportFailed: PyTorch's exporter could not capture the module.
    """
    if options.dynamic:
        raise UsageError(
            f"{argument('dynamic')} does not apply to {argument('mode', options.mode)}.",
            why="A step file takes a fixed number of tokens a call, and any number of calls.",
            fix=f"Leave {argument('dynamic')} out.",
        )
    if options.dtype != "fp32":
        raise UsageError(
            f"{argument('dtype', options.dtype)} does not apply to steps of your own module.",
            why="Its caches and sums over time are in fp32.",
            fix=f"Leave it out; weights take fewer bits with {argument('weight_dtype', 'int8')}.",
        )
    opened = OpenedModule(module, inputs, replace(options, dynamic=(SEQUENCE,)), origin)
    return opened, Stepped(opened, options.chunk)


class ModuleStepFile(ExportedFile):
    """The written file of a module that takes a few tokens a call; a step file goes on where the chunks end."""

    kind = "steps"

    def __init__(self, part: Part, job: ModuleStepsJob, chunk: int, progress: Progress) -> None:
        super().__init__(part.staged, job.options, lambda step: progress(f"{step}, {part.path.name}"))
        self._job, self._chunk, self.golden = job, chunk, job.golden
        job.sessions[chunk] = self

    @property
    def _then(self) -> Session | None:
        """The session of the step file, for a file that takes chunks."""
        step = self._job.sessions.get(1)
        return None if step is None or step is self else step.session

    def _runner(self, singles: int | None) -> StepRunner:
        sessions, chunk = {self._chunk: self.session}, self._chunk
        if self._then is not None:
            sessions[1], chunk = self._then, 1
        return StepRunner(ArrayStep(self._job.stepped.record(chunk, "step", None), sessions), singles=singles)

    def golden_outputs(self, golden: Golden) -> CheckRecord:
        options = self._job.options
        causes = causes_in(self._job.opened.reference)
        return check_golden(self._runner(0), golden, options.tolerance, options.precision, causes=causes)

    def parity(self) -> CheckRecord:
        opened, options = self._job.opened, self._job.options
        tolerance = options.tolerance(options.precision)
        judged = Judged.open(self.path, self.session, options.dtype, options.precision, opened.tokens)
        found: list[tuple[str, Comparison]] = []
        for inputs in self._sequences(judged):
            length = next(iter(inputs.arrays.values())).shape[self._job.stepped.axis]
            singles = None if self._then is None else min(_AFTER_CHUNKS, length - self._chunk)
            compared = compare(self._runner(singles), opened.reference, inputs.arrays, tolerance)
            judged.count(inputs, self._job.stepped.data(length))
            found += [(inputs.name, comparison) for comparison in compared.comparisons]
        lengths = self._lengths()
        detail = f"{judged.describe()}, sequences of {', '.join(map(str, lengths))} positions"
        reach = self._job.stepped.reach
        if max(lengths) <= reach:
            detail += f"; the caches of {reach} positions never get full"
        record = parity_record(found, opened.reference, tolerance, detail, None, set())
        unproven = max(lengths) <= reach and record.status == "passed" and reach > 1
        return record.model_copy(update={"status": "not proven"}) if unproven else record

    def _lengths(self) -> list[int]:
        """Return lengths to compare at: past the longest cache and some windows, then shorter ones."""
        stepped, quick = self._job.stepped, self._job.options.quick
        windows = [window.window_size for window in self._job.opened.replacement.windows]
        beyond = (1 if quick else WINDOWS_BEYOND) * max(windows, default=8)
        wanted = max(stepped.reach + beyond, _LEAST, 2 * self._chunk + (_AFTER_CHUNKS if self._then else 0))
        longest = min(wanted, stepped.max_positions)
        step = self._chunk if self._then is None else 1
        longest = max(step, longest // step * step)
        shorter = [] if quick else [longest * 2 // 3 // step * step, longest // 3 // step * step]
        least = self._chunk + 1 if self._then is not None else 1
        return [longest, *(n for n in dict.fromkeys(shorter) if least <= n < longest)]

    def _sequences(self, judged: Judged) -> Iterator[InputSet]:
        """Yield one random sequence and its beginnings; then one of realistic tokens, where the inputs are tokens."""
        stepped, opened = self._job.stepped, self._job.opened
        lengths, axis = self._lengths(), stepped.axis
        specs = stepped.data(lengths[0])
        drawn = opened.draw_typed(0, opened.sizes | {SEQUENCE: lengths[0]})
        for length in lengths:
            arrays = {name: x.take(range(length), axis) for name, x in drawn.items()}
            yield InputSet(f"{length} positions", arrays, random=judged.tokens is not None)
        if judged.tokens is not None and token_names(specs):
            limit = opened.token_limit
            yield InputSet("text", judged.filled(random_inputs(specs, 1, limit), specs, 1))

    def integers(self) -> CheckRecord:
        return check_wide_integers(self.model, self.path.parent, self._job.stepped.integer_limits(self._chunk))
