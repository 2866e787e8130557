"""The ONNX function of the AFT-local nodes: float64's numbers at every size, in linear memory, without a loop."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localattn.exporter.lowering.functions import attach_functions
from localattn.onnx_graph import inlining
from localattn.runtime.backends.onnxruntime.session import open_bytes

from ...support.models.aft_node import HARD, WIDE, Case, expected, feed, finest

SIZES = [(1, 0), (2, 1), (7, 0), (7, 6), (8, 3), (9, 8), (33, 2), (64, 7), (65, 8), (100, 31), (130, 100)]


def agree(case: Case, arrays: dict[str, np.ndarray]) -> None:
    output = open_bytes(case.model(arrays), "cpu", threads=1).run(feed(arrays))["output"]
    np.testing.assert_allclose(output, expected(case, arrays), atol=finest(arrays), rtol=1e-5)


@pytest.mark.parametrize(("length", "reach"), SIZES)
def test_every_size(length: int, reach: int) -> None:
    for causal, masked in itertools.product((False, True), repeat=2):
        case = Case(length, reach, causal, masked, batch=1 + length % 2)
        agree(case, case.inputs())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("change", [name for name in HARD if name not in WIDE])
def test_hard_numbers(change: str, causal: bool) -> None:
    for length, masked in ((96, False), (77, True)):
        case = Case(length, 6, causal, masked, dim=5)
        agree(case, case.inputs(change=change))


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_the_channels_are_computed_alike(causal: bool) -> None:
    """So long that a part has few channels, and the last one fewer."""
    case = Case(1100 if causal else 2200, 3, causal, masked=True, dim=131)
    arrays = case.inputs()
    model = onnx.load_from_string(case.model(arrays))
    assert sum(node.op_type == "Sigmoid" for node in model.functions[0].node) == 1
    assert sum(node.op_type == "Div" for node in model.functions[0].node if len(node.input) == 2) >= 2
    output = open_bytes(model.SerializeToString(), "cpu", threads=1).run(feed(arrays))["output"]
    alone = Case(case.length, 3, causal, masked=True, dim=1)
    for channel in (0, 65, 66, 130):
        one = {name: x[:, :, channel : channel + 1] if x.ndim == 3 else x for name, x in arrays.items()}
        np.testing.assert_allclose(output[:, :, channel : channel + 1], expected(alone, one), atol=1e-5)


@settings(max_examples=25)
@given(
    length=st.integers(1, 90),
    reach=st.integers(0, 40),
    causal=st.booleans(),
    masked=st.booleans(),
    scale=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 1000),
)
def test_any_size_and_scale(length: int, reach: int, causal: bool, masked: bool, scale: float, seed: int) -> None:
    case = Case(length, min(reach, length - 1), causal, masked, batch=2)
    arrays = case.inputs(seed)
    arrays["key"] *= np.float32(scale)
    agree(case, arrays)


@pytest.mark.parametrize("causal", [False, True])
def test_later_values_reach_no_earlier_row(causal: bool) -> None:
    """Neither do keys and values that a mask hides, whatever they are."""
    case = Case(70, 9, causal=True) if causal else Case(70, 9, masked=True)
    arrays = case.inputs()
    hidden = np.arange(70) >= 40
    if not causal:
        arrays["key_mask"] = ~hidden[None]
    right = expected(case, arrays)
    arrays["value"][hidden], arrays["key"][hidden] = np.inf, np.nan
    output = open_bytes(case.model(arrays), "cpu", threads=1).run(feed(arrays))["output"]
    seen = ~hidden if causal else slice(None)
    np.testing.assert_allclose(output[seen], right[seen], atol=1e-5)


def test_nodes_of_several_sizes_share_a_function() -> None:
    """The function is built for the longest sequence and the longest reach."""
    cases = [Case(50, 3, causal=True), Case(90, 20, causal=True), Case(8, 0, causal=True)]
    models = [ir.from_proto(onnx.load_from_string(c.model(c.inputs(), function=False))) for c in cases]
    first = models[0]
    for number, other in enumerate(models[1:]):
        for node in list(other.graph):
            values = [*other.graph.inputs, *other.graph.outputs, *other.graph.initializers.values()]
            for value in values:
                value.name = f"{value.name}_{number}"
            inputs, outputs = list(other.graph.inputs), list(other.graph.outputs)
            weights = list(other.graph.initializers.values())
            other.graph.inputs.clear(), other.graph.outputs.clear(), other.graph.initializers.clear()
            other.graph.remove(node)
            node.name = f"node_{number}"
            first.graph.inputs.extend(inputs)
            first.graph.outputs.extend(outputs)
            for weight in weights:
                first.graph.register_initializer(weight)
            first.graph.append(node)
    attach_functions(first)
    arrays = [case.inputs() for case in cases]
    fed = dict(feed(arrays[0]))
    for number, more in enumerate(arrays[1:]):
        fed |= {f"{name}_{number}": array for name, array in feed(more).items()}
    session = open_bytes(ir.to_proto(first).SerializeToString(), "cpu", threads=1)
    outputs = session.run(fed)
    for case, array, name in zip(cases, arrays, ("output", "output_0", "output_1"), strict=True):
        np.testing.assert_allclose(outputs[name], expected(case, array), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_memory_without_a_loop(causal: bool) -> None:
    length = 331  # prime: no product of other sizes
    case = Case(length, 8, causal, dim=4)
    plain = inlining.apply(onnx.load_from_string(case.model(case.inputs())))
    graph = onnx.shape_inference.infer_shapes(plain, strict_mode=True, data_prop=True).graph
    assert {node.op_type for node in graph.node}.isdisjoint({"Loop", "Scan", "If", "CumSum"})
    shapes = [[d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.value_info]
    assert len(shapes) > 100
    for shape in shapes:
        assert sum(size >= length for size in shape) <= 1 and math.prod(shape) <= 100 * length, shape
