"""The pass that joins what writes residual streams, what reads them, and the norm of what is read."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from localattn.exporter.lowering.functions import attach_functions
from localattn.onnx_graph.fusing import streams
from localattn.runtime.backends.onnxruntime.session import open_bytes

from ..support.native.cpu_build import library
from ..support.native.fused_reference import random_inputs

pytest.importorskip("onnxruntime", reason="onnxruntime computes the graphs")

# Two branches: one writes to the streams, the next one reads, normalizes and writes again.
SIZES = {"streams": [2, 5, 4, 16], "mix": [2, 5, 4, 4], "beta": [2, 5, 4, 1], "output": [2, 5, 16]}
WEIGHTS = {"weight": [16, 6], "gain": [4, 6], "constant": [4, 6], "scale": [16], "shift": [16]}
ONE_TOKEN = {"streams": [4, 16], "mix": [4, 4], "beta": [4, 1], "output": [1, 16]}
WRITE = "written = localattn.fused.MixStreams(streams, mix, beta, output)"
READ = "read, mix2, beta2 = localattn.fused.ReadStreams({0}, weight, gain, constant)"
NORM = "normal = LayerNormalization<axis = -1, epsilon = 0.00001>(read, scale, shift)"
AGAIN = "after = localattn.fused.MixStreams({0}, mix2, beta2, normal)"


def joined(body: list[str], sizes: dict[str, list[int]] = SIZES) -> Counter[str]:
    """The nodes after the pass; every way to compute them gives what the graph gave before."""
    inputs = ", ".join(f"float[{', '.join(map(str, size))}] {name}" for name, size in sizes.items())
    result = f"float[{', '.join(map(str, sizes['streams']))}] after"
    text = f"g ({inputs}) => ({result}) {{ {'  '.join(line.format('written') for line in body)} }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "localattn.fused" : 1]> {text}')
    for name, array in random_inputs(WEIGHTS, np.float32, seed=1).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    read = [*sizes["streams"][:-2], sizes["streams"][-1]] if len(sizes["streams"]) > 2 else [1, sizes["streams"][-1]]
    shapes = {"written": sizes["streams"], "read": read, "mix2": sizes["mix"], "beta2": sizes["beta"], "normal": read}
    for name, shape in shapes.items():
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    before, after = (ir.from_proto(model) for _ in range(2))
    streams.apply(after)
    feed = random_inputs(sizes, np.float32)
    found = []
    for graph, plugin in ((before, "none"), (after, "none"), (after, library())):
        if plugin == "none":
            attach_functions(graph)
        proto = ir.to_proto(graph)
        onnx.checker.check_model(proto)
        found.append(open_bytes(proto.SerializeToString(), "cpu", 1, plugin).run(feed)["after"])
    for output in found[1:]:
        np.testing.assert_allclose(output, found[0], atol=2e-5, rtol=2e-5)
    return Counter(node.op_type for node in after.graph)


@pytest.mark.parametrize("sizes", [SIZES, ONE_TOKEN], ids=["tokens", "one token"])
def test_a_write_a_read_and_a_norm_become_one_node(sizes: dict[str, list[int]]) -> None:
    nodes = joined([WRITE, READ, NORM, AGAIN], sizes)
    assert nodes == {"MixReadStreamsNorm": 1, "MixStreams": 1}


def test_a_view_between_read_and_norm_stays_behind_them() -> None:
    """As of a chunk's tokens, which are one sequence."""
    sizes = {name: [1, *size[1:]] for name, size in SIZES.items()}
    view = "row = Squeeze(read, zero)  norm = LayerNormalization<epsilon = 0.00001>(row, scale, shift)"
    start = "zero = Constant<value_ints = [0]>()"
    nodes = joined([start, WRITE, READ, view, "normal = Unsqueeze(norm, zero)", AGAIN], sizes)
    assert nodes == {"MixReadStreamsNorm": 1, "MixStreams": 1, "Squeeze": 1, "Unsqueeze": 1, "Constant": 1}


def test_streams_that_no_mix_wrote_are_read_and_normalized() -> None:
    nodes = joined(["written = Neg(streams)", "gone = Add(mix, mix)", READ, NORM, AGAIN], SIZES)
    assert nodes == {"Neg": 1, "Add": 1, "ReadStreamsNorm": 1, "MixStreams": 1}


@pytest.mark.parametrize(
    "norm",
    [
        NORM.replace("0.00001", "0.001"),
        NORM.replace("-1", "1"),
        NORM.replace(", shift", ""),
        NORM.replace("(read, scale", "(read, made"),
        NORM.replace("normal =", "other =") + "  normal = Add(other, read)",
    ],
    ids=["epsilon", "axis", "no shift", "computed", "read twice"],
)
def test_another_norm_stays(norm: str) -> None:
    made = ["made = Neg(scale)"] if "made" in norm else []
    if "axis = 1" in norm:
        norm = norm.replace("scale, shift", "wide, wide")
        made = ["one = Constant<value_ints = [5, 16]>()", "wide = Expand(scale, one)"]
    nodes = joined([*made, WRITE, READ, norm, AGAIN])
    assert nodes["LayerNormalization"] == nodes["ReadStreams"] == 1 and nodes["MixStreams"] == 2
