"""Run a causal model piece by piece: what a session holds between calls, whatever engine runs it.

A step file takes the next position of every sequence and the caches of all positions before; a prefill file beside
it takes a chunk of positions at once. `open_step` finds the backend by the file's suffix. A backend is a module that
defines a `StepSession` and one entry in `STEP_BACKENDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.limits import check_threads
from ...core.storage.reading import check_plain
from ...core.tensors import TensorSpec
from ..session import BACKENDS, check_file, check_inputs, read_once

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar
    from ...core.documents.step_facts import StepFacts

# An additive bias is the same at every call (`core/nodes/attention.py`): it has no positions to cut.
_WHOLE = ("attn_bias",)

_HOW_TO_EXPORT = "Export a step file: localattn export CHECKPOINT --mode step -o model_step.onnx"


@dataclass(frozen=True)
class StepBackend:
    """What runs one kind of step file.

    Args:
        module: module of this package that defines its session, imported only when such a file is opened.
        opener: its function `(path, sidecar, provider, threads, plugin) -> StepSession`.
        how: the commands that make such a file.
        without_sidecar: why there is none, where there is none; `{}` stands for its name.
    """

    module: str
    opener: str
    how: str
    without_sidecar: str


# By the suffix of the step file.
STEP_BACKENDS = {
    ".onnx": StepBackend(
        "..ort.step_session",
        "open_step_file",
        _HOW_TO_EXPORT,
        "Its sidecar {}, which says how its caches are laid out, is not beside it: copy it too.",
    ),
    ".engine": StepBackend(
        "..engine.step_session",
        "open_step_engine",
        f"{_HOW_TO_EXPORT}, and build both files it writes: localattn build model_step.onnx; "
        "localattn build model_step.prefill.onnx (with --backend tensorrt-rtx for RTX GPUs)",
        "It was built from an ONNX file without its sidecar, which says how its caches are laid out.",
    ),
}


class StepSession(ABC):
    """A model and the caches of what it has consumed. Memory and time of a call do not grow with the position.

    Args:
        facts: of the step file.
        inputs: what one call of the step file takes, without its position and caches.
        output: what it returns, without caches.
        chunks: how many positions one call can consume, ascending: those of the step file and of the prefill file.

    Attributes:
        backend: name of the engine, as in `runtime.session.BACKENDS`.
        provider: what really runs ("cpu", "cuda", …).
        sidecar: of the step file, where there is one.
        facts: of the step file.
        position: positions consumed since the start.
        notes: what a user should know of how it runs, a sentence each.
        missing_prefill: name of the prefill file that was exported with it and does not lie beside it.
        plugin: path of the library whose compiled kernels compute the attention nodes; None if their body does.
    """

    backend: str
    provider: str
    notes: tuple[str, ...] = ()
    missing_prefill: str | None = None
    plugin: str | None = None
    sidecar: Sidecar | None = None

    def __init__(self, facts: StepFacts, inputs: Sequence[TensorSpec], output: TensorSpec, chunks: Sequence[int]):
        self.facts = facts
        self.inputs, self.output, self.chunks = list(inputs), output, tuple(chunks)
        self.position = 0
        self._specs = {chunk: [self.resized(spec, chunk) for spec in self.inputs] for chunk in self.chunks}

    @property
    def max_positions(self) -> int | None:
        """How many positions there are; None for a model that runs without end."""
        return self.facts.max_positions

    def reset(self) -> None:
        """Back to position 0."""
        self.position = 0
        self._clear()

    def advance(self, inputs: Mapping[str, NDArray[Any]], *, checked: bool = False) -> NDArray[Any]:
        """Consume as many positions as one call takes.

        Args:
            inputs: one array for each of `self.inputs`, with one of `self.chunks` positions on `facts.sequence_axis`.
            checked: they are known to fit, in dtype and shape.

        Returns:
            The output at these positions, in a buffer that the next call overwrites.

        Raises:
            UsageError: an input does not fit, or the model has no position left; nothing is consumed.
        """
        chunk = self._positions(inputs)
        if not checked:
            inputs = check_inputs(self._specs.get(chunk, self.inputs), inputs)
        self._check_room(chunk)
        output = self._execute(inputs, chunk)
        self.position += chunk
        return output

    def consume(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Consume any number of positions, one at least: chunks as long as they fit, then smaller ones.

        Args:
            inputs: as for `advance`, of any length.

        Returns:
            The output of the last call, in a buffer that the next call overwrites.

        Raises:
            UsageError: as `advance`; positions are counted before anything is consumed.
        """
        return deque(self.calls(inputs), maxlen=1)[0]

    def calls(
        self, inputs: Mapping[str, NDArray[Any]], largest: int | None = None, smallest_last: int = 0
    ) -> Iterator[NDArray[Any]]:
        """Consume any number of positions as `consume` does, and give the output of each call.

        Args:
            inputs: as for `consume`.
            largest: the most positions of one call; None takes chunks as long as there are.
            smallest_last: positions at the end that are left to the smallest calls.
        """
        length, axis = self._positions(inputs), self.facts.sequence_axis
        if length == 0:
            raise UsageError("There is nothing to consume.", why="The inputs have no position.")
        self._check_room(length)
        chunks = [size for size in self.chunks if largest is None or size <= largest]
        start = 0
        while start < length:
            fitting = (size for size in chunks if size <= length - smallest_last - start)
            chunk = max(fitting, default=self.chunks[0])
            piece = {
                name: array if name in _WHOLE else _cut(array, axis, start, start + chunk)
                for name, array in inputs.items()
            }
            yield self.advance(piece)
            start += chunk

    def _positions(self, inputs: Mapping[str, NDArray[Any]]) -> int:
        """How many positions these inputs hold; what does not fit at all is left to `check_inputs`."""
        first = inputs.get(self.inputs[0].name)
        axis = self.facts.sequence_axis
        if not isinstance(first, np.ndarray) or first.ndim <= axis:
            return self.chunks[0]
        return int(first.shape[axis])

    def _check_room(self, count: int) -> None:
        """Raise `UsageError` if so many positions are not left."""
        limit = self.max_positions
        if limit is not None and self.position + count > limit:
            raise UsageError(
                f"The model has no position {limit + 1}.",
                why=f"It learned an embedding for each of {limit} positions; {self.position} are consumed and {count} "
                "more were given.",
                fix="Give a shorter prompt, generate fewer tokens, or begin anew.",
            )

    def resized(self, spec: TensorSpec, positions: int | str) -> TensorSpec:
        """One of `inputs` for another number of positions, or for an open one of this name."""
        if spec.name in _WHOLE:
            return spec
        axis = self.facts.sequence_axis
        return replace(spec, shape=(*spec.shape[:axis], positions, *spec.shape[axis + 1 :]))

    @abstractmethod
    def _clear(self) -> None:
        """Fill the caches with what they start from."""

    @abstractmethod
    def _execute(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        """Run the file of this chunk on inputs that fit, at `self.position`, and update the caches."""


def open_step(
    path: str | Path, provider: str = "auto", threads: int | None = None, *, plugin: str | Path = "auto"
) -> StepSession:
    """Open a step file, at position 0; the prefill file that its sidecar names is used if it lies beside it.

    Args:
        path: the step file or the engine built from it, the sidecar beside it.
        provider: as for `runtime.session.load`.
        threads: CPU threads for one operator, from 1 to `core.limits.most_threads()`; None leaves it to the engine.
        plugin: as for `runtime.session.load`.

    Raises:
        UsageError: no such file, no step file, no sidecar, files that do not belong together.
        CheckFailed: a file was altered after its sidecar was written.
        MissingDependency: the engine is not installed, or the provider asked for does not start.
    """
    from ...core.documents.engine_facts import read_model_facts
    from ...core.documents.sidecar import sidecar_path

    path = Path(path)
    check_threads(threads)
    suffix = path.suffix.lower()
    backend = STEP_BACKENDS.get(suffix)
    if backend is None:
        known = ", ".join(STEP_BACKENDS)
        raise UsageError(f"Cannot generate with {path}.", why=f"Its suffix is none of: {known}.", fix=_HOW_TO_EXPORT)
    check_plain(path)
    if not path.is_file():
        raise UsageError(f"Cannot generate with {path}.", why="There is no such file.", fix=backend.how)
    file = read_once(path)
    check_file(file)
    sidecar = read_model_facts(path)
    if sidecar is None:
        why = backend.without_sidecar.format(sidecar_path(path).name)
        raise UsageError(f"Cannot generate with {path}.", why=why, fix=backend.how)
    facts = step_facts(sidecar, path.name, backend.how)
    if facts.mode != "step":
        raise UsageError(
            f"{path} is a {facts.mode} file.",
            why=f"It takes {facts.chunk} positions at once; its step file takes it along.",
            fix="Give the step file.",
        )
    BACKENDS[suffix].require()
    opener = getattr(import_module(backend.module, __package__), backend.opener)
    return cast("StepSession", opener(file, sidecar, provider, threads, str(plugin)))


def step_facts(sidecar: Sidecar, name: str = "The file", how: str = _HOW_TO_EXPORT) -> StepFacts:
    """What the sidecar says about stepping.

    Args:
        sidecar: of any model.
        name: of the file, for the error.
        how: the commands that make a step file, for the error.

    Raises:
        UsageError: nothing; the file takes whole sequences.
    """
    if sidecar.step is None:
        checkpoint = sidecar.checkpoint_name or "CHECKPOINT"
        raise UsageError(
            f"{name} is not a step file.",
            why=f"It takes whole sequences of {sidecar.seq_len} positions and keeps nothing between calls.",
            fix=how.replace("CHECKPOINT", checkpoint),
        )
    return sidecar.step


def _cut(array: NDArray[Any], axis: int, start: int, stop: int) -> NDArray[Any]:
    """The positions `[start, stop)`, contiguous."""
    return np.ascontiguousarray(array[(slice(None),) * axis + (slice(start, stop),)])
