"""The OpenVINO backend: it computes in the precision asked for, and reports the device that really runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ....core.error_texts import argument
from ....core.errors import MissingDependency, UsageError
from ....core.tensors import TensorSpec
from ....onnx_graph.library_errors import did_not_run, refused_as
from ....onnx_graph.onnx_file import OnnxFile
from ....onnx_graph.summary import inspect_onnx
from ..session import Arrays, Session
from .package import PACKAGE
from .prepare import readable

_log = logging.getLogger(__name__)

# The precisions it may compute in, by this package's names and OpenVINO's. By default OpenVINO computes even fp32 files
# in bf16 or fp16 where the processor has them: the demo's logits were then 0.6 off.
PRECISIONS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
# Devices in the order in which "auto" tries them. A neural processor is used only if it is named.
_DEVICES = ("gpu", "cpu", "npu")


class OpenVinoSession(Session):
    """A model compiled by OpenVINO.

    Args:
        compiled: OpenVINO's `CompiledModel`.
        inputs: what the file takes.
        outputs: what it returns.
        source: the file's name, for errors.

    Attributes:
        request: OpenVINO's `InferRequest` of callers that fill its tensors themselves; `run` takes one for each thread.
    """

    backend = "openvino"

    def __init__(self, compiled: Any, inputs: list[TensorSpec], outputs: list[TensorSpec], source: str) -> None:
        self.inputs, self.outputs, self._source = inputs, outputs, source
        self.provider = "+".join(name.lower() for name in compiled.get_property("EXECUTION_DEVICES"))
        self.notes = (f"computes in {_precision(compiled)}",)
        _fill_tables()
        self._compiled = compiled
        self.request = compiled.create_infer_request()
        self._idle = [self.request]  # a request computes for one caller at a time

    def _execute(self, inputs: Arrays) -> Arrays:
        try:
            request = self._idle.pop()
        except IndexError:  # every request computes for another thread
            request = self._compiled.create_infer_request()
        try:
            self.infer(inputs, request)
            return {spec.name: np.array(request.get_tensor(spec.name).data) for spec in self.outputs}
        finally:
            self._idle.append(request)

    def infer(self, inputs: Mapping[str, Any] | None = None, request: Any = None) -> None:
        """Run once, on these inputs or on the tensors that the request already holds; by default `self.request`.

        Raises:
            UsageError: OpenVINO refuses their values.
        """
        try:
            (request or self.request).infer(inputs, share_inputs=True)
        except Exception as error:
            raise did_not_run(str(self._source), error, _reason(error)) from error


# One thread at a time fills OpenVINO's tables.
_filling = threading.Lock()


def _fill_tables() -> None:
    """Have OpenVINO's Python binding make its tables of element types, before several threads ask for them.

    In 2026.4.1 the first two threads that do wait for each other forever: one holds a table's lock and waits for the
    interpreter, the other the interpreter's.
    """
    with _filling:
        openvino = PACKAGE.require()
        tensor = openvino.Tensor(np.zeros(1, np.float32), shared_memory=True)
        tensor.get_element_type().to_dtype()
        _ = tensor.data


def _precision(compiled: Any) -> str:
    """Return the precision it computes in, by this package's name."""
    used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    return next((name for name, hint in PRECISIONS.items() if hint == used), str(used))


def open_file(
    path: str | Path | OnnxFile,
    provider: str = "auto",
    threads: int | None = None,
    plugin: str = "auto",
    precision: str = "fp32",
) -> OpenVinoSession:
    """Open an ONNX file; arguments as of `runtime.session.load`.

    Raises:
        UsageError: the file is broken, or has something that OpenVINO computes wrongly; an unknown device or
            precision; a library of kernels.
        CheckFailed: the file was changed meanwhile.
        MissingDependency: OpenVINO is missing, or the device is not there.
    """
    file = OnnxFile.read(path)
    file.check()
    if plugin not in ("auto", "none"):
        raise UsageError(
            f"The library {plugin} cannot be used in OpenVINO.",
            why="Its kernels run in onnxruntime.",
            fix=f"Leave {argument('plugin')} out, or {argument('runtime')}.",
        )
    core = PACKAGE.require().Core()
    device = _device(core, provider)
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": PRECISIONS[precision], "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None and device == "CPU":
        options["INFERENCE_NUM_THREADS"] = threads
    summary = inspect_onnx(file)
    what = f"OpenVINO {PACKAGE.require().__version__.split('-')[0]} cannot load {file.name}."
    with readable(file) as given, refused_as(what, f"Run it in onnxruntime: leave {argument('runtime')} out.", _reason):
        compiled = core.compile_model(core.read_model(given), device, options)
    file.check_same()
    _log.info("%s runs on %s, %s", file.name, device, options)
    return OpenVinoSession(compiled, _numpy(summary.inputs), _numpy(summary.outputs), file.name)


def _device(core: Any, provider: str) -> str:
    """Return OpenVINO's name of the device to run on.

    Raises:
        UsageError: no device has this name.
        MissingDependency: it is not there.
    """
    there = [name.lower() for name in core.available_devices]
    if provider == "auto":
        return next((name for name in _DEVICES if _is_there(name, there)), "cpu").upper()
    if not _is_there(provider, there):
        raise MissingDependency(
            f"OpenVINO finds no {provider} here.",
            why=f"It has: {', '.join(there)}.",
            fix=f"Install the driver that OpenVINO names for the device, or leave {argument('provider')} out.",
        )
    return provider.upper()


def _is_there(device: str, there: list[str]) -> bool:
    """Return whether one of the devices is of this kind: a second GPU is "gpu.1"."""
    return any(name.partition(".")[0] == device for name in there)


def _numpy(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Replace bf16 by float32, because numpy has no bf16: the file runs as a copy that takes float32."""
    return [replace(spec, dtype="float32") if spec.dtype == "bfloat16" else spec for spec in specs]


def _reason(error: BaseException) -> str:
    """Return OpenVINO's message in one line of limited length, without the places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = " ".join(line for line in lines if line and not line.startswith(("Exception from", "Check '")))
    return said if len(said) <= 300 else said[:299] + "…"
