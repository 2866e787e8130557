"""The ways a file is run beside its reference: whole sequences at one size or at many, or a few tokens a call.

A file with open axes is compared at a sweep of lengths around the multiples of its window, as at export. A step file is
fed a sequence some windows longer than its caches, call by call, and what it says at each position is compared with the
float64 forward of the whole sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..core.errors import UsageError
from ..core.size_sweep import sweep_sizes
from ..core.tensors import TensorSpec, format_shape
from ..core.tolerance import Tolerance
from ..runtime.arrays import load_arrays, random_inputs
from ..runtime.compare import Comparison
from ..runtime.session import Session
from .checks.parity import compare_with_oracle
from .open_sizes import BATCH, SEQUENCE, at_sizes, open_specs
from .source import SourceModel
from .steps.check import check_length, compare_steps
from .steps.source import StepSource

Arrays = dict[str, NDArray[Any]]
Compared = tuple[Arrays, list[Comparison]]


class Way(ABC):
    """One way to run a file and its reference on the same inputs.

    Attributes:
        specs: what the file has to take.
        source: the checkpoint, at the size at which most is compared.
        notes: what the user should know.
    """

    specs: list[TensorSpec]
    source: SourceModel
    notes: list[str]

    @abstractmethod
    def inputs(self, seeds: Sequence[int], given: Path | None, lengths: Sequence[int]) -> Iterator[tuple[str, Arrays]]:
        """Sets of inputs, each with what it is called.

        Args:
            seeds: of random ones.
            given: an .npz of inputs instead.
            lengths: of the sequences, where the file leaves them open; none: chosen.

        Raises:
            UsageError: something of this does not apply to the file.
        """

    @abstractmethod
    def compare(self, inputs: Arrays, tolerance: Tolerance) -> Compared:
        """The file's outputs on these inputs, and how far they are from the reference's."""

    @abstractmethod
    def reference(self, inputs: Arrays) -> Mapping[str, NDArray[Any]]:
        """The reference's outputs."""


class Whole(Way):
    """Whole sequences.

    Args:
        session: the file.
        source: the checkpoint at the file's sizes; where one is open, at the largest.
        dtype: the file's element type.
        axes: those the file leaves open.
    """

    def __init__(self, session: Session, source: SourceModel, dtype: str, axes: Sequence[str]) -> None:
        self._session, self.source, self._dtype, self._axes = session, source, dtype, tuple(axes)
        self.specs = open_specs(source, dtype, axes)
        largest = {BATCH: source.shapes.batch, SEQUENCE: source.shapes.seq_len}
        self.notes = [f"how errors are spread is told of {_named(largest, axes)}"] if axes else []

    def inputs(self, seeds: Sequence[int], given: Path | None, lengths: Sequence[int]) -> Iterator[tuple[str, Arrays]]:
        """One set a seed; with open axes one a size, and every seed at the largest."""
        if lengths and SEQUENCE not in self._axes:
            raise UsageError(
                "--seq-len does not apply.",
                why=f"The file takes {self.source.shapes.seq_len} positions and no others.",
                fix="Leave it out, or export with --dynamic seq.",
            )
        if given is not None:
            yield str(given), load_arrays(given)
            return
        for sizes in self._sizes(lengths):
            try:
                at = self._at(sizes)
            except UsageError as error:  # a length that the class itself refuses
                self.notes.append(f"not compared at {_named(sizes, self._axes)}: {error.what}")
                continue
            largest = at.shapes == self.source.shapes
            for seed in seeds if largest or lengths else seeds[:1]:
                drawn = random_inputs(at.inputs(self._dtype), seed, token_limit=at.token_limit)
                yield f"seed {seed}" + (f", {_named(sizes, self._axes)}" if self._axes else ""), drawn

    def _sizes(self, lengths: Sequence[int]) -> list[dict[str, int]]:
        shapes = self.source.shapes
        now = {BATCH: shapes.batch, SEQUENCE: shapes.seq_len}
        if not self._axes:
            return [now]
        if lengths:
            return [{**now, SEQUENCE: length} for length in lengths]
        windows = [] if self.source.geometry is None else [self.source.geometry]
        return sweep_sizes(self._axes, now, SEQUENCE, windows)

    def _at(self, sizes: Mapping[str, int]) -> SourceModel:
        return at_sizes(self.source, sizes) if self._axes else self.source

    def _of(self, inputs: Arrays) -> SourceModel:
        """The model at the sizes of these inputs, which fit the file."""
        shapes = self.source.shapes
        sizes = {BATCH: shapes.batch, SEQUENCE: shapes.seq_len}
        for spec in self.specs:
            named = zip(spec.shape, inputs[spec.name].shape, strict=True)
            sizes |= {name: size for name, size in named if isinstance(name, str)}
        return self._at(sizes)

    def compare(self, inputs: Arrays, tolerance: Tolerance) -> Compared:
        """Errors are told along the sequence at the largest size only, to which they belong."""
        outputs = self._session.run(inputs)
        at = self._of(inputs)
        spread = at.shapes.seq_len == self.source.shapes.seq_len and at.shapes.batch == self.source.shapes.batch
        return outputs, compare_with_oracle(outputs, at, inputs, tolerance, spread=spread)

    def reference(self, inputs: Arrays) -> Mapping[str, NDArray[Any]]:
        """At the sizes of the inputs."""
        return self._of(inputs).reference(inputs)


class StepByStep(Way):
    """A few tokens a call, from empty caches on.

    Args:
        session: the file.
        step: what it was exported from.
        dtype: its element type.
    """

    def __init__(self, session: Session, step: StepSource, dtype: str) -> None:
        self._session, self._step, self._dtype = session, step, dtype
        self.source, self.specs = check_length(step), step.inputs(dtype)
        calls = "one a call" if step.chunk == 1 else f"{step.chunk} a call"
        self.notes = [f"{self.source.shapes.seq_len} tokens were fed, {calls}; every position is compared"]

    def inputs(self, seeds: Sequence[int], given: Path | None, lengths: Sequence[int]) -> Iterator[tuple[str, Arrays]]:
        """Whole sequences, one a seed or one that is given."""
        if lengths:
            raise UsageError(
                "--seq-len does not apply to a step file.",
                why="It is fed as many tokens as show that its caches are right.",
                fix="Leave it out, or give the tokens with --load-inputs.",
            )
        if given is not None:
            yield str(given), self._checked(load_arrays(given))
            return
        for seed in seeds:
            yield (
                f"seed {seed}",
                random_inputs(self.source.inputs(self._dtype), seed, token_limit=self.source.token_limit),
            )

    def _checked(self, inputs: Arrays) -> Arrays:
        """Inputs of a whole sequence, of the length and batch that are compared."""
        for spec in self.source.inputs(self._dtype):
            came = inputs.get(spec.name)
            if came is None or came.shape != spec.shape:
                shape = "nothing" if came is None else format_shape(came.shape)
                raise UsageError(
                    f"Input {spec.name!r} is {shape}.",
                    why=f"A step file is compared on a whole sequence: {spec.describe()}.",
                    fix="Give the file of --save-inputs, or leave --load-inputs out.",
                )
        return inputs

    def compare(self, inputs: Arrays, tolerance: Tolerance) -> Compared:
        """Every position of the sequence."""
        return compare_steps(self._session, self._step, self._dtype, inputs, tolerance)

    def reference(self, inputs: Arrays) -> Mapping[str, NDArray[Any]]:
        """Of the whole sequence at once."""
        return self.source.reference(inputs)


def _named(sizes: Mapping[str, int], axes: Sequence[str]) -> str:
    return " ".join(f"{axis}={sizes[axis]}" for axis in axes)
