"""Step files as engines: the caches stay in GPU memory for the whole run.

A call uploads tokens and position and downloads logits, nothing else. Each cache has two buffers that take turns: one
is read, the other written. Step engine and prefill engine share them. The ONNX file's `in_place` says that its nodes
allow one buffer for both, but TensorRT orders the nodes itself, and documents one address for an input and an output
only where `ICudaEngine::getAliasedInputTensor` (since TensorRT 10.15) names the pair. There it must be one address. So
the engine is queried for every cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....core.errors import UsageError
from ....core.storage.library_store import AUTO
from ....core.tensors import TensorSpec
from ..step_file import Prefill, check_caches, other_tensors, step_record, zeros
from ..step_session import FileStep
from .gpu.arrays import nbytes
from .gpu.executor import Call, GpuWork, Refused, check_on_gpu, starting
from .gpu.memory import download, upload
from .open import OpenEngine, open_engine, use_device
from .session import check_place

if TYPE_CHECKING:
    from ....core.documents.sidecar import Sidecar
    from ....core.documents.step_record import CacheRecord, StepRecord


class _Caches:
    """The caches of a model, each with the buffer that is read next and, where needed, one that takes turns with it.

    Args:
        records: of the caches.
        gpu: allocates their buffers.
    """

    def __init__(self, records: Sequence[CacheRecord], gpu: GpuWork) -> None:
        self._records, self._gpu = records, gpu
        self._read = [self._place(cache, cache.input) for cache in records]
        self._other = [0] * len(records)  # addresses; 0 is none yet

    def _place(self, cache: CacheRecord, name: str) -> int:
        return self._gpu.buffer(name, nbytes(cache.shape, cache.dtype)).address

    def clear(self) -> None:
        """Upload the caches' initial values; the other buffers are written before they are read."""
        for cache, address in zip(self._records, self._read, strict=True):
            value = np.full(cache.shape, cache.fill, dtype=cache.dtype)
            upload(value, address, self._gpu.stream.ptr)
            self._gpu.stream.synchronize()

    def addresses(self, shared: Sequence[bool]) -> Iterator[tuple[str, int]]:
        """Yield names of graph inputs and outputs, and the addresses where the next call reads and writes them.

        Args:
            shared: for each cache, whether it is written where it is read; otherwise its other buffer is allocated.
        """
        for index, (cache, one) in enumerate(zip(self._records, shared, strict=True)):
            if not one and not self._other[index]:
                self._other[index] = self._place(cache, cache.output)
            yield cache.input, self._read[index]
            yield cache.output, (self._read if one else self._other)[index]

    def turn(self, shared: Sequence[bool]) -> None:
        """Swap the buffers after a call, so that what was written is read next."""
        for index, one in enumerate(shared):
            if not one:
                self._read[index], self._other[index] = self._other[index], self._read[index]


class _BoundEngine:
    """One step or prefill engine, its inputs and outputs bound to GPU memory; all but caches also have host memory.

    Args:
        path: the engine.
        opened: the same, in the GPU.
        record: of the file it was built from.
        caches: what it reads and writes.
        gpu: for everything else.

    Raises:
        UsageError: the engine is not what its sidecar says.
        MissingDependency: the GPU has not enough memory for it.
    """

    def __init__(self, path: Path, opened: OpenEngine, record: StepRecord, caches: _Caches, gpu: GpuWork) -> None:
        check_caches(opened.sidecar, record, path)
        self.inputs, self.output = other_tensors(opened.sidecar, record)
        self._position_input, self._caches, self._stream = record.position_input, caches, gpu.stream
        self._shared = _shared(path, opened, record)
        fed = [*self.inputs, TensorSpec(record.position_input, "int64", (1,))]
        self._host = {spec.name: zeros(spec) for spec in (*fed, self.output)}
        self._device = {name: gpu.buffer((path, name), array.nbytes).address for name, array in self._host.items()}
        self._fed = [spec.name for spec in fed]
        self._call()  # this allocates missing buffers before anything is consumed
        # Last, because the session keeps it: where memory ends before, the next attempt does not find one more.
        self.executor = gpu.executor(opened)

    def run(self, inputs: Mapping[str, NDArray[Any]], position: int) -> NDArray[Any]:
        """Run on inputs that fit, and return the output's buffer.

        If the run does not start, the caches are unchanged.
        """
        for name, array in inputs.items():
            self._host[name][...] = array
        self._host[self._position_input][0] = position
        for name in self._fed:
            upload(self._host[name], self._device[name], self._stream.ptr)
        self.executor.run(self._call())
        output = self._host[self.output.name]
        download(self._device[self.output.name], output, self._stream.ptr)
        self._stream.synchronize()
        self._caches.turn(self._shared)
        return output

    def _call(self) -> Call:
        """Return where the next call reads and writes; with two buffers a cache there are two such calls."""
        return Call((*self._device.items(), *self._caches.addresses(self._shared)))


class EngineStep(FileStep):
    """A step engine, and its prefill engine if there is one.

    Args:
        path: the step engine.
        sidecar: of the ONNX file it was built from.
        prefill: as of `FileStep`.
        provider: as of `check_place`.
        threads: the same.
        plugin: the plugin library of both, as `open_engine` takes it.

    Raises:
        UsageError: the engine is not what its sidecar says.
        MissingDependency: the GPU has not enough memory for it.
    """

    early_start = False  # not tried on a GPU

    def __init__(
        self,
        path: Path,
        sidecar: Sidecar,
        prefill: Prefill | None,
        provider: str,
        threads: int | None,
        plugin: str = AUTO,
    ) -> None:
        opened = open_engine(path, plugin, check_place(path, provider, threads))
        record = step_record(sidecar)
        self.backend, self.provider = opened.sidecar.backend, opened.device.provider
        self._device, self._messages = opened.device, opened.opened.messages
        self._path, self._plugin, self._cuda_graph = path, plugin, False
        with starting(path, opened):
            self._gpu = GpuWork()
            self._closer = weakref.finalize(self, self._gpu.free)
            self._caches = _Caches(record.caches, self._gpu)
            step = _BoundEngine(path, opened, record, self._caches, self._gpu)
            self._caches.clear()
        self._engines = {record.chunk: step}
        super().__init__(path, sidecar, prefill, step.inputs, step.output)

    def use_cuda_graph(self) -> None:
        """Record the step and launch it as a CUDA graph; where that fails, a warning says why and steps run as before.

        The two buffers of a cache take turns, so there are two graphs; a prefill engine has its own.
        """
        self._cuda_graph = True
        self._messages.clear()
        use_device(self._device)
        for bound in self._engines.values():
            bound.executor.use_graphs()

    def _clear(self) -> None:
        use_device(self._device)
        self._caches.clear()

    def _execute(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        from polygraphy.exception import PolygraphyException

        use_device(self._device)
        engine = self._engines.get(chunk) or self._open_prefill()
        self._messages.clear()
        try:
            return engine.run(inputs, self.position)
        except (PolygraphyException, Refused) as error:
            raise UsageError(
                f"{self._path} did not run at position {self.position}.",
                why=self._messages.reason(error),
                fix="Begin anew; if it happens again, build the engine again on this machine.",
            ) from error

    def _open_prefill(self) -> _BoundEngine:
        assert self._prefill is not None, "only a prefill engine adds a chunk"
        path, record = Path(self._prefill[0]), self._prefill[1]
        opened = open_engine(path, self._plugin, self._device.index)
        with starting(path, opened):
            bound = _BoundEngine(path, opened, record, self._caches, self._gpu)
        if self._cuda_graph:
            bound.executor.use_graphs()
        self._engines[record.chunk] = bound
        return bound

    def close(self) -> None:
        """Free the GPU memory; the session cannot run any more."""
        self._closer()


def _shared(path: Path, opened: OpenEngine, record: StepRecord) -> list[bool]:
    """Return, for each cache, whether the engine writes it where it reads it.

    Raises:
        UsageError: it writes a cache over something else, or needs an input or output in host memory.
    """
    check_on_gpu(path, opened)
    ask = getattr(opened.engine, "get_aliased_input_tensor", lambda _: None)
    owners = [ask(cache.output) or None for cache in record.caches]
    fits = all(owner in (None, cache.input) for owner, cache in zip(owners, record.caches, strict=True))
    if not fits:
        raise UsageError(
            f"{path} cannot be stepped.",
            why="It writes a cache over another one.",
            fix="Build it with localattn build, from a step file of localattn export.",
        )
    return [owner is not None for owner in owners]
