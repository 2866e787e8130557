"""Run the float64 reference of a checkpoint as `runtime.parity.compare` runs any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.machine.resident_memory import release_memory
from ...runtime.parity.runner import Runner, Sample
from ...runtime.session import Arrays
from .dynamic_axes import BATCH, SEQUENCE, at_sizes, dynamic_axes_of, dynamic_specs
from .source_model import SourceModel

# Positions of a long sequence that a reference whose cost is quadratic in the length computes.
MOST_POSITIONS = 512
# Sequence length up to which a reference with a window computes every position.
WHOLE_UP_TO = 2048
# Last positions of a longer one, at the most.
_TAIL = 64


class ReferenceRunner(Runner):
    """The float64 reference, at the sizes of the inputs it is given.

    Args:
        source: the model; where sizes are dynamic, at the largest.
        dtype: the element type that inputs have in the file.
        axes: those that the file leaves dynamic, of "batch" and "seq".
        samples: of long sequences compute some positions only, see `sampled_positions`.
        few_sequences: of a batch compute the first and the last sequence only: every one is computed alike.
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
        self._samples, self._few_sequences = samples, few_sequences
        self.inputs, self.outputs = dynamic_specs(source, dtype, axes), [source.output_name]
        self.batch, self.token_limit = source.shapes.batch, source.token_limit

    def run(self, inputs: Arrays) -> Arrays:
        """Compute the outputs in float64.

        Raises:
            UsageError: the class takes no inputs of these sizes.
        """
        release_memory()  # the file's run may have needed as much memory
        source, sample = self._at(inputs), self.sample(inputs)
        few = sample.get(source.kind.batch_axis)
        if few is not None:
            for spec, axes in zip(self.inputs, dynamic_axes_of(source, [BATCH]), strict=True):
                for axis in axes:
                    inputs = {**inputs, spec.name: np.compress(few, inputs[spec.name], axis)}
        positions = sample.get(self.sequence_axis())
        return source.reference(inputs, None if positions is None else np.flatnonzero(positions))

    def refuses(self, inputs: Arrays) -> str | None:
        """Why the class itself takes no inputs of these sizes, None if it does."""
        try:
            self._at(inputs)
        except UsageError as error:
            return error.what
        return None

    def sample(self, inputs: Arrays) -> Sample:
        """The positions and the sequences that are computed."""
        source = self._at(inputs)
        batch, length = source.shapes.batch, source.shapes.seq_len
        found: dict[int, NDArray[np.bool_]] = {}
        if self._few_sequences and batch > 2:
            found[source.kind.batch_axis] = np.isin(np.arange(batch), (0, batch - 1))
        positions = sampled_positions(source) if self._samples else None
        return found if positions is None else found | {self.sequence_axis(): np.isin(np.arange(length), positions)}

    def unsampled(self) -> ReferenceRunner:
        """The same reference, whole."""
        return ReferenceRunner(self.source, self._dtype, self._axes)

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """The longest sequence is that of the source."""
        spec = next(spec for spec in self.inputs if spec.name == name)
        return 1, self.source.shapes.seq_len if spec.shape[axis] == SEQUENCE else None

    def sequence_axis(self, output: str = "") -> int:
        """That of its class."""
        return -2 if self.source.kind.batch_axis == 0 else 0

    def _at(self, inputs: Arrays) -> SourceModel:
        """The model at the sizes of these inputs."""
        if not self._axes:
            return self.source
        sizes: Mapping[str, int] = {BATCH: self.source.shapes.batch, SEQUENCE: self.source.shapes.seq_len} | {
            name: size
            for spec in self.inputs
            for name, size in zip(spec.shape, inputs[spec.name].shape, strict=True)
            if isinstance(name, str)
        }
        return at_sizes(self.source, sizes)


def sampled_positions(source: SourceModel) -> NDArray[np.int64] | None:
    """The positions of a long sequence that the reference computes, None for all.

    A reference that sums over the whole sequence: the ends, and others evenly between them. One with a window: the
    first window with the edge after it, and the last positions, from the last edge on if that is near. They are
    computed through their whole receptive field, so every layer is compared at its first and its last windows, and
    by what reaches the last positions from all windows that they see.
    """
    length, geometry = source.shapes.seq_len, source.geometry
    if not source.kind.samples or length <= (MOST_POSITIONS if geometry is None else WHOLE_UP_TO):
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
    """Positions that have to be computed for the outputs at `[first, end)`, over all layers."""
    assert source.geometry is not None
    length, total = source.shapes.seq_len, 0
    for _ in range(source.depth):
        first = source.geometry.receptive_interval(first, length)[0]
        end = source.geometry.receptive_interval(end - 1, length)[1]
        total += end - first
    return total
