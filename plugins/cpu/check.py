"""Load the library into onnxruntime and run each kernel once, in models of one node without an ONNX function."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import CheckFailed, MissingDependency
from ...core.machine.process import without_telemetry
from ...core.storage.library_store import CPU_KERNELS, Library
from ...core.versions import OLDEST_IR_VERSION, OLDEST_ONNXRUNTIME, OLDEST_OPSET
from .probes import Arrays, Probe, probes

_AGAIN = f"Build it again: {CPU_KERNELS.how_to_build} --force"


@dataclass(frozen=True)
class CheckedLibrary:
    """The result of checking a library in onnxruntime.

    Args:
        onnxruntime: its release.
        instruction_set: which the kernels use on this processor: "avx512", "avx2", "neon" or "baseline".
        kernels: op types and the element types that ran.
    """

    onnxruntime: str
    instruction_set: str
    kernels: dict[str, list[str]]


def check_library(library: Library) -> CheckedLibrary:
    """Run every kernel of a library in onnxruntime.

    Raises:
        MissingDependency: onnxruntime or onnx is not installed, or does not take the library.
        CheckFailed: a kernel does not run, or computes a wrong result.
    """
    without_telemetry()
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise MissingDependency(
            "The library cannot be loaded: onnxruntime cannot be imported.",
            why=str(error),
            fix="Install it: pip install onnxruntime",
        ) from error
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        options.register_custom_ops_library(library.image)
    except Exception as error:
        raise MissingDependency(
            f"onnxruntime {ort.__version__} does not load {library.path}.",
            why=library.in_words(error),
            fix=f"Libraries need onnxruntime {OLDEST_ONNXRUNTIME} or later. {_AGAIN}",
        ) from error
    kernels: dict[str, list[str]] = {}
    for probe in probes():
        _run(ort, options, probe)
        kernels.setdefault(probe.op_type, []).append(probe.dtype)
    return CheckedLibrary(ort.__version__, _instruction_set(library), kernels)


def _run(ort: Any, options: Any, probe: Probe) -> None:
    """Run one probe and compare its outputs within rounding."""
    name, model = f"{probe.op_type} in {probe.dtype}", _model(probe)
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        outputs = session.run(list(probe.expected), probe.feed)
    except Exception as error:
        why = " ".join(str(error).split())
        raise CheckFailed(f"{name} does not run.", why=why, fix=_AGAIN) from error
    for output, expected in zip(outputs, probe.expected.values(), strict=True):
        worst = float(np.abs(output - expected).max())
        if not worst < 1e-2:
            raise CheckFailed(f"{name} computes a wrong result.", why=f"Its largest error is {worst:.3g}.")


def _model(probe: Probe) -> bytes:
    """Return a serialized model of one node without an ONNX function."""
    try:
        from onnx import TensorProto, helper
    except ImportError as error:
        raise MissingDependency("onnx cannot be imported.", why=str(error), fix="pip install onnx") from error
    own = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}[probe.dtype]
    other = {"bool": TensorProto.BOOL, "int64": TensorProto.INT64, "float32": TensorProto.FLOAT}

    def described(arrays: Arrays, of: Any) -> list[Any]:
        return [helper.make_tensor_value_info(name, of(array), array.shape) for name, array in arrays.items()]

    node = helper.make_node(probe.op_type, [*probe.feed], [*probe.expected], domain=probe.domain, **probe.attributes)
    opsets = [helper.make_opsetid("", OLDEST_OPSET), helper.make_opsetid(probe.domain, 1)]
    given = described(probe.feed, lambda array: other.get(array.dtype.name, own))
    graph = helper.make_graph([node], "check", given, described(probe.expected, lambda _: own))
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=OLDEST_IR_VERSION).SerializeToString()
    return serialized


def _instruction_set(library: Library) -> str:
    """Return the instruction set that the library reports; "unknown" if it reports none."""
    try:
        ask = ctypes.CDLL(library.image).localattn_instruction_set
    except (OSError, AttributeError):
        return "unknown"
    ask.restype = ctypes.c_char_p
    answer: bytes = ask()
    return answer.decode("ascii", "replace")
