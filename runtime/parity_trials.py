"""The inputs on which two files are compared: sizes around the windows, or sequences longer than their caches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import UsageError
from ..core.geometry import WindowGeometry
from ..core.size_sweep import OPEN_BATCH, sweep_sizes
from ..core.tensors import UNNAMED_DIMENSION, TensorSpec
from .arrays import load_arrays, random_inputs
from .open_axes import BATCH_AXES, SEQUENCE_AXES
from .parity_report import ParityRequest
from .parity_side import Side, StepSide, steps_of
from .session import Arrays, check_inputs
from .shared_inputs import fitted
from .vocabulary import check_tokens, vocabulary

# A sequence is so many windows longer than the longest cache.
_WINDOWS_BEYOND = 3

Sizes = dict[str, int]


@dataclass(frozen=True)
class Trial:
    """One set of inputs.

    Args:
        name: what it is called.
        inputs: in the types that both files share.
        largest: whether its sizes are those at which errors are told along the sequence.
    """

    name: str
    inputs: Arrays
    largest: bool


class Trials:
    """What two files are run on.

    Args:
        request: seeds, inputs or lengths.
        specs: the inputs that both take.
        sides: both files.
        windows: of the model's layers.

    Attributes:
        length: positions of the longest sequence; None where nothing tells which axis counts them.

    Raises:
        UsageError: inputs that do not fit, lengths that the files do not take, or sizes that nothing tells.
    """

    def __init__(
        self,
        request: ParityRequest,
        specs: Sequence[TensorSpec],
        sides: Sequence[Side],
        windows: Sequence[WindowGeometry],
    ) -> None:
        self._seeds, self._specs, self._sides = request.seeds, list(specs), sides
        self._axes = list(dict.fromkeys(size for spec in specs for size in spec.shape if isinstance(size, str)))
        self._sequence = next((name for name in self._axes if name in SEQUENCE_AXES), None)
        known = [size for side in sides if (size := vocabulary(side.sidecar)) is not None]
        self._tokens = min(known, default=None)
        self._lengths, self._given, self._path = request.lengths, None, request.inputs
        if request.lengths and self._sequence is None:
            raise UsageError(
                "--seq-len does not apply.",
                why="The length of these files is fixed.",
                fix="Leave it out, or export with --dynamic seq.",
            )
        if request.inputs is not None:
            self._given = self._read(request.inputs)
            self.length = self._stepped(self._given)
        else:
            self._sizes = self._choose(request.lengths, windows)
            lengths = [sizes[self._sequence] for sizes in self._sizes if self._sequence is not None]
            self.length = max(lengths, default=self._stepped(None))
        for side in steps_of(sides):
            self._check_steps(side)

    def __iter__(self) -> Iterator[Trial]:
        """One set a size, and at the largest and at sizes that were asked for one a seed."""
        if self._given is not None:
            yield Trial(str(self._path), self._given, True)
            return
        for sizes in self._sizes:
            largest = sizes == self._sizes[0] if not self._lengths else sizes[self._sequence or ""] == self.length
            for seed in self._seeds if largest or self._lengths else self._seeds[:1]:
                drawn = random_inputs(self._specs, seed, self._tokens, sizes)
                named = " ".join(f"{axis}={sizes[axis]}" for axis in self._axes)
                yield Trial(f"seed {seed}" + (f", {named}" if named else ""), drawn, largest)

    @property
    def notes(self) -> list[str]:
        """What was fed to step files, and what sizes errors are told of."""
        found = []
        for side in steps_of(self._sides):
            chunk = side.facts.chunk
            calls = "one a call" if chunk == 1 else f"{chunk} a call"
            found.append(f"{self.length} tokens were fed to {side.path.name}, {calls}; every position is compared")
            if self.length is not None and self.length <= side.slots:
                found.append(
                    f"the caches of {side.path.name} hold {side.slots} positions: {self.length} do not show that older "
                    "ones are dropped"
                )
        if self._given is None and len(self._sizes) > 1:
            largest = self._sizes[0] if not self._lengths else {**self._sizes[0], self._sequence or "": self.length}
            named = " ".join(f"{axis}={largest[axis]}" for axis in self._axes)
            found.append(f"how errors are spread is told of {named}")
        return found

    def _read(self, path: Path) -> Arrays:
        """The inputs of an .npz, in the types that both files share."""
        given = check_inputs(self._specs, fitted(load_arrays(path), self._specs))
        check_tokens(given, self._tokens)
        return given

    def _choose(self, lengths: Sequence[int], windows: Sequence[WindowGeometry]) -> list[Sizes]:
        """Sizes of the open axes, the largest first."""
        for name in self._axes:
            if name == UNNAMED_DIMENSION or (name != self._sequence and name not in BATCH_AXES):
                raise UsageError(
                    f"Both files leave {'an axis' if name == UNNAMED_DIMENSION else f'the axis {name!r}'} open.",
                    why="Nothing tells which sizes it may have.",
                    fix="Give the inputs in a file: --load-inputs.",
                )
        now = {name: self._batch(name) for name in self._axes if name != self._sequence}
        if self._sequence is None:
            return [now] if not now else sweep_sizes(list(now), now, "", [])
        low, high = self._bounds(self._sequence)
        wrong = [n for n in lengths if n < low or (high is not None and n > high)]
        if wrong:
            most = "" if high is None else f" to {high}"
            raise UsageError(
                f"--seq-len {wrong[0]} is not a length of both files.", why=f"They take {low}{most} positions."
            )
        if lengths:
            return [{**now, self._sequence: n} for n in lengths]
        if steps_of(self._sides):
            return [{**now, self._sequence: self._beyond_the_caches(high)}]
        if high is None:
            raise UsageError(
                "Both files leave the length open.",
                why="No sidecar beside them tells the longest.",
                fix="Give lengths with --seq-len, or the inputs with --load-inputs.",
            )
        swept = sweep_sizes(self._axes, {**now, self._sequence: high}, self._sequence, windows)
        bounds = {name: self._bounds(name) for name in self._axes}
        fitting = [sizes for sizes in swept if all(_within(sizes[name], bounds[name]) for name in self._axes)]
        if not fitting:
            raise UsageError("There is no size that both files take.", why=f"They take {low} to {high} positions.")
        return fitting

    def _batch(self, axis: str) -> int:
        """Sequences a call: as at export, as far as both files take so many."""
        low, high = self._bounds(axis)
        stated = next((side.sidecar.batch for side in self._sides if side.sidecar is not None), OPEN_BATCH)
        return max(low, stated if high is None else min(stated, high))

    def _bounds(self, name: str) -> tuple[int, int | None]:
        """The sizes of an open axis that both files take."""
        found = [
            side.limits(spec.name, axis)
            for side in self._sides
            for spec in self._specs
            for axis, size in enumerate(spec.shape)
            if size == name
        ]
        highs = [high for _, high in found if high is not None]
        return max(low for low, _ in found), min(highs, default=None)

    def _beyond_the_caches(self, high: int | None) -> int:
        """A length that overwrites every slot of the caches, or all positions that the model has."""
        steps = steps_of(self._sides)
        base = math.lcm(*(side.facts.chunk for side in steps))
        chunk = max(size for side in steps for size in side.session.chunks)
        length = max(*(side.slots + _WINDOWS_BEYOND * side.window for side in steps), 2 * chunk)
        if chunk > base:  # whole chunks, and single tokens that find in the caches what the chunks left
            length = math.ceil(length / chunk) * chunk + chunk - 1
        length = math.ceil(length / base) * base
        return length if high is None else max(base, min(length, high) // base * base)

    def _stepped(self, given: Arrays | None) -> int | None:
        """Positions of a sequence, where a step file's sidecar tells which axis counts them; of an input, or fixed."""
        for side in steps_of(self._sides):
            shapes = {spec.name: spec.shape for spec in self._specs}
            shape = shapes[side.facts.token_input] if given is None else given[side.facts.token_input].shape
            size = shape[side.facts.sequence_axis]
            return size if isinstance(size, int) else None
        return None

    def _check_steps(self, side: StepSide) -> None:
        """A prefill file takes whole chunks only, and a model with learned positions ends.

        Raises:
            UsageError: this length cannot be fed.
        """
        lengths = self._lengths if self._lengths and self._given is None else (self.length,)
        chunk, most = side.facts.chunk, side.facts.max_positions
        for length in lengths:
            if length is not None and (length % chunk or length < 1 or (most is not None and length > most)):
                ends = "" if most is None else f" and has {most} positions"
                raise UsageError(
                    f"{side.path.name} cannot be fed {length} positions.",
                    why=f"It takes {chunk} a call{ends}.",
                    fix="Choose another length with --seq-len, or give the step file where this is a prefill file.",
                )


def _within(size: int, bounds: tuple[int, int | None]) -> bool:
    low, high = bounds
    return low <= size and (high is None or size <= high)
