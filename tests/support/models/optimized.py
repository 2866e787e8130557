"""The graph that onnxruntime makes of a model and really runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime


def operators(model: bytes | str, folder: Path, level: str = "EXTENDED", *, library: str | None = None) -> Counter[str]:
    """Operators of the optimized graph, on the CPU, with a library of compiled kernels or without."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    if library is not None:
        options.register_custom_ops_library(library)
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
