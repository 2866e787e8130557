"""Time and memory of the AFT-local node against labml's own forward, without the four matrices that both have.

Batch 1, biases up to 31 positions away, fp32. The time is the processor's on one thread, which other programs disturb
little. All outputs are compared before anything is timed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from localattn.core.nodes.aft import AftVariant
from localattn.core.nodes.attention import DOMAIN, DOMAIN_VERSION
from localattn.core.versions import DEFAULT_OPSET, IR_VERSION

from ..clock import Timing
from ..target import Target
from .compiled import NoKernel, library
from .memory import MIB, in_child

LENGTHS, DIMS, WINDOW, THREADS = (1024, 4096), (64, 512), 32, 1
LABELS = {"kernel": "kernel", "function": "function", "upstream": "labml-nn, eager"}
AGREEMENT = 2e-5
# The most time over upstream's, and the most memory of a call, inputs and outputs counted, over these.
MOST_TIME = {"kernel": 1 / 4, "function": 1.0}
MOST_MEMORY = 4.0
_SAMPLES = 5
_SAMPLE = 0.05  # seconds of calls, at the least


def measure(lengths: Sequence[int], tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        lengths: sequence lengths.
        tell: told each step.
    """
    library()
    rows = []
    for length, dim, causal in product(lengths, DIMS, (True, False)):
        tell(f"Timing T = {length}, D = {dim}, {'causal' if causal else 'not causal'}")
        rows.append(_measure_size(length, dim, causal))
        tell(_line(rows[-1]))
    targets = [target for row in rows for target in _targets(row)]
    return {
        "setting": {"batch": 1, "window": WINDOW, "dtype": "fp32", "threads": THREADS, "time": "of the processor"},
        "labels": LABELS,
        "sizes": rows,
        "targets": [target.to_dict() for target in targets],
    }


def _targets(row: dict[str, Any]) -> list[Target]:
    found = row["candidates"]
    name = f"T = {row['length']}, D = {row['dim']}, {'causal' if row['causal'] else 'not causal'}"
    times = [
        Target(f"{name}: {ours} over upstream", found[ours]["median_ms"] / found["upstream"]["median_ms"], most)
        for ours, most in MOST_TIME.items()
    ]
    memory = [
        Target(f"{name}: memory of the {ours}", 1 + found[ours]["peak_mib"] / row["tensors_mib"], MOST_MEMORY)
        for ours in MOST_TIME
    ]
    return times + memory


def _measure_size(length: int, dim: int, causal: bool) -> dict[str, Any]:
    runs = {name: prepared(name, length, dim, causal) for name in LABELS}
    outputs = {name: np.asarray(run()) for name, run in runs.items()}
    for name in MOST_TIME:
        worst = float(np.abs(outputs[name] - outputs["upstream"]).max())
        assert worst < AGREEMENT, f"{name} differs by {worst}"
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_SAMPLES):
        for name, run in runs.items():
            samples[name].append(_processor_time(run))
    peaks = {
        name: in_child("aft", name, str(length), str(dim), str(int(causal)))["peak_bytes"] / MIB for name in MOST_TIME
    }
    candidates = {
        name: Timing.of(seconds).in_milliseconds() | ({"peak_mib": round(peaks[name], 1)} if name in peaks else {})
        for name, seconds in samples.items()
    }
    return {
        "length": length,
        "dim": dim,
        "causal": causal,
        "tensors_mib": round((4 * length * dim + length * _columns(causal)) * 4 / MIB, 2),
        "candidates": candidates,
    }


def _processor_time(run: Callable[[], Any]) -> float:
    """Seconds of this process that a call takes."""
    calls, begin = 0, time.process_time()
    while (spent := time.process_time() - begin) < _SAMPLE:
        run()
        calls += 1
    return spent / calls


def _columns(causal: bool) -> int:
    return WINDOW if causal else 2 * WINDOW - 1


def prepared(candidate: str, length: int, dim: int, causal: bool) -> Callable[[], Any]:
    """The call of a candidate, its inputs made."""
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal((length, 1, dim), np.float32) for name in ("gate", "key", "value")}
    bias = random.standard_normal((length, length), np.float32)
    if candidate == "upstream":
        return _upstream(tensors, bias, causal)
    index = np.arange(length)[:, None] + np.arange(1 - WINDOW, _columns(causal) + 1 - WINDOW)
    band = np.take_along_axis(bias, index.clip(0, length - 1), axis=1)
    return _node(tensors, band, causal, kernel=candidate == "kernel")


def _upstream(tensors: dict[str, Any], bias: Any, causal: bool) -> Callable[[], Any]:
    """Upstream's forward from its one file, because importing the package needs dozens of others."""
    package = importlib.util.find_spec("labml_nn")
    if package is None or package.origin is None:
        raise NoKernel("labml-nn is not installed")
    spec = importlib.util.spec_from_file_location("aft", Path(package.origin).parent / "transformers/aft/__init__.py")
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    torch.set_num_threads(THREADS)
    length, _, dim = tensors["key"].shape
    layer = source.AFTLocal(dim, length, WINDOW).eval()
    layer.pos_bias.data = torch.from_numpy(bias)
    for name in ("query", "key", "value", "output"):
        setattr(layer, name, torch.nn.Identity())
    given = {name: torch.from_numpy(x) for name, x in tensors.items()}
    mask = torch.ones(length, length, dtype=torch.bool)
    mask = (mask.tril() if causal else mask)[:, :, None]

    def run() -> Any:
        with torch.no_grad():
            return layer(query=given["gate"], key=given["key"], value=given["value"], mask=mask)

    return run


def _node(tensors: dict[str, Any], band: Any, causal: bool, *, kernel: bool) -> Callable[[], Any]:
    import onnxruntime as ort

    from localattn.exporter.lowering.functions import attach_functions

    def value(name: str, shape: tuple[int, ...]) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))

    inputs = [value(name, x.shape) for name, x in tensors.items()]
    bias, output = value("position_bias", band.shape), value("output", tensors["gate"].shape)
    bias.const_value = ir.tensor(band, name=bias.name)
    variant = AftVariant(causal=causal, has_mask=False)
    node = ir.node(variant.op_type, [*inputs, bias], outputs=[output], domain=DOMAIN)
    opsets = {"": DEFAULT_OPSET, DOMAIN: DOMAIN_VERSION}
    graph = ir.Graph(inputs, [output], nodes=[node], initializers=[bias], opset_imports=opsets, name="aft")
    model = ir.Model(graph, ir_version=IR_VERSION)
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    if kernel:
        options.register_custom_ops_library(str(library()))
    else:
        attach_functions(model)
    serialized = ir.serde.serialize_model(model).SerializeToString()
    session = ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, tensors)[0]


def _line(row: dict[str, Any]) -> str:
    found = row["candidates"]
    times = ", ".join(f"{LABELS[name]} {entry['median_ms']:.2f} ms" for name, entry in found.items())
    peaks = ", ".join(f"{name} {found[name]['peak_mib']:.1f}" for name in MOST_TIME)
    kind = "causal" if row["causal"] else "not causal"
    return f"T = {row['length']}, D = {row['dim']}, {kind}: {times}; MiB beside {row['tensors_mib']}: {peaks}"


def print_aft(result: dict[str, Any]) -> None:
    """One line a size, and the targets that were missed."""
    for row in result["sizes"]:
        print(_line(row))
    for target in result["targets"]:
        if not target["met"]:
            print(f"missed: {target['what']}: {target['value']} > {target['limit']}")
