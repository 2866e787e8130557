"""Test that the rows of a batch are independent, as a server that joins requests assumes.

Two properties are tried on a model whose inputs and outputs share their first axis:

    f(rows 0 … n-1)[i] = f(row i)          within the tolerance: other sizes round differently
    f(…, row i, …)[i]                       bit for bit, whatever the other rows are

The second finds what a tolerance would pass over: a scale, a mean or a maximum that spans the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core import closeness
from ...core.errors import UsageError
from ...core.tensors import INTEGER_MASKS, SEQUENCE_AXES, UNNAMED_DIMENSION, TensorSpec
from ...core.tolerance import Tolerance, tolerance_for
from .arrays import padding_mask

if TYPE_CHECKING:
    from onnx import ModelProto

    from ...core.documents.sidecar import CheckRecord

ROWS = "independent rows"
_COUNT = 3
_SPANNING = "DynamicQuantizeLinear"
# Rows of other requests may be larger by this much.
_LOUD = 8.0

Arrays = dict[str, NDArray[Any]]
Run = Callable[[Arrays], Mapping[str, NDArray[Any]]]


def open_batch(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Return whether the first axis of every tensor is the same dynamic axis, other than the sequence's."""
    first = {spec.shape[0] if spec.shape else 0 for spec in (*inputs, *outputs)}
    name = first.pop() if len(first) == 1 else 0
    return isinstance(name, str) and name not in (UNNAMED_DIMENSION, *SEQUENCE_AXES)


def spans_the_batch(proto: ModelProto) -> bool:
    """Return whether a model computes 8-bit scales over whole tensors at run time."""
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    return any(node.op_type == _SPANNING for node in nodes)


def check_rows(
    run: Run,
    examples: Iterable[Mapping[str, NDArray[Any]]],
    dtype: str,
    spans: bool = False,
    pairs: Iterable[Mapping[str, NDArray[Any]]] = (),
) -> CheckRecord:
    """Try whether the rows of axis 0 are independent.

    Args:
        run: the model, from inputs to outputs; axis 0 of every tensor is the dynamic batch.
        examples: inputs that the model takes, of one or several lengths; rows are drawn from their values.
        dtype: of the model, "fp32", "fp16" or "bf16": chooses the tolerance.
        spans: the file computes scales over the whole batch (`spans_the_batch`).
        pairs: more such inputs, long ones of a slow model: only a pair of rows is compared with one of them alone.

    Returns:
        A record: "passed" where rows are independent, else "not proven" with the reason.
    """
    from ...core.documents.sidecar import CheckRecord

    def record(status: Any, detail: str) -> CheckRecord:
        return CheckRecord(name=ROWS, status=status, detail=detail)

    if spans:
        return record(
            "not proven",
            "int8 scales are computed over the whole batch, so each row affects the rounding of the others",
        )
    tolerance = tolerance_for(dtype, None, None)
    worst, count = 0.0, 0
    given = chain(((example, False) for example in examples), ((example, True) for example in pairs))
    for number, (example, pair) in enumerate(given):
        drawn = _Rows(example, np.random.default_rng(number))
        try:
            for found in drawn.compare_pair(run, tolerance) if pair else drawn.compare(run, tolerance):
                if isinstance(found, str):
                    return record("not proven", found)
                worst, count = max(worst, found), count + 1
        except UsageError as error:
            return record("not proven", f"the file does not accept such a batch: {error.what}")
    if not count:
        return record("not proven", "there are no inputs to try")
    limit = f"{tolerance.atol or 0:g} + {tolerance.rtol or 0:g}·|x| is allowed"
    detail = f"{_COUNT} rows in one call equal {_COUNT} calls within {worst:.1e} ({limit}), over {count} calls; "
    return record("passed", detail + "other rows do not change any bit of a row")


def rows_stay_apart(run: Run, example: Mapping[str, NDArray[Any]], shared: Sequence[str]) -> bool:
    """Test that other rows do not change any bit of a row's outputs, in a file with a fixed batch.

    Args:
        run: the model, from inputs to outputs.
        example: a call; axis 0 of every input and output counts rows, but for `shared` inputs.
        shared: inputs without rows, as the position of a step file.
    """
    rowed = {name: array for name, array in example.items() if name not in shared}
    count = min(len(array) for array in rowed.values())
    before = run(dict(example))
    for row in range(count):
        others = _Rows(rowed, np.random.default_rng(row)).draw(count)
        for name, array in rowed.items():
            others[name][row] = array[row]
        after = run({**example, **others})
        if any(_differ(array[row], after[name][row]) for name, array in before.items()):
            return False
    return True


class _Rows:
    """Draw rows of a batch from the values of an example, and other rows to combine with them."""

    def __init__(self, example: Mapping[str, NDArray[Any]], generator: np.random.Generator) -> None:
        self._example, self._generator = example, generator

    def compare(self, run: Run, tolerance: Tolerance) -> Iterator[float | str]:
        """Yield the largest difference of each comparison, or the reason why rows are not independent."""
        rows = self.draw(_COUNT)
        together = run(rows)
        if (found := self._lacks_rows(together, _COUNT)) is not None:
            yield found
            return
        for row in range(_COUNT):
            yield from self._alone(run, rows, row, together, tolerance)
        for row in range(_COUNT):
            others = self.draw(_COUNT, _LOUD if row % 2 else 1.0)
            for name, array in rows.items():
                others[name][row] = array[row]
            yield from self._unchanged(row, together, run(others))
        shown = any(_differ(array[0], array[1]) for array in together.values())
        if not shown:
            yield "two rows of random inputs gave the same outputs, which proves nothing"

    def compare_pair(self, run: Run, tolerance: Tolerance) -> Iterator[float | str]:
        """Yield the difference of the last of two rows from that row alone, or the reason as `compare` does."""
        rows = self.draw(2)
        together = run(rows)
        if (found := self._lacks_rows(together, 2)) is not None:
            yield found
            return
        kept = {name: array[[1]] for name, array in together.items()}
        del together  # logits of a large vocabulary are large
        yield from self._alone(run, {name: array[[1]] for name, array in rows.items()}, 0, kept, tolerance)

    def _alone(
        self, run: Run, rows: Arrays, row: int, together: Mapping[str, NDArray[Any]], tolerance: Tolerance
    ) -> Iterator[float | str]:
        """Yield for each output how far a row in the batch is from the row alone."""
        for name, array in run({name: array[[row]] for name, array in rows.items()}).items():
            yield self._distance(name, together[name][row : row + 1], array, tolerance)

    @staticmethod
    def _lacks_rows(together: Mapping[str, NDArray[Any]], count: int) -> str | None:
        """Name an output that has no row for each row of the inputs; None if all have."""
        for name, array in together.items():
            if array.ndim == 0 or len(array) != count:
                return f"output {name!r} has no row for each row of the inputs"
        return None

    @staticmethod
    def _distance(name: str, joined: NDArray[Any], alone: NDArray[Any], tolerance: Tolerance) -> float | str:
        if joined.shape != alone.shape:
            return f"a row of output {name!r} is {list(joined.shape)} in a batch and {list(alone.shape)} alone"
        if not _differ(joined, alone) and np.isfinite(joined).all():
            return 0.0
        if not np.array_equal(np.isfinite(joined), np.isfinite(alone)):
            return f"output {name!r} is not finite in different places than alone"
        finite = np.isfinite(joined)
        if not np.array_equal(joined[~finite], alone[~finite], equal_nan=True):
            return f"output {name!r} is infinite with a different sign than alone"
        limits = tolerance.atol or 0.0, tolerance.rtol or 0.0
        figures = closeness.measure(joined[finite], alone[finite], *limits)
        if finite.any() and not closeness.accepts(figures, *limits, tolerance.cosine):
            return (
                f"a row of output {name!r} in a batch of {_COUNT} differs by {figures.max_abs:.1e} from the row alone"
            )
        return float(figures.max_abs) if finite.any() else 0.0

    @staticmethod
    def _unchanged(
        row: int, before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]
    ) -> Iterator[float | str]:
        for name, array in before.items():
            if array.shape != after[name].shape:
                yield f"the shape of output {name!r} depends on the rows"
            elif _differ(array[row], after[name][row]):
                yield f"a row of output {name!r} changes with the other rows of its batch"
            else:
                yield 0.0

    def draw(self, count: int, loud: float = 1.0) -> Arrays:
        """Draw rows of the example's kind: its values in any order, floats with noise, masks of several lengths."""
        found = {}
        for name, array in self._example.items():
            shape = (count, *array.shape[1:])
            if array.dtype == np.bool_ or name in INTEGER_MASKS:
                # The first tokens, as in a request of this length.
                kept = padding_mask(self._generator, shape) if len(shape) > 1 else np.ones(shape)
                found[name] = np.array(kept, array.dtype)
            elif array.dtype.kind == "f":
                scale = float(np.std(array.astype(np.float64))) or 1.0
                noise = self._generator.standard_normal(shape) * scale * loud
                found[name] = (self._generator.choice(array.ravel(), shape) + noise).astype(array.dtype)
            else:
                found[name] = self._generator.choice(array.ravel(), shape)
        return found


def _differ(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Return whether two arrays differ in a bit; the bits of zeros and of NaN count too."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return True
    bits, others = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (first, second))
    return not np.array_equal(bits, others)
