"""A whole exported model: its time over that of its matrix products and attention nodes, and beside PyTorch's.

The ratio comes from onnxruntime's profiler, the fastest run of each operator: what a model takes beyond its products
and attention is norms, activations, residual streams, rotary and copies. The times come from interleaved calls.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from localattn.core.node import VARIANT_BY_OP_TYPE
from localattn.exporter.export import ExportRequest, open_request
from localattn.exporter.export import export as run_export
from localattn.runtime.arrays import random_inputs

from .candidates import THREADS
from .clock import Run, interleave
from .target import Target

LIMIT = 1.15
PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")
_PROFILED_RUNS, _SAMPLES, _LEAST = 20, 15, 5


def measure(checkpoint: Path, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        checkpoint: of a LocalTransformer, its configuration beside it.
        seconds: how long to wait for calm samples.
        tell: told each step.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {"fp32": folder / "fp32.onnx", "int8": folder / "int8.onnx"}
        for precision, path in files.items():
            tell(f"Exporting, {precision}")
            run_export(ExportRequest(checkpoint, path, weights=None if precision == "fp32" else precision))
        _, source = open_request(ExportRequest(checkpoint, folder / "other.onnx"))
        feed = random_inputs(source.inputs("fp32"), 0, token_limit=source.token_limit)
        tell("Profiling")
        operators = _profile(files["fp32"], feed, folder)
        runs: dict[str, Callable[[], Run]] = {
            f"localattn, {precision}": _ready(path, feed) for precision, path in files.items()
        }
        runs["local-attention, eager"] = _upstream(source, feed)
        tell("Timing")
        measured = interleave(runs, samples=_SAMPLES, least=_LEAST, seconds=seconds)
        sizes = {precision: path.stat().st_size for precision, path in files.items()}
    core = operators["products"] + operators["attention"]
    return {
        "checkpoint": checkpoint.name,
        "seq_len": source.shapes.seq_len,
        "threads": THREADS,
        "products_ms": round(operators["products"], 3),
        "attention_ms": round(operators["attention"], 3),
        "others_ms": {name: round(value, 3) for name, value in operators["others"].most_common()},
        "others_by_module_ms": {name: round(value, 3) for name, value in operators["by_module"].most_common()},
        "file_bytes": sizes,
        "others_cpu": None if math.isnan(measured.others) else round(measured.others, 3),
        "candidates": {name: timing.in_milliseconds() for name, timing in measured.timings.items()},
        "targets": [
            Target(
                "the model / its matrix products and attention nodes",
                (core + sum(operators["others"].values())) / core,
                LIMIT,
            ).to_dict()
        ],
    }


def _session(path: Path, profile_to: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 4
    if profile_to is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile_to)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _ready(path: Path, feed: dict[str, Any]) -> Callable[[], Run]:
    session = _session(path)
    return lambda: lambda: session.run(None, feed)


def _profile(path: Path, feed: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Milliseconds of one run: in matrix products, in attention nodes, and by operator in all others."""
    session = _session(path, folder / "profile")
    for _ in range(_PROFILED_RUNS):
        session.run(None, feed)
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            durations[event["name"], event["args"]["op_name"]].append(event["dur"] / 1e3)
    products = attention = 0.0
    others: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    modules = _modules(path)
    for (name, operator), times in durations.items():
        # Inlined nodes carry their function's name; a layout change that is left of one of them lost its own.
        inlined = any(f"_inlfunc_{op_type}_" in name for op_type in VARIANT_BY_OP_TYPE)
        moved = operator == "Transpose" and name.startswith("Transpose")
        if inlined or moved or operator in VARIANT_BY_OP_TYPE:
            attention += min(times)
        elif operator in PRODUCTS:
            products += min(times)
        else:
            others[operator] += min(times)
            by_module[modules.get(name.removesuffix("_kernel_time").split("/")[0], "")] += min(times)
    return {"products": products, "attention": attention, "others": others, "by_module": by_module}


def _modules(path: Path) -> dict[str, str]:
    """The module each node came from, layers taken together: `layers.*.0.branch.norm`."""
    return {
        node.name: re.sub(r"^layers\.\d+", "layers.*", entry.value)
        for node in onnx.load(path, load_external_data=False).graph.node
        for entry in node.metadata_props
        if entry.key == "module"
    }


def _upstream(source: Any, feed: dict[str, Any]) -> Callable[[], Run]:
    """The model the weights are from, in eager PyTorch, with the same weights."""
    from local_attention import LocalTransformer

    torch.set_num_threads(THREADS)
    module = LocalTransformer(**source.args.model_dump())
    module.load_state_dict({name: x.float() for name, x in source.state.items()}, strict=False)
    tokens = torch.from_numpy(np.asarray(feed["tokens"]))

    def run() -> object:
        with torch.inference_mode():
            return module.eval()(tokens)

    return lambda: run
