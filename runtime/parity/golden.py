"""Read golden outputs: a file with inputs, and the outputs of the user's own model.

An .npz holds one sample under the names of the exported file's inputs and outputs, or several as `0/tokens`,
`0/logits`, `1/tokens`, … `localattn.record` writes it, and so does `numpy.savez`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.geometry import WindowGeometry
from ...core.tensors import INTEGER_MASKS, TensorSpec
from ...core.tolerance import coarsest
from ..inputs.arrays import load_arrays
from ..inputs.vocabulary import check_tokens
from ..session import Arrays, check_inputs
from .runner import Runner
from .shared_inputs import cast_to

_NUMBERED = re.compile(r"([0-9]{1,6})/(.+)")
_HOW = "Write it with localattn.record(module, inputs, path), or with numpy.savez under the names of the exported file."
Limits = Callable[[str, int], tuple[int, int | None]]


class GoldenSample(NamedTuple):
    """A set of inputs in the file's types, its outputs, and its name in reports."""

    name: str
    inputs: Arrays
    outputs: Arrays


@dataclass(frozen=True)
class Golden:
    """A file of golden outputs.

    Args:
        path: of the file.
        samples: all arrays of each sample, by name.
    """

    path: Path
    samples: Sequence[Mapping[str, NDArray[Any]]]

    @classmethod
    def read(cls, path: str | Path) -> Golden:
        """Read a file of golden outputs; nothing in it is unpickled.

        Raises:
            UsageError: no .npz file of numbers, nothing in it, numbered and plain names mixed, or NaN.
            MissingDependency: its arrays do not fit into memory.
        """
        path = Path(path)
        samples: dict[int, dict[str, NDArray[Any]]] = {}
        arrays = load_arrays(path)
        numbered = {name: _NUMBERED.fullmatch(name) for name in arrays}
        for name, array in arrays.items():
            match = numbered[name]
            if (match is None) != (None in numbered.values()):
                why = f"{name!r} belongs to a numbered sample, but other arrays do not."
                raise UsageError(f"{path} does not show which arrays belong together.", why=why, fix=_HOW)
            _check_numbers(path, name, array)
            number, plain = (0, name) if match is None else (int(match[1]), match[2])
            samples.setdefault(number, {})[plain] = array
        if not samples:
            raise UsageError(f"{path} contains no arrays.", fix=_HOW)
        return cls(path, [samples[number] for number in sorted(samples)])

    def bind(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        token_limit: int | Mapping[str, int] | None = None,
        limits: Limits = lambda name, axis: (1, None),
    ) -> Iterator[GoldenSample]:
        """Separate inputs from outputs by the names that a file has for them, and yield the samples.

        Args:
            inputs: of the exported file; dynamic axes have names.
            outputs: names of its outputs.
            token_limit: size of the vocabulary, or that of each input; None where unknown.
            limits: the smallest and the largest size of a dynamic axis, by input and axis.

        Raises:
            UsageError: a name is missing or unknown, or an input has another type or size than the file's.
        """
        for number, sample in enumerate(self.samples):
            name = self.path.name if len(self.samples) == 1 else f"{self.path.name}, sample {number}"
            wanted = {spec.name for spec in inputs}
            _check_names(self.path, sample, [spec.describe() for spec in inputs], wanted, outputs)
            given = {key: array for key, array in sample.items() if key in wanted}
            try:
                ready = check_inputs(inputs, cast_to(given, inputs))
                check_tokens(ready, token_limit)
                _check_limits(inputs, ready, limits)
            except UsageError as error:
                raise UsageError(
                    f"{name} does not fit the exported file.",
                    why=f"{error.what} {error.why}",
                    fix="Record the model on inputs of these sizes and types, or export the file for the recorded "
                    "ones.",
                ) from error
            yield GoldenSample(name, ready, {key: sample[key] for key in outputs})

    def too_short(self, windows: Sequence[WindowGeometry]) -> str:
        """Return why the samples do not show the length of the windows; "" if they do, or if there are no windows.

        A query sees at most the keys of its own window and of those around it. If a sequence has no more, every
        longer window gives the same outputs. Layers that see all keys have no such end.
        """
        keys = max((window.keys_per_window for window in windows if not window.sees_all), default=0)
        longest = max((_positions(x) for sample in self.samples for x in sample.values()), default=0)
        if not keys or longest > keys:
            return ""
        return f"sequences of {longest} tokens are too short to show where a window of {keys} keys ends"

    @property
    def precision(self) -> str | None:
        """ "fp16" if an array was recorded as float16, which sets the tolerance of finer files; else None."""
        half = any(x.dtype == np.float16 for sample in self.samples for x in sample.values())
        return "fp16" if half else None

    def coarsened(self, precision: str) -> str:
        """Return the entry of `core.tolerance` to use: the coarser of the file's and the recording's precision."""
        return coarsest([precision, self.precision or precision])


class GoldenRunner(Runner):
    """The user's own model as it was recorded: its outputs are passed to `compare`, and never computed."""

    def __init__(self, golden: Golden) -> None:
        self.name = f"the golden outputs in {golden.path.name}"

    def run(self, inputs: Arrays) -> Arrays:
        """Refuse to run: there are only recorded outputs."""
        raise NotImplementedError(f"{self.name} are not a model")


def key_mask(inputs: Arrays) -> NDArray[np.bool_] | None:
    """Return the mask input that keeps tokens, `[B, N]`; None without one."""
    found = next((inputs[name] for name in ("mask", *sorted(INTEGER_MASKS)) if name in inputs), None)
    return None if found is None else found != 0


def kept_rows(mask: NDArray[Any] | None, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Return the rows of an output that a key mask `[B, N]` keeps; None without a mask, or without axes for it.

    Args:
        mask: the input of that name, True = keep.
        shape: of the output: `[B, N, …]`, or `[B, H, N, D]`.
    """
    if mask is None or mask.dtype != np.bool_ or mask.ndim != 2:
        return None
    if shape[:2] == mask.shape:
        return mask
    if len(shape) == 4 and (shape[0], shape[2]) == mask.shape:
        return np.broadcast_to(mask[:, None, :], shape[:3])
    return None


def _positions(array: NDArray[Any]) -> int:
    """Return an array's number of positions: `[…, N, D]`, or `[B, N]` of tokens and masks; 0 for any other."""
    if array.ndim > 2:
        return int(array.shape[-2])
    return int(array.shape[1]) if array.ndim == 2 and array.dtype.kind in "biu" else 0


def _check_numbers(path: Path, name: str, array: NDArray[Any]) -> None:
    """Refuse NaN, which no result can equal.

    Raises:
        UsageError: NaN, or complex numbers.
    """
    if array.dtype.kind == "c":
        raise UsageError(
            f"{path}: {name!r} is {array.dtype}.", why="Exported files have no inputs or outputs of this type."
        )
    if array.dtype.kind == "f" and bool(np.isnan(array).any()):
        raise UsageError(
            f"{path}: {name!r} contains NaN.",
            why="NaN equals no number, so such an output proves nothing.",
            fix="Record the model on inputs for which its outputs are finite.",
        )


def _check_limits(inputs: Sequence[TensorSpec], arrays: Arrays, limits: Limits) -> None:
    """Refuse sizes of dynamic axes that the file does not accept.

    Raises:
        UsageError: one is too small or too large.
    """
    for spec in inputs:
        for axis, size in enumerate(spec.shape):
            if isinstance(size, int):
                continue
            (low, high), given = limits(spec.name, axis), arrays[spec.name].shape[axis]
            if given < low or (high is not None and given > high):
                raise UsageError(
                    f"Input {spec.name!r} has {given} on its axis {size!r}.",
                    why=f"The file accepts {low} to {'any' if high is None else high}.",
                )


def _check_names(
    path: Path, sample: Mapping[str, Any], takes: Sequence[str], inputs: set[str], outputs: Sequence[str]
) -> None:
    missing = sorted((inputs | set(outputs)) - set(sample))
    unknown = sorted(set(sample) - inputs - set(outputs))
    if missing or unknown:
        wrong = [f"It lacks {', '.join(map(repr, missing))}."] if missing else []
        wrong += [f"The file does not know {', '.join(map(repr, unknown))}."] if unknown else []
        raise UsageError(
            f"{path} does not contain the inputs and outputs of the exported file.",
            why=" ".join(wrong) + f" The file needs {'; '.join(takes)}, and returns {', '.join(outputs)}.",
            fix=_HOW,
        )


def check_type(path: Path, name: str, expected: NDArray[Any], actual: NDArray[Any]) -> None:
    """Refuse to compare a real output with whole numbers or flags.

    Raises:
        UsageError: one is real and the other is not.
    """
    if (expected.dtype.kind == "f") != (actual.dtype.kind == "f"):
        raise UsageError(
            f"{path}: {name!r} is {expected.dtype}, and the exported file returns {actual.dtype}.", fix=_HOW
        )
