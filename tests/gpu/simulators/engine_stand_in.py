"""A stand-in for CUDA and TensorRT below Polygraphy, which runs "engines" with onnxruntime.

Its GPU memory is host memory, filled with NaN; its stream does nothing before it is synchronised; its engine sees
addresses only, and asserts that inputs and outputs do not overlap but where it says so. A CUDA graph holds what it was
recorded with, and may only be launched while its execution context has not been touched, as NVIDIA documents it.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localattn.core.documents.engine_sidecar import BuildOptions, EngineSidecar, read_engine_sidecar
from localattn.core.documents.sidecar import read_sidecar, sidecar_path
from localattn.core.storage.files import sha256
from localattn.runtime.backends.tensorrt.device import Device, platform_name
from localattn.runtime.backends.tensorrt.library import Messages, open_library
from localattn.runtime.backends.tensorrt.open import OpenEngine
from localattn.runtime.backends.tensorrt.plugins import find_library
from localattn.runtime.session import load

from ...support.models import step_model

VOCABULARY, CHUNK = 23, 4
CACHES = {"ring": "next_ring", "age": "next_age"}
# Bytes of the hand-made model: logits of a token, and both caches.
LOGITS, RING, AGE = 4 * VOCABULARY, 4 * step_model.WINDOW * step_model.WIDTH, 4


class Gpu:
    """As Polygraphy's CUDA wrapper, on host memory, with one stream whose work waits to be synchronised.

    Attributes:
        memory: what is allocated: address → bytes.
        calls: executions: addresses of all inputs and outputs.
        copies: ("up" or "down", bytes) of each copy.
        room: allocations that are left before there is no memory.
    """

    STREAM = 77

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.calls: list[dict[str, int]] = []
        self.copies: list[tuple[str, int]] = []
        self.room = 1000
        self.queue: list[Callable[[], object]] = []
        self.streams = 0
        self.handle = Runtime(self)

    def create_stream(self) -> int:
        self.streams += 1
        return self.STREAM

    def destroy_stream(self, stream: int) -> None:
        assert stream == self.STREAM
        self.streams -= 1

    def stream_synchronize(self, stream: int) -> None:
        assert stream == self.STREAM and self.handle.recording is None
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def malloc(self, size: int) -> int:
        from polygraphy.exception import PolygraphyException

        self.room -= 1
        if self.room < 0:
            raise PolygraphyException("CUDA Error: 2")
        raw = np.full(size + 256, 0xFF, np.uint8)  # NaN, whatever the type
        address = raw.ctypes.data + -raw.ctypes.data % 256
        self.memory[address] = raw
        return address

    def free(self, address: int) -> None:
        if address:
            del self.memory[address]

    def memcpy(self, dst: int, src: int, nbytes: int, kind: Any, stream_ptr: int | None = None) -> None:
        assert self.handle.recording is None, "a copy is not part of the engine's work"
        up = kind.value == 1
        assert self.holds(dst if up else src, nbytes) and (kind.value != 3 or self.holds(dst, nbytes))
        self.copies.append(({1: "up", 2: "down", 3: "within"}[kind.value], nbytes))
        if stream_ptr is None:
            self.stream_synchronize(self.STREAM)
            ctypes.memmove(dst, src, nbytes)
        else:
            source = ctypes.string_at(src, nbytes) if up else src  # pageable memory is read at once
            self.queue.append(lambda: ctypes.memmove(dst, source, nbytes))

    def holds(self, address: int, size: int) -> bool:
        """Whether these bytes are allocated."""
        return any(start <= address and address + size <= start + raw.size - 255 for start, raw in self.memory.items())

    def check(self, status: int) -> None:
        from polygraphy.exception import PolygraphyException

        if status:
            raise PolygraphyException(f"CUDA Error: {status}")


class Runtime:
    """The functions of libcudart that Polygraphy does not wrap.

    Attributes:
        recording: what was given to the stream since a recording began; None without one.
        graphs: recorded graphs: handle → what each launch does.
        launches: handles of the graphs that were launched.
        fails: function → the error that it returns.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.recording = gpu, None
        self.graphs: dict[int, list[Callable[[], object]]] = {}
        self.launches: list[int] = []
        self.fails: dict[str, int] = {}
        self.last_error = 0
        self.devices: list[int] = []

    def cudaSetDevice(self, index: int) -> int:
        self.devices.append(index)
        return 0

    def cudaStreamBeginCapture(self, stream: Any, mode: Any) -> int:
        assert (stream.value, mode.value) == (Gpu.STREAM, 1) and self.recording is None
        return self.failed("cudaStreamBeginCapture") or self.begin()

    def begin(self) -> int:
        assert not self.gpu.queue, "work of the same context is still going on"
        self.recording: list[Callable[[], object]] | None = []
        return 0

    def cudaStreamEndCapture(self, stream: Any, graph: Any) -> int:
        assert self.recording is not None and stream.value == Gpu.STREAM
        work, self.recording = self.recording, None
        if status := self.failed("cudaStreamEndCapture"):
            return status
        graph._obj.value = 1000 + len(self.graphs)
        self.graphs[graph._obj.value] = work
        return 0

    def cudaGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:
        if status := self.failed("cudaGraphInstantiateWithFlags"):
            return status
        executable._obj.value = graph.value + 1000
        self.graphs[graph.value + 1000] = self.graphs[graph.value]
        return 0

    def cudaGraphDestroy(self, graph: Any) -> int:
        self.graphs[graph.value] = []
        return 0

    def cudaGraphExecDestroy(self, executable: Any) -> int:
        assert self.graphs[executable.value], "freed twice"
        self.graphs[executable.value] = []
        return 0

    def cudaGraphLaunch(self, executable: Any, stream: Any) -> int:
        assert stream.value == Gpu.STREAM and self.graphs[executable.value]
        if status := self.failed("cudaGraphLaunch"):
            return status
        self.launches.append(executable.value)
        self.gpu.queue += self.graphs[executable.value]
        return 0

    def cudaGetLastError(self) -> int:
        status, self.last_error = self.last_error, 0
        return status

    def failed(self, function: str) -> int:
        self.last_error = self.fails.get(function, 0)
        return self.last_error

    @property
    def alive(self) -> int:
        """Number of graphs that were not freed."""
        return sum(bool(work) for work in self.graphs.values())


class Engine:
    """As an `ICudaEngine`, and what its execution contexts share.

    Args:
        path: of a copy of the ONNX file.
        gpu: where its inputs and outputs lie.
        aliases: output → input, as the engine would tell; None where TensorRT is too old to tell.
        location: where it wants its inputs and outputs: "DEVICE" or "HOST".
    """

    def __init__(self, path: Path, gpu: Gpu, aliases: dict[str, str] | None, location: str) -> None:
        import onnxruntime

        self.gpu, self.aliases = gpu, aliases or {}
        self.model = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        self.specs = {x.name: x for x in (*self.model.get_inputs(), *self.model.get_outputs())}
        self.location, self.starts = location, True
        self.contexts: list[Context] = []
        self.room = 1000  # contexts that there is memory for
        self.device_memory_size_v2 = 4096
        if aliases is not None:
            self.get_aliased_input_tensor = self.aliases.get

    def create_execution_context(self, strategy: Any = None) -> Context | None:
        self.room -= 1
        if self.room < 0:
            return None
        self.contexts.append(Context(self, memory_is_given=strategy is not None))
        return self.contexts[-1]

    def get_tensor_location(self, name: str) -> Any:
        return getattr(open_library("tensorrt-rtx").trt.TensorLocation, self.location)


class Context:
    """As an execution context.

    Attributes:
        touched: how often it was told something, or ran.
        profiles: the profiles that it was told.
    """

    def __init__(self, engine: Engine, *, memory_is_given: bool) -> None:
        self.engine, self.memory_is_given, self.memory = engine, memory_is_given, 0
        self.addresses: dict[str, int] = {}
        self.shapes = {x.name: tuple(x.shape) for x in engine.model.get_inputs()}
        self.profiles: list[int] = []
        self.touched = 0
        self.flushed = False  # ran since its shapes changed
        self.capturable = True

    def is_stream_capturable(self, stream: int) -> bool:
        return self.capturable

    def set_device_memory(self, address: int, size: int) -> None:
        assert self.memory_is_given and size >= self.engine.device_memory_size_v2
        assert self.engine.gpu.holds(address, size)
        self.memory = address

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream == Gpu.STREAM
        self.profiles.append(index)
        self.touched, self.flushed = self.touched + 1, False
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        self.touched, self.flushed = self.touched + 1, False
        known = zip(self.engine.specs[name].shape, shape, strict=True)
        return all(isinstance(own, str) or own == size for own, size in known)

    def get_tensor_shape(self, name: str) -> list[int]:
        zeros = {x.name: np.zeros(self.shapes[x.name], dtype_of(x)) for x in self.engine.model.get_inputs()}
        return list(self.engine.model.run([name], zeros)[0].shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        self.touched += 1
        return name in self.engine.specs

    def execute_async_v3(self, stream: int) -> bool:
        engine, gpu = self.engine, self.engine.gpu
        assert stream == Gpu.STREAM
        if not engine.starts:
            return False
        where, shapes = dict(self.addresses), dict(self.shapes)
        assert where.keys() == engine.specs.keys() and all(gpu.holds(address, 1) for address in where.values())
        assert all(address % 256 == 0 for address in where.values())
        assert self.memory or not self.memory_is_given
        for output in (x.name for x in engine.model.get_outputs()):
            for given in (x.name for x in engine.model.get_inputs()):
                assert (where[output] == where[given]) == (engine.aliases.get(output) == given), (output, given)
        if gpu.handle.recording is not None:
            assert self.flushed, "TensorRT wants one ordinary run before a recording"
            now = self.touched
            gpu.handle.recording.append(lambda: self.compute(where, shapes, now))
            return True
        self.touched, self.flushed = self.touched + 1, True
        gpu.calls.append(where)
        now = self.touched
        gpu.queue.append(lambda: self.compute(where, shapes, now))
        return True

    def compute(self, where: dict[str, int], shapes: dict[str, tuple[int, ...]], touched: int) -> None:
        assert self.touched == touched, "the context was touched since this was given to the stream, or recorded"
        model = self.engine.model
        fed = {x.name: view(where[x.name], shapes[x.name], dtype_of(x)).copy() for x in model.get_inputs()}
        for spec, value in zip(model.get_outputs(), model.run(None, fed), strict=True):
            view(where[spec.name], value.shape, dtype_of(spec))[...] = value


def dtype_of(spec: Any) -> np.dtype[Any]:
    return np.dtype({"float": "float32"}.get(spec.type[7:-1], spec.type[7:-1]))


def view(address: int, shape: Any, dtype: np.dtype[Any]) -> np.ndarray:
    count = prod(shape) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * count).from_address(address), dtype).reshape(shape)


class Bench:
    """A folder of engines, and the stand-ins that run them.

    Attributes:
        path: the step engine.
        engines: those that were opened, by file name.
        aliases: what engines opened from now on tell; see `Engine`.
        location: where they want their inputs and outputs.
        messages: TensorRT's log.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "model_step.engine"
        self.gpu, self.messages = Gpu(), Messages()
        self.engines: dict[str, Engine] = {}
        self.aliases: dict[str, str] | None = {}
        self.location = "DEVICE"
        monkeypatch.setattr("polygraphy.cuda.cuda.G_CUDA", self.gpu)
        for room in ("session", "step_session"):
            monkeypatch.setattr(f"localattn.runtime.backends.tensorrt.{room}.open_engine", self.open)

    def write(self, **options: Any) -> Path:
        """Step and prefill "engines" of the hand-made model: copies of the ONNX files, with an engine's sidecar."""
        step = step_model.write(self.path.parent, **{"vocabulary": VOCABULARY, "chunk": CHUNK, **options})
        for onnx in step.parent.glob("*.onnx"):
            as_engine(onnx)
        return self.path

    def open(self, path: Path, plugin: str = "auto", gpu: int = 0) -> OpenEngine:
        find_library(read_engine_sidecar(path).plugin, path, plugin)
        engine = self.engines[path.name] = Engine(path, self.gpu, self.aliases, self.location)
        library: Any = SimpleNamespace(messages=self.messages, trt=open_library("tensorrt-rtx").trt)
        return OpenEngine(read_engine_sidecar(path), library, Device("Orin", 87, "12.6", gpu), engine)


def as_engine(onnx: Path) -> Path:
    """A copy of the file under an engine's name, with the sidecar that `localattn build` writes."""
    path = onnx.with_suffix(".engine")
    shutil.copy(onnx, path)
    session = load(onnx)
    sidecar = EngineSidecar(
        backend="tensorrt-rtx", library_version="1.7.1.116", targets=["sm_87"], platform=platform_name(), dtype="fp32",
        inputs=session.inputs, outputs=session.outputs, options=BuildOptions(plugin="none"), onnx_name=onnx.name,
        onnx_sha256=sha256(onnx), engine_sha256=sha256(path), engine_bytes=path.stat().st_size, created="",
        model=read_sidecar(onnx),
    )  # fmt: skip
    sidecar_path(path).write_text(sidecar.to_json())
    return path


def doubling_engine(folder: Path, name: str = "model", shape: tuple[int | str, ...] = (2, 3)) -> Path:
    """An "engine" that computes `y = 2·x + 1` where `flag` is true, else 0; without a sidecar."""
    import onnx

    tensor = onnx.helper.make_tensor_value_info
    one = onnx.numpy_helper.from_array(np.float32(1), "one")
    nothing = onnx.numpy_helper.from_array(np.float32(0), "nothing")
    nodes = [
        onnx.helper.make_node("Add", ["x", "x"], ["twice"]),
        onnx.helper.make_node("Add", ["twice", "one"], ["more"]),
        onnx.helper.make_node("Where", ["flag", "more", "nothing"], ["y"]),
    ]
    kinds = {"x": onnx.TensorProto.FLOAT, "flag": onnx.TensorProto.BOOL, "y": onnx.TensorProto.FLOAT}
    known = {name: tensor(name, kind, shape) for name, kind in kinds.items()}
    graph = onnx.helper.make_graph(nodes, "doubling", [known["x"], known["flag"]], [known["y"]], [one, nothing])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / f"{name}.onnx")
    return as_engine(folder / f"{name}.onnx")
