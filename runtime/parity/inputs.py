"""Choose the inputs of a comparison: sizes around the windows, or sequences longer than the caches of a step file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.geometry import WindowGeometry
from ...core.tensors import BATCH_AXES, SEQUENCE_AXES, UNNAMED_DIMENSION, TensorSpec
from ..inputs.arrays import load_arrays, random_inputs
from ..inputs.size_sweep import OPEN_BATCH, sweep_sizes
from ..inputs.vocabulary import check_tokens
from ..session import Arrays, check_inputs
from ..text_inputs.rows import arrays_of_rows, fill, rows_of_use, token_names
from ..text_inputs.tally import Tally
from ..text_inputs.tokens import Opening, open_tokens
from .report import ParityRequest
from .runner import FileRunner, Runner, StepRunner
from .shared_inputs import cast_to

# Tokens of all realistic rows together, and of a short sequence for step files.
_MOST_TOKENS, _FEW = 4096, 48
# A sequence exceeds the longest cache by this many windows.
WINDOWS_BEYOND = 3

Sizes = dict[str, int]


@dataclass(frozen=True)
class InputSet:
    """One set of inputs.

    Args:
        name: what reports call it.
        arrays: in the types that both models share.
        largest: whether it has the sizes at which errors along the sequence are recorded.
        sizes: the sizes of the dynamic axes, in words.
        alone: whether this set must also meet the tolerance separately.
        random: whether its tokens are random, and so unrealistic.
    """

    name: str
    arrays: Arrays
    largest: bool = False
    sizes: str = ""
    alone: bool = False
    random: bool = False


class InputSets:
    """Choose the inputs of a comparison of two models.

    Args:
        request: seeds, inputs or lengths.
        specs: the inputs that both take.
        runners: the candidate and the reference.
        windows: of the model's layers.
        precision: an entry of `core.tolerance`: if realistic tokens are available, random tokens count only in fp32.

    Attributes:
        length: positions of the longest sequence; None if no sidecar states which axis counts them.

    Raises:
        UsageError: inputs that do not fit, lengths that the models do not take, or dynamic axes whose sizes are not
            known.
    """

    def __init__(
        self,
        request: ParityRequest,
        specs: Sequence[TensorSpec],
        runners: Sequence[Runner],
        windows: Sequence[WindowGeometry],
        precision: str = "fp32",
    ) -> None:
        self._precision, self._windows = precision, windows
        self._request, self._specs, self._runners = request, list(specs), runners
        self._steps = [runner for runner in runners if isinstance(runner, StepRunner)]
        self._axes = _dynamic_axes(specs)
        self._sequence = next((name for name in self._axes if name in SEQUENCE_AXES), None)
        self._tokens = min((x.token_limit for x in runners if x.token_limit is not None), default=None)
        self._given = None
        if request.lengths and self._sequence is None:
            raise UsageError(
                f"{argument('seq_len')} does not apply.",
                why="The length of these sequences is fixed.",
                fix=f"Leave it out, or export with {argument('dynamic', ('seq',))}.",
            )
        if request.inputs is not None:
            self._given = self._read()
            self.length = self._stepped(self._given)
        else:
            self._sizes = self._choose(windows)
            lengths = [sizes[self._sequence] for sizes in self._sizes if self._sequence is not None]
            self.length = max(lengths, default=self._stepped(None))
        for runner in self._steps:
            self._check_steps(runner)
        takes_tokens = self._given is None and bool(token_names(specs))
        self._texts = open_tokens(request.folders, self._tokens, _config(runners)) if takes_tokens else None
        self._tally = Tally(self._texts)

    def __iter__(self) -> Iterator[InputSet]:
        """Yield a set of inputs for each size; at the largest and at requested sizes, one for each seed."""
        if self._given is not None:
            yield InputSet(str(self._request.inputs), self._given, True, str(self._request.inputs))
            return
        seeds, lengths = self._request.seeds, self._request.lengths
        place = 0
        for sizes in self._sizes:
            largest = sizes == self._sizes[0] if not lengths else sizes[self._sequence or ""] == self.length
            for seed in seeds if largest or lengths else seeds[:1]:
                drawn = random_inputs(self._specs, seed, self._tokens, sizes)
                # In fp32 every second set has random tokens, in which any of the vocabulary occurs.
                random = self._texts is not None and self._precision == "fp32" and place % 2 == 0
                if self._texts is not None and not random:
                    drawn = fill(drawn, self._specs, self._texts, seed, self._opening(place))
                named = self._named(sizes)
                name = f"seed {seed}, {named}" if named else f"seed {seed}"
                alone = self._texts is not None and self._precision not in ("fp32", "fp16", "bf16")
                yield InputSet(name, drawn, largest, named, alone=alone and self._sequence is None, random=random)
                place += 1
        if self._sequence is not None and not lengths:
            yield from self._rows()

    def _opening(self, place: int) -> Opening | None:
        """Return the openings of a set's rows: at a fixed length, if no other rows are fed, each other opening."""
        openings = [] if self._texts is None or self._sequence is not None else self._texts.openings
        return openings[(place - 1) % len(openings)] if place and openings else None

    def _rows(self) -> Iterator[InputSet]:
        """Yield realistic rows, one at a time, of lengths that both models accept."""
        if self._texts is None or self._sequence is None or self.length is None:
            return
        batch = {name: max(1, self._bounds(name)[0]) for name in self._axes if name != self._sequence}
        chunk = math.lcm(*(runner.record.chunk for runner in self._steps)) if self._steps else 1
        low = self._bounds(self._sequence)[0]
        masked = any(spec.name in ("mask", "attention_mask") for spec in self._specs)
        spans = 2 * max((window.keys_per_window for window in self._windows if not window.sees_all), default=0)
        # A sequence that overfills the caches of step files was fed before.
        longest = min(self.length, max(_FEW, 2 * chunk)) if self._steps else self.length
        alone = self._precision not in ("fp32", "fp16", "bf16")
        if not (self._texts.opening or self._texts.openings or alone):
            return  # there is no opening that the sets above do not have
        for row in rows_of_use(self._texts, longest, spans, _MOST_TOKENS, pads=masked, multiple=chunk):
            if row.length >= low:
                sizes = {**batch, self._sequence: row.length}
                drawn = random_inputs(self._specs, 0, self._tokens, sizes)
                arrays = arrays_of_rows([row], self._specs, drawn, self._texts.pad)
                yield InputSet(row.name, arrays, sizes=self._named(sizes), alone=alone)

    def count(self, inputs: InputSet) -> None:
        """Count a set of inputs that was compared."""
        self._tally.add(inputs.arrays, self._specs, random=inputs.random)

    def describe(self) -> str:
        """Describe what was compared, in words."""
        return self._tally.describe() if self._given is None else f"the inputs in {self._request.inputs}"

    @property
    def notes(self) -> list[str]:
        """Notes on the inputs: how step files were fed, and which of the allowed sizes were tried."""
        found = []
        candidate, reference = self._runners
        if not isinstance(candidate, StepRunner) and len(self._axes) < len(_dynamic_axes(candidate.inputs)):
            found.append(f"{candidate.name} has dynamic sizes, and is compared at the sizes of {reference.name} only")
        for runner in self._steps:
            chunk = runner.record.chunk
            calls = "one per call" if chunk == 1 else f"{chunk} per call"
            found.append(f"{self.length} tokens were fed to {runner.name}, {calls}; every position is compared")
            if self.length is not None and self.length <= runner.slots:
                found.append(
                    f"the caches of {runner.name} hold {runner.slots} positions: {self.length} are too few to test "
                    "that "
                    "older ones are dropped"
                )
        if self._given is None and len(self._sizes) > 1:
            lengths = self._request.lengths
            largest = self._sizes[0] if not lengths else {**self._sizes[0], self._sequence or "": self.length or 0}
            found.append(f"the spread of errors is shown for {self._named(largest)}")
        return found

    def _named(self, sizes: Sizes) -> str:
        return " ".join(f"{axis}={sizes[axis]}" for axis in self._axes)

    def _read(self) -> Arrays:
        """Read the inputs of an .npz, cast to the types that both models share."""
        assert self._request.inputs is not None
        loaded = load_arrays(self._request.inputs)
        try:
            given = check_inputs(self._specs, cast_to(loaded, self._specs))
        except UsageError as error:
            if not self._steps:
                raise
            why = f"{error.why} A step file is compared on a whole sequence, without its position and caches."
            raise UsageError(error.what, why=why, fix=error.fix) from error
        check_tokens(given, next((x.token_limits for x in self._runners if x.token_limits), self._tokens))
        return given

    def _choose(self, windows: Sequence[WindowGeometry]) -> list[Sizes]:
        """Choose sizes of the dynamic axes, the largest first."""
        lengths = self._request.lengths
        for name in self._axes:
            if name == UNNAMED_DIMENSION or (name != self._sequence and name not in BATCH_AXES):
                raise UsageError(
                    f"In both files {'an axis' if name == UNNAMED_DIMENSION else f'the axis {name!r}'} is dynamic.",
                    why="No sidecar says which sizes it may have.",
                    fix=f"Give the inputs in a file: {argument('inputs')}.",
                )
        now = {name: self._batch(name) for name in self._axes if name != self._sequence}
        if self._sequence is None:
            return [now] if not now else sweep_sizes(list(now), now, "", [])
        low, high = self._bounds(self._sequence)
        wrong = [n for n in lengths if n < low or (high is not None and n > high)]
        if wrong:
            most = "" if high is None else f" to {high}"
            raise UsageError(
                f"{argument('seq_len', wrong[0])} is not a length of both files.",
                why=f"Both files accept {low}{most} positions.",
            )
        if lengths:
            return [{**now, self._sequence: n} for n in lengths]
        if self._steps:
            return [{**now, self._sequence: self._beyond_the_caches(high)}]
        if high is None:
            raise UsageError(
                "In both files the sequence length is dynamic.",
                why="No sidecar says which length is the longest.",
                fix=f"Give lengths, {argument('seq_len')}, or the inputs in a file, {argument('inputs')}.",
            )
        swept = sweep_sizes(self._axes, {**now, self._sequence: high}, self._sequence, windows)
        bounds = {name: self._bounds(name) for name in self._axes}
        fitting = [sizes for sizes in swept if all(_within(sizes[name], bounds[name]) for name in self._axes)]
        if not fitting:
            raise UsageError(
                "No size is accepted by both files.",
                why=f"Together they allow lengths from {low} to {high}.",
            )
        return fitting

    def _batch(self, axis: str) -> int:
        """Return the sequences per call: as at export, within the limits of both models."""
        low, high = self._bounds(axis)
        stated = next((runner.batch for runner in self._runners if runner.batch is not None), OPEN_BATCH)
        return max(low, stated if high is None else min(stated, high))

    def _bounds(self, name: str) -> tuple[int, int | None]:
        """Return the smallest and largest size of a dynamic axis that both models accept."""
        found = [
            runner.limits(spec.name, axis)
            for runner in self._runners
            for spec in self._specs
            for axis, size in enumerate(spec.shape)
            if size == name
        ]
        highs = [high for _, high in found if high is not None]
        return max(low for low, _ in found), min(highs, default=None)

    def _beyond_the_caches(self, high: int | None) -> int:
        """Return a length that overwrites every cache slot, or the model's last position if that comes first."""
        base = math.lcm(*(runner.record.chunk for runner in self._steps))
        chunk = max(size for runner in self._steps for size in runner.session.chunks)
        length = max(*(runner.slots + WINDOWS_BEYOND * runner.window for runner in self._steps), 2 * chunk)
        if chunk > base:  # whole chunks, then single tokens that read from the caches what the chunks left
            length = math.ceil(length / chunk) * chunk + chunk - 1
        length = math.ceil(length / base) * base
        return length if high is None else max(base, min(length, high) // base * base)

    def _stepped(self, given: Arrays | None) -> int | None:
        """Return the sequence length of step files: that of the given inputs, or a fixed one; None if dynamic."""
        if not self._steps:
            return None
        record, shapes = self._steps[0].record, {spec.name: spec.shape for spec in self._specs}
        shape = shapes[record.token_input] if given is None else given[record.token_input].shape
        size = shape[record.sequence_axis]
        return size if isinstance(size, int) else None

    def _check_steps(self, runner: StepRunner) -> None:
        """Refuse lengths that are not whole chunks, or that exceed the model's learned positions.

        Raises:
            UsageError: this length cannot be fed.
        """
        lengths = self._request.lengths if self._request.lengths and self._given is None else (self.length,)
        chunk, most = runner.record.chunk, runner.record.max_positions
        for length in lengths:
            if length is not None and (length % chunk or length < 1 or (most is not None and length > most)):
                ends = "" if most is None else f" and has {most} positions"
                raise UsageError(
                    f"{runner.name} does not accept {length} positions.",
                    why=f"It takes {chunk} per call{ends}.",
                    fix=f"Choose another length, {argument('seq_len')}; instead of a prefill file give its step file.",
                )


def _config(runners: Sequence[Runner]) -> Mapping[str, Any] | None:
    """Return the `config.json` in a sidecar; None if there is none."""
    sidecars = [runner.sidecar for runner in runners if isinstance(runner, FileRunner) and runner.sidecar is not None]
    configs = (sidecar.kwargs.get("config") for sidecar in sidecars)
    return next((config for config in configs if isinstance(config, dict)), None)


def _dynamic_axes(specs: Sequence[TensorSpec]) -> list[str]:
    return list(dict.fromkeys(size for spec in specs for size in spec.shape if isinstance(size, str)))


def _within(size: int, bounds: tuple[int, int | None]) -> bool:
    low, high = bounds
    return low <= size and (high is None or size <= high)
