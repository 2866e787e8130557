"""Loading the library into onnxruntime and running each of its kernels once, in models of one node without a body."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.cpu_library import ELEMENT_TYPES, HOW_TO_BUILD, OLDEST_ONNXRUNTIME, OP_TYPES
from ...core.errors import CheckFailed, MissingDependency
from ...core.geometry import WindowGeometry
from ...core.node import DOMAIN, DOMAIN_VERSION, VARIANT_BY_OP_TYPE, NodeAttributes, NodeVariant
from ...core.processor import refuse_foreign

_BATCH, _LENGTH, _HEADS, _HEAD_DIM = 1, 24, 2, 8
_WINDOW = NodeAttributes(WindowGeometry(8, 1, 0, causal=True), _HEAD_DIM**-0.5)
_OPSET, _IR_VERSION = 20, 9  # which every onnxruntime that takes the library reads


@dataclass(frozen=True)
class CheckedLibrary:
    """What onnxruntime made of a library.

    Args:
        onnxruntime: its release.
        instruction_set: which the kernels use on this processor: "avx512", "avx2", "neon" or "baseline".
        kernels: op types and the element types that ran.
    """

    onnxruntime: str
    instruction_set: str
    kernels: dict[str, list[str]]


def check_library(library: Path) -> CheckedLibrary:
    """Run every kernel of a library in onnxruntime.

    Raises:
        UsageError: no such file, or no library for this processor.
        MissingDependency: onnxruntime or onnx is not installed, or does not take the library.
        CheckFailed: a kernel does not run, or computes something else.
    """
    refuse_foreign(library)
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
        options.register_custom_ops_library(str(library.resolve()))
    except Exception as error:
        raise MissingDependency(
            f"onnxruntime {ort.__version__} does not load {library}.",
            why=" ".join(str(error).split()),
            fix=f"It takes libraries from release {OLDEST_ONNXRUNTIME} on. Build again: {HOW_TO_BUILD} --force",
        ) from error
    kernels: dict[str, list[str]] = {}
    for op_type in OP_TYPES:
        for dtype in ELEMENT_TYPES:
            _run(ort, options, VARIANT_BY_OP_TYPE[op_type], dtype)
            kernels.setdefault(op_type, []).append(dtype)
    return CheckedLibrary(ort.__version__, _instruction_set(library), kernels)


def _run(ort: Any, options: Any, variant: NodeVariant, dtype: str) -> None:
    """One call on equal scores: every query's output is the mean of the values it sees."""
    name = f"{variant.op_type} in {dtype}"
    model, feed = _model(variant, dtype), _feed(variant, dtype)
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        [output] = session.run(None, feed)
    except Exception as error:
        why = " ".join(str(error).split())
        raise CheckFailed(f"{name} does not run.", why=why, fix=f"Build it again: {HOW_TO_BUILD} --force") from error
    first, end = _WINDOW.geometry.visible_interval(np.arange(_LENGTH), _LENGTH)
    value = feed["value"].astype(np.float64)
    expected = np.stack([value[:, a:b].mean(axis=1) for a, b in zip(first, end, strict=True)], axis=1)
    worst = float(np.abs(output - expected).max())
    if not worst < 1e-2:
        raise CheckFailed(f"{name} computes something else.", why=f"It is off by {worst:.3g}.")


def _feed(variant: NodeVariant, dtype: str) -> dict[str, Any]:
    element = {"fp32": np.float32, "fp16": np.float16}[dtype]
    shape = (_BATCH, _LENGTH, _HEADS, _HEAD_DIM)
    value = np.random.default_rng(0).standard_normal(shape).astype(element)
    given = {
        "query": np.ones(shape, element),
        "key": np.ones(shape, element),
        "value": value,
        "key_mask": np.ones((_BATCH, _LENGTH), bool),
        "attn_bias": np.zeros((_HEADS, _WINDOW.geometry.window_size, _WINDOW.geometry.keys_per_window), element),
    }
    return {name: given[name] for name in variant.input_names}


def _model(variant: NodeVariant, dtype: str) -> bytes:
    """A model of one node, serialized."""
    try:
        from onnx import TensorProto, helper
    except ImportError as error:
        raise MissingDependency("onnx cannot be imported.", why=str(error), fix="pip install onnx") from error
    element = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}[dtype]
    feed = _feed(variant, dtype)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.BOOL if name == "key_mask" else element, array.shape)
        for name, array in feed.items()
    ]
    output = helper.make_tensor_value_info("output", element, feed["value"].shape)
    node = helper.make_node(variant.op_type, list(feed), ["output"], domain=DOMAIN, **_WINDOW.as_onnx())
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    graph = helper.make_graph([node], "check", inputs, [output])
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString()
    return serialized


def _instruction_set(library: Path) -> str:
    """What the library says of itself; "unknown" if it does not."""
    try:
        ask = ctypes.CDLL(str(library.resolve())).localattn_instruction_set
    except (OSError, AttributeError):
        return "unknown"
    ask.restype = ctypes.c_char_p
    answer: bytes = ask()
    return answer.decode("ascii", "replace")
