"""Run a causal model piece by piece: the state of a session between calls, for every engine.

A step file takes the next position of every sequence and the caches of all positions before; the prefill file in its
it takes a chunk of positions at once. Each runtime has a subclass of `FileStep`, which `Backend.open_step` returns.

A session holds one text. It belongs to the thread that began it, so that no other one goes on in it unnoticed; another
thread begins a new text by `reset`, or says that it goes on with this one by `take_over`.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.renamed import RenamedAttribute
from ...core.tensors import TensorSpec
from .session import check_inputs
from .step_file import Prefill, prefill_path, step_record

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar
    from ...core.documents.step_record import StepRecord

# An additive bias is the same at every call (`core/nodes/attention.py`): it has no axis of positions.
_WHOLE = ("attn_bias",)
# A chunk is faster than single calls for more than this share of its positions; a shorter rest of a prompt uses single
# calls.
_WORTH_A_CHUNK = 16

_Execute = Callable[[Mapping[str, NDArray[Any]], int], NDArray[Any]]


class StepSession(ABC):
    """A model and the caches of the positions it has consumed. Memory and time of a call do not grow with the position.

    Args:
        record: of the step file.
        inputs: what one call of the step file takes, except its position and caches.
        output: its output other than the caches.
        chunks: how many positions one call can consume, ascending, with the step file and with the prefill file.

    Attributes:
        early_start: calls may begin before position 0, if the sidecar allows it too.
        backend: the runtime's name, as in `registry.py`.
        provider: what really runs ("cpu", "cuda", …).
        sidecar: of the step file, where there is one.
        record: of the step file.
        position: positions consumed since the start.
        notes: what a user should know of how it runs, a sentence each.
        missing_prefill: name of the prefill file that was exported with it and is missing from its folder.
        plugin: path of the library whose compiled kernels compute the attention nodes; None if their ONNX functions do.
        texts: how many texts were begun by `reset`.
    """

    early_start = True
    backend: str
    provider: str
    notes: tuple[str, ...] = ()
    missing_prefill: str | None = None
    plugin: str | None = None
    sidecar: Sidecar | None = None
    facts = RenamedAttribute("record")

    def __init__(self, record: StepRecord, inputs: Sequence[TensorSpec], output: TensorSpec, chunks: Sequence[int]):
        self.record = record
        self.inputs, self.output, self.chunks = list(inputs), output, tuple(chunks)
        self.position = self.texts = 0
        self._lock = threading.RLock()
        self._owner: threading.Thread | None = None
        # Threads whose text another thread ended: they must start again, even after that thread is done.
        self._ousted: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._specs = {chunk: [self.resized(spec, chunk) for spec in self.inputs] for chunk in self.chunks}

    def __repr__(self) -> str:
        """Return where it runs, its inputs, and how far it is."""
        takes = "; ".join(spec.describe() for spec in self.inputs)
        return f"<{type(self).__name__} on {self.backend}, {self.provider}: {takes}; at position {self.position}>"

    @property
    def max_positions(self) -> int | None:
        """The number of positions; None for an older file, which has no limit."""
        return self.record.max_positions

    def use_cuda_graph(self) -> None:
        """Record the step as a CUDA graph; sessions of engines can.

        Raises:
            UsageError: this session cannot.
        """
        raise UsageError(
            f"Sessions of {self.backend} do not support CUDA graphs.", fix="Build and open an engine: localattn build."
        )

    def prepare(self) -> None:
        """Open the prefill file now, if it would otherwise be opened at the first prompt.

        Another thread may do so meanwhile; the session may be used, and waits where it needs that file.

        Raises:
            UsageError: the prefill file does not open.
        """
        return

    def reset(self) -> None:
        """Return to position 0 and clear the caches; the text that begins here belongs to this thread."""
        with self.exclusive():
            self.position = 0
            self.texts += 1
            self._clear()

    def take_over(self) -> None:
        """Continue in this thread the text of another thread, when no call is running."""
        with self.exclusive():
            pass

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Take the text over as `take_over` does, and block other threads' calls inside."""
        with self._lock:
            me, before = threading.current_thread(), self._owner
            if before is not None and before is not me:
                self._ousted.add(before)
            self._ousted.discard(me)
            self._owner = me
            yield

    @contextmanager
    def own_text(self) -> Iterator[None]:
        """Let only this thread call inside.

        Raises:
            UsageError: the text belongs to another one, which still runs, or which took this one's place.
        """
        self._check_owner()  # before the lock, so that no thread waits only to be refused
        with self._lock:
            self._check_owner()
            self._owner = threading.current_thread()
            yield

    def _check_owner(self) -> None:
        owner, me = self._owner, threading.current_thread()
        if owner is None or owner is me or not (owner.is_alive() or me in self._ousted):
            return
        raise UsageError(
            f"Another thread ({owner.name}) uses this session.",
            why="Its caches belong to one text, and two threads would mix their texts.",
            fix="Open a session in each thread, or start again with reset; with take_over this thread continues the "
            "text.",
        )

    def advance(
        self, inputs: Mapping[str, NDArray[Any]], *, checked: bool = False, shared: bool = False
    ) -> NDArray[Any]:
        """Consume the positions of one call.

        Args:
            inputs: one array for each of `self.inputs`, with one of `self.chunks` positions on `record.sequence_axis`.
            checked: the inputs are known to fit in dtype and shape.
            shared: return the session's own buffer, which the next call of any thread overwrites.

        Returns:
            The output at these positions.

        Raises:
            UsageError: an input does not fit, the model has no position left, or the text is another thread's; nothing
                is consumed.
        """
        with self.own_text():
            output = self._call(self._execute, inputs, checked=checked)
            return output if shared else output.copy()

    def consume(self, inputs: Mapping[str, NDArray[Any]], *, shared: bool = False) -> NDArray[Any]:
        """Consume one or more positions: in chunks as long as they fit, then in smaller calls.

        Where a call may begin before position 0, all but the last position go in chunks, the first one filled up in
        front, and the last one goes alone. Only the last call computes its output, if the engine can leave it out.

        Args:
            inputs: as for `advance`, of any length.
            shared: the same.

        Returns:
            The output of the last call.

        Raises:
            UsageError: as `advance`; positions are counted before anything is consumed.
        """
        early = self.early_start and self.record.early_start
        with self.own_text():
            *before, last = self._pieces(inputs, None, int(early and self.position == 0))
            for piece in before:
                self._call(self._skip, *piece)
            output = self._call(self._execute, *last)
            return output if shared else output.copy()

    def calls(
        self, inputs: Mapping[str, NDArray[Any]], largest: int | None = None, smallest_last: int = 0
    ) -> Iterator[NDArray[Any]]:
        """Consume any number of positions as `consume` does, and yield the output of each call, in a shared buffer.

        Args:
            inputs: as for `consume`.
            largest: the most positions of one call; None allows the longest chunk.
            smallest_last: positions at the end that are left to calls of the smallest size. With any, a first chunk
                that is not full may be filled up.
        """
        for piece in self._pieces(inputs, largest, smallest_last):
            with self.own_text():
                output = self._call(self._execute, *piece)
            yield output

    def _pieces(
        self, inputs: Mapping[str, NDArray[Any]], largest: int | None, smallest_last: int
    ) -> list[tuple[Mapping[str, NDArray[Any]], int]]:
        """Cut inputs into calls: the inputs of each, and how many positions before 0 pad it."""
        length, axis = self._positions(inputs), self.record.sequence_axis
        if length == 0:
            raise UsageError("There are no tokens to consume.", why="The inputs have no positions.")
        inputs = check_inputs([self.resized(spec, length) for spec in self.inputs], inputs)
        self._check_room(length)
        chunks = [size for size in self.chunks if largest is None or size <= largest]
        found: list[tuple[Mapping[str, NDArray[Any]], int]] = []
        start = 0
        most, early = max(chunks), self.early_start and self.record.early_start and self.position == 0
        short = (length - smallest_last) % most if early and 0 < smallest_last < length else 0
        if short * _WORTH_A_CHUNK > most:
            first = {name: _filled(array[:, :short], most) for name, array in inputs.items()}
            found.append((first, most - short))
            start = short
        while start < length:
            fitting = (size for size in chunks if size <= length - smallest_last - start)
            chunk = max(fitting, default=self.chunks[0])
            piece = {
                name: array if name in _WHOLE else _cut(array, axis, start, start + chunk)
                for name, array in inputs.items()
            }
            found.append((piece, 0))
            start += chunk
        return found

    def _call(
        self, execute: _Execute, inputs: Mapping[str, NDArray[Any]], filled: int = 0, *, checked: bool = False
    ) -> NDArray[Any]:
        """Consume the positions of one call, the first `filled` of which are before 0; return the others' output."""
        chunk = self._positions(inputs)
        if not checked:
            inputs = check_inputs(self._specs.get(chunk, self.inputs), inputs)
        self._check_room(chunk - filled)
        self.position -= filled
        try:
            output = execute(inputs, chunk)
        except BaseException:
            self.position += filled
            raise
        self.position += chunk
        return output[:, filled:] if filled else output

    def _positions(self, inputs: Mapping[str, NDArray[Any]]) -> int:
        """Return how many positions these inputs have; `check_inputs` refuses inputs that do not fit."""
        first = inputs.get(self.inputs[0].name)
        axis = self.record.sequence_axis
        if not isinstance(first, np.ndarray) or first.ndim <= axis:
            return self.chunks[0]
        return int(first.shape[axis])

    def _check_room(self, count: int) -> None:
        """Raise `UsageError` if fewer positions than these are left."""
        limit = self.max_positions
        if limit is not None and self.position + count > limit:
            raise UsageError(
                f"The model has no position {limit + 1}.",
                why=f"{self.record.why_positions_end} {self.position} were consumed, and {count} more were given.",
                fix="Give a shorter prompt, generate fewer tokens, or start again.",
            )

    def resized(self, spec: TensorSpec, positions: int | str) -> TensorSpec:
        """Return the spec of one of `inputs` for another number of positions, or for a dynamic axis of this name."""
        if spec.name in _WHOLE:
            return spec
        axis = self.record.sequence_axis
        return replace(spec, shape=(*spec.shape[:axis], positions, *spec.shape[axis + 1 :]))

    @abstractmethod
    def _clear(self) -> None:
        """Fill the caches with their initial values."""

    @abstractmethod
    def _execute(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        """Run the file for this chunk on inputs that fit, at `self.position`, and update the caches."""

    def _skip(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        """Do as `_execute` if the output is not needed: it may have any value."""
        return self._execute(inputs, chunk)


class FileStep(StepSession):
    """A step file, and its prefill file if there is one, sharing their caches.

    Args:
        path: the step file, or the engine built from it.
        sidecar: of the step file.
        prefill: the prefill file and its sidecar's entries, opened when first needed; None without one.
        inputs: as of `StepSession`.
        output: the same.
    """

    def __init__(
        self, path: Path, sidecar: Sidecar, prefill: Prefill | None, inputs: Sequence[TensorSpec], output: TensorSpec
    ) -> None:
        record = step_record(sidecar)
        expected = prefill_path(path, record)
        self.sidecar, self._prefill = sidecar, prefill
        self.missing_prefill = expected.name if expected is not None and prefill is None else None
        super().__init__(record, inputs, output, sorted({record.chunk, prefill[1].chunk if prefill else record.chunk}))


def _filled(array: NDArray[Any], length: int) -> NDArray[Any]:
    """Repeat the first of the positions `[B, T]` in front, up to a length: tokens, or a mask."""
    return np.concatenate((array[:, :1].repeat(length - array.shape[1], axis=1), array), axis=1)


def _cut(array: NDArray[Any], axis: int, start: int, stop: int) -> NDArray[Any]:
    """Return the positions `[start, stop)` as a contiguous array."""
    return np.ascontiguousarray(array[(slice(None),) * axis + (slice(start, stop),)])
