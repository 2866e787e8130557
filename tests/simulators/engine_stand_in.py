"""A stand-in for CUDA and TensorRT below Polygraphy, which runs step "engines" with onnxruntime.

Its GPU memory is host memory, filled with NaN; its stream does nothing before it is synchronised; its engine sees
addresses only, and asserts that inputs and outputs do not overlap but where it says so.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localattn.core.documents.engine_facts import BuildOptions, EngineFacts, read_engine_facts
from localattn.core.documents.sidecar import read_sidecar, sidecar_path
from localattn.core.storage.files import sha256
from localattn.runtime.engine.device import Device, platform_name
from localattn.runtime.engine.library import Messages, open_library
from localattn.runtime.engine.open import OpenEngine
from localattn.runtime.engine.plugins import find_library
from localattn.runtime.session import load

from ..support.models import step_model

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

    def create_stream(self) -> int:
        self.streams += 1
        return self.STREAM

    def destroy_stream(self, stream: int) -> None:
        assert stream == self.STREAM
        self.streams -= 1

    def stream_synchronize(self, stream: int) -> None:
        assert stream == self.STREAM
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
        up = kind.value == 1
        assert (dst if up else src) in self.memory
        self.copies.append(("up" if up else "down", nbytes))
        if stream_ptr is None:
            self.stream_synchronize(self.STREAM)
            ctypes.memmove(dst, src, nbytes)
        else:
            source = ctypes.string_at(src, nbytes) if up else src  # pageable memory is read at once
            self.queue.append(lambda: ctypes.memmove(dst, source, nbytes))


class Engine:
    """As an `ICudaEngine` of a step file, and as its only execution context.

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
        self.addresses: dict[str, int] = {}
        self.location, self.starts = location, True
        if aliases is not None:
            self.get_aliased_input_tensor = self.aliases.get

    def create_execution_context(self) -> Engine:
        return self

    def get_tensor_location(self, name: str) -> Any:
        return getattr(open_library("tensorrt-rtx").trt.TensorLocation, self.location)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.specs

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == Gpu.STREAM
        if not self.starts:
            return False
        where = dict(self.addresses)
        assert where.keys() == self.specs.keys() and set(where.values()) <= self.gpu.memory.keys()
        for output in (x.name for x in self.model.get_outputs()):
            for given in (x.name for x in self.model.get_inputs()):
                assert (where[output] == where[given]) == (self.aliases.get(output) == given), (output, given)
        self.gpu.calls.append(where)
        self.gpu.queue.append(lambda: self.compute(where))
        return True

    def compute(self, where: dict[str, int]) -> None:
        fed = {x.name: self.view(x, where[x.name]).copy() for x in self.model.get_inputs()}
        for spec, value in zip(self.model.get_outputs(), self.model.run(None, fed), strict=True):
            self.view(spec, where[spec.name])[...] = value

    def view(self, spec: Any, address: int) -> np.ndarray:
        dtype = np.dtype({"tensor(int64)": np.int64, "tensor(float)": np.float32}[spec.type])
        count = int(np.prod(spec.shape)) * dtype.itemsize
        return np.frombuffer((ctypes.c_char * count).from_address(address), dtype).reshape(spec.shape)


class Bench:
    """A folder of step engines, and the stand-ins that run them.

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
        monkeypatch.setattr("localattn.runtime.engine.step_session.open_engine", self.open)

    def write(self, **options: Any) -> Path:
        """Step and prefill "engines" of the hand-made model: copies of the ONNX files, with an engine's facts."""
        step = step_model.write(self.path.parent, **{"vocabulary": VOCABULARY, "chunk": CHUNK, **options})
        for onnx in step.parent.glob("*.onnx"):
            as_engine(onnx)
        return self.path

    def open(self, path: Path, plugin: str = "auto") -> OpenEngine:
        find_library(read_engine_facts(path).plugin, path, plugin)
        engine = self.engines[path.name] = Engine(path, self.gpu, self.aliases, self.location)
        library: Any = SimpleNamespace(messages=self.messages, trt=open_library("tensorrt-rtx").trt)
        return OpenEngine(read_engine_facts(path), library, Device("Orin", 87, "12.6"), engine)


def as_engine(onnx: Path) -> Path:
    """A copy of the file under an engine's name, with the facts that `localattn build` writes."""
    path = onnx.with_suffix(".engine")
    shutil.copy(onnx, path)
    session = load(onnx)
    facts = EngineFacts(
        backend="tensorrt-rtx", library_version="1.7.1.116", targets=["sm_87"], platform=platform_name(), dtype="fp32",
        inputs=session.inputs, outputs=session.outputs, options=BuildOptions(plugin="none"), onnx_name=onnx.name,
        onnx_sha256=sha256(onnx), engine_sha256=sha256(path), engine_bytes=path.stat().st_size, created="",
        model=read_sidecar(onnx),
    )  # fmt: skip
    sidecar_path(path).write_text(facts.to_json())
    return path
