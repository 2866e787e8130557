"""Run the float64 reference of a checkpoint as `runtime.parity.compare` runs any model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.machine.resident_memory import release_memory
from ...core.tensors import BATCH, SEQUENCE
from ...runtime.parity.golden import kept_rows
from ...runtime.parity.runner import Runner, Sample, take_sample
from ...runtime.session import Arrays
from .dynamic_axes import dynamic_axes_of, dynamic_specs, sizes_of
from .source_model import SourceModel

# How many positions of a long sequence a reference with a cost quadratic in the length computes.
MOST_POSITIONS = 512
# Sequence length up to which a reference with a window computes every position.
WHOLE_UP_TO = 2048
# At most so many of the last positions of a longer sequence.
_TAIL = 64
# Where the experts of fewer tokens are decided beyond rounding, all tokens are compared.
_LEAST_DECIDED = 0.1


class ReferenceRunner(Runner):
    """A runner of the float64 reference, at the sizes of the inputs it is given.

    Args:
        source: the model; if sizes are dynamic, at the largest.
        dtype: the element type of the file's inputs.
        axes: dynamic axes of the file, of "batch" and "seq".
        samples: compute only some positions of long sequences, see `sampled_positions`.
        few_sequences: compute only the first and the last sequence of a batch, as all are computed in the same way.
    """

    name = "the float64 reference"

    def __init__(
        self,
        source: SourceModel,
        dtype: str = "fp32",
        axes: Sequence[str] = (),
        *,
        samples: bool = False,
        few_sequences: bool = False,
    ) -> None:
        self.source, self._dtype, self._axes = source, dtype, tuple(axes)
        self._samples, self._few_sequences, self._heads = samples, few_sequences, True
        self.inputs, self.outputs = dynamic_specs(source, dtype, axes), list(source.outputs)
        self.batch, self.token_limit = source.shapes.batch, source.token_limit
        # Inputs and which of their tokens are undecided: that takes a run in float64, and is asked for each output.
        self._last: tuple[Arrays, NDArray[np.bool_] | None] | None = None

    def run(self, inputs: Arrays) -> Arrays:
        """Compute the outputs in float64.

        Raises:
            UsageError: the class does not accept inputs of these sizes.
        """
        release_memory()  # the file's run may have needed as much memory
        source, sample = self._at(inputs), self.sample(inputs)
        few = sample.get(source.family.batch_axis)
        if few is not None:
            for spec, axes in zip(self.inputs, dynamic_axes_of(source, [BATCH]), strict=True):
                for axis in axes:
                    inputs = {**inputs, spec.name: np.compress(few, inputs[spec.name], axis)}
        positions = sample.get(self.sequence_axis())
        return source.reference(inputs, None if positions is None else np.flatnonzero(positions))

    def refuses(self, inputs: Arrays) -> str | None:
        """Return why the class itself refuses inputs of these sizes, or None if it accepts them."""
        try:
            self._at(inputs)
        except UsageError as error:
            return error.what
        return None

    def sample(self, inputs: Arrays) -> Sample:
        """Return which positions and which sequences are computed."""
        source = self._at(inputs)
        batch, length = source.shapes.batch, source.shapes.seq_len
        found: dict[int, NDArray[np.bool_]] = {}
        if self._few_sequences and batch > 2:
            found[source.family.batch_axis] = np.isin(np.arange(batch), (0, batch - 1))
        positions = source.family.head_positions(source.spec) if self._heads else None
        if positions is None and self._samples:
            positions = sampled_positions(source)
        return found if positions is None else found | {self.sequence_axis(): np.isin(np.arange(length), positions)}

    def counted(self, inputs: Arrays, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Return the rows that are compared: no padding, and no token whose experts rounding decides.

        What a model computes at padding has no meaning.
        """
        kept, decided = self._kept(inputs)
        if decided is not None and _share(kept, decided) >= _LEAST_DECIDED:
            kept = decided if kept is None else kept & decided
        if kept is None:
            return None
        # A mask has no axis of channels behind that of positions.
        sample = {axis + 1 if axis < -1 else axis: chosen for axis, chosen in self.sample(inputs).items()}
        return kept_rows(take_sample(kept, sample), shape)

    def hardly_decided(self, inputs: Arrays) -> bool:
        """Return whether rounding decides the experts of nearly all tokens, so that a difference would show nothing."""
        kept, decided = self._kept(inputs)
        return decided is not None and _share(kept, decided) < _LEAST_DECIDED

    def _kept(self, inputs: Arrays) -> tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None]:
        """Return which tokens are no padding, and of which the experts are decided; None: all."""
        mask = inputs.get(self.source.family.key_mask)
        undecided = None
        if self.source.family.has_experts:  # else the class may refuse these sizes, and need not be asked
            if self._last is None or self._last[0] is not inputs:
                self._last = inputs, self._at(inputs).undecided(inputs, self._dtype)
            undecided = self._last[1]
        return None if mask is None else mask != 0, None if undecided is None else ~undecided

    def unsampled(self) -> ReferenceRunner:
        """Return the same reference without sampling."""
        whole = ReferenceRunner(self.source, self._dtype, self._axes)
        whole._heads = False
        return whole

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """Return the smallest and largest size of an input's axis; the longest sequence is the source's."""
        spec = next(spec for spec in self.inputs if spec.name == name)
        return 1, self.source.shapes.seq_len if spec.shape[axis] == SEQUENCE else None

    def sequence_axis(self, output: str = "") -> int:
        """Return the axis of the outputs that counts positions, which the family defines."""
        return self.source.family.sequence_axis

    def _at(self, inputs: Arrays) -> SourceModel:
        """Return the model at the sizes of these inputs."""
        if not self._axes:
            return self.source
        arguments = {BATCH: "batch", SEQUENCE: "seq_len"}
        sizes = {arguments[axis]: size for axis, size in sizes_of(self.inputs, inputs).items()}
        return self.source.resized(**sizes, dynamic_length=False)


def _share(kept: NDArray[np.bool_] | None, decided: NDArray[np.bool_]) -> float:
    """Return the share of kept tokens that are decided."""
    return float(decided.mean() if kept is None else decided[kept].mean())


def sampled_positions(source: SourceModel) -> NDArray[np.int64] | None:
    """Return the positions of a long sequence that the reference computes; None for all.

    For a reference that sums over the whole sequence they are the ends and evenly spaced positions between them. For
    one with a window they are the first window with the edge after it, and the last positions, from the last edge on
    if it is near. They are computed through their whole receptive field, so every layer is compared at its first and
    last windows, and through everything that influences the last positions.
    """
    length, geometry = source.shapes.seq_len, source.geometry
    if not source.family.samples or length <= (MOST_POSITIONS if geometry is None else WHOLE_UP_TO):
        return None
    if geometry is None:
        return np.unique(np.linspace(0, length - 1, MOST_POSITIONS).astype(np.int64))
    window = geometry.window_size
    last_edge = (length - 1) // window * window
    head, tail = window + 2, max(length - _TAIL, last_edge - 1)
    if _cost(source, 0, head) + _cost(source, tail, length) > 0.75 * source.depth * length:
        return None
    return np.unique(np.concatenate((np.arange(head), np.arange(tail, length))))


def _cost(source: SourceModel, first: int, end: int) -> int:
    """Count the positions to compute for the outputs at `[first, end)`, over all layers."""
    length, total = source.shapes.seq_len, 0
    for window in reversed(source.layers):
        first = window.receptive_interval(first, length)[0]
        end = window.receptive_interval(end - 1, length)[1]
        total += end - first
    return total
