"""Step files in onnxruntime: every buffer is bound once, so that a call allocates nothing and copies no cache.

Where a file may overwrite its caches (`in_place`), each cache is one buffer, bound as input and as output. Where it may
not, two banks of buffers take turns, which have those rings in common that compiled kernels overwrite. The step file
and the prefill file share them. Caches live on the device that runs the model; tokens, position and logits in host
memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....core.storage.library_store import AUTO
from ....onnx_graph.onnx_file import OnnxFile
from ..session import Arrays
from ..step_file import Prefill, check_caches, data_inputs, step_record, zeros
from ..step_session import FileStep
from .package import PACKAGE
from .prefill_file import leaner, rings_to_share
from .providers import PROVIDERS
from .session import OnnxRuntimeSession, open_file

if TYPE_CHECKING:
    from ....core.documents.sidecar import Sidecar
    from ....core.documents.step_record import CacheRecord, StepRecord

_NOTHING = np.zeros((0, 0, 0), dtype=np.float32)
# Tokens of a call from which products take no longer if each call arranges its matrices anew (docs/streaming.md).
_MANY_TOKENS = 512
# Products of fewer bits, which have no fast way without arranged matrices.
_FEW_BITS = re.compile("MatMulNBits|MatMulInteger|QuantizeLinear")


class _Banks:
    """The caches of a model, in one bank of buffers or in two that take turns.

    Args:
        record: names, shapes and first values of the caches.
        device: the device that holds them, by onnxruntime's name.

    Attributes:
        current: the bank that the next call reads.
        written: whether a call may have written since the caches had their initial values.
    """

    def __init__(self, record: StepRecord, device: str) -> None:
        self._records, self._device = record.caches, device
        self._banks: dict[int, list[tuple[Any, NDArray[Any]]]] = {}
        self._common: frozenset[str] = frozenset()
        self.current, self.written = 0, False

    def have_in_common(self, inputs: frozenset[str]) -> None:
        """Keep these caches, by the names of their inputs, once for both banks; before the second is needed."""
        self._common = inputs

    def __getitem__(self, index: int) -> list[Any]:
        """Return the buffers (OrtValues) of a bank, in the order of their records; allocated when first needed."""
        if index not in self._banks:
            other = self._banks.get(1 - index)
            bank = []
            for place, cache in enumerate(self._records):
                if other is not None and cache.input in self._common:
                    bank.append(other[place])
                else:
                    bank.append(self._new(cache))
            self._banks[index] = bank
        return [buffer for buffer, _ in self._banks[index]]

    def _new(self, cache: CacheRecord) -> tuple[Any, NDArray[Any]]:
        """Allocate the buffer of a cache; return it with the array of its initial value."""
        value = _start(cache)
        return PACKAGE.require().OrtValue.ortvalue_from_numpy(value, self._device, 0), value

    def clear(self) -> None:
        """Fill the current bank with the caches' initial values; the other one is written before it is read."""
        if not self.written:
            return
        for cache, (buffer, value) in zip(self._records, self._banks[self.current], strict=True):
            if self._device == "cpu":
                value.fill(cache.fill)  # the buffer is this array's memory
            else:
                buffer.update_inplace(value)
        self.written = False


class _BoundFile:
    """One step or prefill file with all its inputs and outputs bound to buffers.

    Args:
        session: the file, opened.
        record: of this file.
        banks: the caches it reads and writes.
    """

    def __init__(self, session: OnnxRuntimeSession, record: StepRecord, banks: _Banks) -> None:
        self._session, self._record, self._banks = session, record, banks
        self.inputs = data_inputs(session, record)
        self.outputs = [spec for spec in session.outputs if spec.name == record.logits_output]
        make = PACKAGE.require().OrtValue.ortvalue_from_numpy
        self._arrays: Arrays = {spec.name: zeros(spec) for spec in (*self.inputs, *self.outputs)}
        self._position = np.zeros(1, dtype=np.int64)
        # On the CPU an OrtValue shares the array's memory: writing the array sets the model's input.
        self._values = {name: make(array, "cpu", 0) for name, array in self._arrays.items()}
        self._values[record.position_input] = make(self._position, "cpu", 0)
        self._bindings: dict[int, Any] = {}

    def run(self, inputs: Mapping[str, NDArray[Any]], position: int) -> NDArray[Any]:
        """Run on inputs that fit, and return the output's buffer, which is empty without an output."""
        for name, array in inputs.items():
            self._arrays[name][...] = array
        self._position[0] = position
        read = self._banks.current
        written = read if self._record.in_place else 1 - read
        if read not in self._bindings:
            self._bindings[read] = self._bind(self._banks[read], self._banks[written])
        self._banks.written = True
        self._session.run_bound(self._bindings[read])
        self._banks.current = written
        return self._arrays[self.outputs[0].name] if self.outputs else _NOTHING

    def _bind(self, read: list[Any], written: list[Any]) -> Any:
        binding = self._session.io_binding()
        for name in (*(spec.name for spec in self.inputs), self._record.position_input):
            binding.bind_ortvalue_input(name, self._values[name])
        for spec in self.outputs:
            binding.bind_ortvalue_output(spec.name, self._values[spec.name])
        for cache, source, target in zip(self._record.caches, read, written, strict=True):
            binding.bind_ortvalue_input(cache.input, source)
            binding.bind_ortvalue_output(cache.output, target)
        return binding


class OnnxRuntimeStep(FileStep):
    """A step file, and its prefill file if there is one, in onnxruntime.

    Args:
        file: the step file.
        sidecar: its sidecar.
        prefill: as of `FileStep`.
        provider: as of `runtime.session.load`.
        threads: the same.
        plugin: the same.
    """

    backend = "onnxruntime"

    def __init__(
        self,
        file: Path | OnnxFile,
        sidecar: Sidecar,
        prefill: Prefill | None,
        provider: str,
        threads: int | None,
        plugin: str = AUTO,
    ) -> None:
        session = open_file(file, provider, threads, plugin)
        record = step_record(sidecar)
        check_caches(session, record, Path(file))
        self.provider, self.notes, self.plugin = session.provider, session.notes, session.plugin
        self._options = (session.provider, threads, plugin)  # to open the prefill file with
        self._opening = Lock()
        self._banks = _Banks(record, PROVIDERS[session.provider].device)
        step = _BoundFile(session, record, self._banks)
        self._files = {(record.chunk, True): step}
        super().__init__(Path(file), sidecar, prefill, step.inputs, step.outputs[0])

    def _clear(self) -> None:
        self._banks.clear()

    def _execute(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        return self._file(chunk, True).run(inputs, self.position)

    def _skip(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        return self._file(chunk, self._needs_output(chunk)).run(inputs, self.position)

    def _needs_output(self, chunk: int) -> bool:
        """Return whether calls of this chunk compute their output even if nobody looks at it.

        Where a prompt may need the output of a chunk too, one session of that file is enough.
        """
        return chunk == self.record.chunk or not self.record.early_start

    def prepare(self) -> None:
        """Open the prefill file as prompts need it."""
        longest = max(self.chunks)
        self._file(longest, self._needs_output(longest))

    def _file(self, chunk: int, with_output: bool) -> _BoundFile:
        """Return the file for this chunk, opened when first needed, with its output or without."""
        with self._opening:
            if (chunk, with_output) not in self._files:
                assert self._prefill is not None, "only a prefill file adds a chunk"
                self._files[chunk, with_output] = self._opened(*self._prefill, with_output)
            return self._files[chunk, with_output]

    def _opened(self, path: Path | OnnxFile, record: StepRecord, with_output: bool) -> _BoundFile:
        """Open the prefill file; its graph is parsed only where it is changed, or compiled kernels share its rings."""
        file = OnnxFile.read(path) if with_output else leaner(path, record)
        arranged = record.chunk < _MANY_TOKENS or any(_FEW_BITS.search(name) for _, name in file.operators)
        session = open_file(file, *self._options, arranged=arranged)
        check_caches(session, record, Path(file), output=with_output)
        if session.plugin is not None:
            self._banks.have_in_common(rings_to_share(file, record))
        return _BoundFile(session, record, self._banks)


def _start(cache: CacheRecord) -> NDArray[Any]:
    """Return the initial value of a cache. Zeros take no memory before they are written, as a long ring is."""
    if cache.fill == 0:
        return np.zeros(cache.shape, dtype=cache.dtype)
    return np.full(cache.shape, cache.fill, dtype=cache.dtype)
