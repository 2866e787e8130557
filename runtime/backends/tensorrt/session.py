"""The engine backend: an engine of TensorRT or TensorRT-RTX as a `Session`."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.documents.engine_sidecar import ProfileRecord
from ....core.errors import UsageError
from ....core.renamed import RenamedAttribute
from ....core.tensors import TensorSpec
from ..session import Arrays, Session, check_inputs, check_names, check_shape, misfit
from .gpu.arrays import GpuArray, GpuView, UnusableArray, nbytes, view_of
from .gpu.executor import Call, GpuWork, Refused, check_on_gpu, starting
from .gpu.memory import ALIGNMENT, copy, download, empty, readable, upload
from .kernels import loaded_kernels
from .open import OpenEngine, open_engine, use_device
from .plugins import mapped_library

# An engine has machine code for one kind of GPU; each of these names means the first one, "cuda:1" the second.
_PROVIDERS = ("auto", "cuda", "tensorrt")


class EngineSession(Session):
    """An engine loaded on its GPU.

    Its inputs and outputs have places in GPU memory, which it keeps from call to call. Memory and streams are those of
    Polygraphy's CUDA wrapper; torch is not needed.

    Args:
        opened: the engine, deserialised.
        source: the file's name, for errors.

    Raises:
        MissingDependency: the GPU has not enough memory for it.
    """

    facts = RenamedAttribute("sidecar")

    def __init__(self, opened: OpenEngine, source: str) -> None:
        self.backend = opened.sidecar.backend
        self.provider = opened.device.provider
        self.device = opened.device
        self.sidecar = opened.sidecar
        self.inputs = list(opened.sidecar.inputs)
        self.outputs = list(opened.sidecar.outputs)
        self._source = source
        self._messages = opened.opened.messages
        self._lock = threading.RLock()  # one context, and one place for each tensor: one call at a time
        check_on_gpu(source, opened)
        with starting(source, opened):
            self._gpu = GpuWork()
            self._closer = weakref.finalize(self, self._gpu.free)
            self._executor = self._gpu.executor(opened)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Which machine code or PTX of the plugin library was loaded, a line a kernel; complete after a run."""
        library = mapped_library(self.sidecar.plugin)
        return () if library is None else loaded_kernels(library)

    @property
    def replays_graph(self) -> bool:
        """Whether calls are launched as a CUDA graph; where they were to be and are not, a note says why."""
        return bool(self._executor.cuda_graph) and not self.notes

    def use_cuda_graph(self) -> None:
        """Record a call whose shapes come again as a CUDA graph, and launch that from the third time on.

        Where this fails, now or later, calls run as before; a note and a warning say why.
        """
        with self._lock:
            self._messages.clear()
            use_device(self.device)
            self._executor.use_graphs()
            self._note_graphs()

    def run_on_gpu(self, inputs: Mapping[str, Any]) -> dict[str, GpuArray]:
        """Run the model once, and leave the results in GPU memory.

        Args:
            inputs: one array for each of `self.inputs`: contiguous, on this GPU, of any library that has DLPack or
                `__cuda_array_interface__`, and of exactly its dtype and shape; or a numpy array as `run` takes it.

        Returns:
            One array for each of `self.outputs`, ready to be read. The next call, of whatever kind, writes its results
            to the same place: be done with them before, or copy them.

        Raises:
            UsageError: as of `run`, or an array of another library cannot be used.
        """
        check_names(self.inputs, inputs)
        sizes: dict[str, int] = {}
        with self._working():
            call, outputs, _keep = self._prepared({spec: self._accepted(spec, inputs, sizes) for spec in self.inputs})
            self._launch(call)
        return outputs

    def bound(self, inputs: Arrays) -> Callable[[], None]:
        """Upload inputs that fit; return a call that computes with them, and neither uploads nor downloads."""
        with self._working():
            call, _, _keep = self._prepared({spec: inputs[spec.name] for spec in self.inputs})
            self._launch(call)

        def again() -> None:
            with self._lock:
                use_device(self.device)
                self._launch(call)

        return again

    def _execute(self, inputs: Arrays) -> Arrays:
        stream = self._gpu.stream
        with self._working():
            call, outputs, _keep = self._prepared({spec: inputs[spec.name] for spec in self.inputs})
            self._executor.run(call)
            values = {name: empty(array.shape, array.dtype) for name, array in outputs.items()}
            for name, value in values.items():
                download(outputs[name].address, value, stream.ptr)
            stream.synchronize()
            self._note_graphs()
        return {name: readable(value, outputs[name].dtype) for name, value in values.items()}

    def _launch(self, call: Call) -> None:
        self._executor.run(call)
        self._gpu.stream.synchronize()
        self._note_graphs()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Have the GPU current, which depends on the thread, alone; turn failures into errors with their reason."""
        from polygraphy.exception import PolygraphyException

        with self._lock:
            self._messages.clear()
            use_device(self.device)
            try:
                yield
            except (PolygraphyException, Refused) as error:
                raise UsageError(
                    f"{self._source} did not run on these inputs.",
                    why=self._messages.reason(error),
                    fix="Check that the shapes lie within the sizes it was built for: localattn inspect shows them.",
                ) from error

    def _accepted(self, spec: TensorSpec, inputs: Mapping[str, Any], sizes: dict[str, int]) -> NDArray[Any] | GpuView:
        """Return an input that fits, as numpy array or as a view of memory of the GPU."""
        array = inputs[spec.name]
        if isinstance(array, np.ndarray):
            ready: NDArray[Any] | GpuView = check_inputs([spec], {spec.name: array})[spec.name]
        else:
            try:
                ready = view_of(array, self._gpu.stream.ptr, self.device.index)
            except UnusableArray as error:
                raise misfit(spec, f"an array that cannot be used: {error}") from error
            if ready.dtype != spec.dtype:
                raise misfit(spec, f"dtype {ready.dtype}")
        check_shape(spec, ready.shape, sizes)
        return ready

    def _prepared(
        self, inputs: Mapping[TensorSpec, NDArray[Any] | GpuView]
    ) -> tuple[Call, dict[str, GpuArray], list[Any]]:
        """Put inputs where the engine reads them; return the call, where it writes, and what must live until then."""
        addresses = {spec.name: self._placed(spec.name, array) for spec, array in inputs.items()}
        profile = self._profile({spec.name: array.shape for spec, array in inputs.items()})
        shapes = tuple((spec.name, tuple(array.shape)) for spec, array in inputs.items() if self._is_dynamic(spec))
        outputs = {}
        for spec in self.outputs:
            # Fixed sizes need not be asked for.
            shape = tuple(size for size in spec.shape if isinstance(size, int))
            if self._is_dynamic(spec):
                shape = self._executor.shape_of(spec.name, profile, shapes)
            if any(size < 0 for size in shape):
                raise Refused(f"The sizes of {spec.name} depend on more than the sizes of the inputs.")
            place = self._gpu.buffer(spec.name, nbytes(shape, spec.dtype))
            outputs[spec.name] = GpuArray(place, shape, spec.dtype, self.device.index)
            addresses[spec.name] = place.address
        return Call(tuple(addresses.items()), shapes, profile), outputs, list(inputs.values())

    def _is_dynamic(self, spec: TensorSpec) -> bool:
        return any(not isinstance(size, int) for size in spec.shape)

    def _placed(self, name: str, array: NDArray[Any] | GpuView) -> int:
        """Return where the engine reads an input: its own address, or a place of ours that it is copied to."""
        stream = self._gpu.stream.ptr
        fixed = self._executor.cuda_graph  # a graph reads where it was recorded to read
        if isinstance(array, GpuView) and not fixed and array.address and array.address % ALIGNMENT == 0:
            return array.address
        place = self._gpu.buffer(name, array.nbytes)
        if not array.nbytes:
            return place.address
        if isinstance(array, GpuView):
            copy(array.address, place.address, array.nbytes, stream)
        else:
            upload(array, place.address, stream)
        return place.address

    def _note_graphs(self) -> None:
        why = self._executor.why_no_graph
        self.notes = (f"CUDA graphs are not used: {why}",) if why else ()

    def _profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the optimization profile that these sizes fit, if the engine has several.

        Of those that fit it is the one with the smallest largest sizes, which was tuned nearest to them.

        Raises:
            UsageError: they fit none.
        """
        ranges: dict[int, list[ProfileRecord]] = {}
        for profile in self.sidecar.options.profiles:
            ranges.setdefault(profile.profile, []).append(profile)
        if len(ranges) < 2:
            return 0
        fitting = [number for number in sorted(ranges) if _fits(ranges[number], shapes)]
        if not fitting:
            sizes = "; ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise UsageError(
                f"{self._source} was not built for these sizes.",
                why=f"They are {sizes}, and lie in none of its {len(ranges)} profiles.",
                fix="localattn inspect shows the sizes of each.",
            )
        return min(fitting, key=lambda number: sum(prod(entry.max) for entry in ranges[number]))

    def close(self) -> None:
        """Free the GPU memory; the session cannot run any more."""
        self._closer()


def _fits(profile: Sequence[ProfileRecord], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the sizes of all inputs lie in a profile, which has an entry for each input."""
    return all(
        low <= size <= high
        for entry in profile
        for low, size, high in zip(entry.min, shapes[entry.input], entry.max, strict=True)
    )


def open_file(path: Path, provider: str = "auto", threads: int | None = None, plugin: str = "auto") -> EngineSession:
    """Open an engine; `plugin` as in `open_engine`.

    Raises:
        UsageError: a provider other than the GPU, a number of threads, or what `open_engine` refuses.
        MissingDependency: the library, the driver or the plugin library is missing.
        CheckFailed: the sidecar or the plugin library were changed after the build.
    """
    gpu = check_place(path, provider, threads)
    return EngineSession(open_engine(path, plugin, gpu), str(path))


def check_place(path: Path, provider: str, threads: int | None) -> int:
    """Refuse to run an engine anywhere but on a GPU; return which: 1 for "cuda:1".

    Raises:
        UsageError: another provider, or a number of threads.
    """
    numbered = re.fullmatch(r"cuda:(\d{1,3})", provider)
    if provider not in _PROVIDERS and numbered is None:
        raise UsageError(f"{path} cannot run on {provider!r}.", why="An engine runs on the GPU it was built for.")
    if threads is not None:
        raise UsageError(f"{path} takes no number of threads.", why="An engine runs on the GPU.")
    return 0 if numbered is None else int(numbered[1])
