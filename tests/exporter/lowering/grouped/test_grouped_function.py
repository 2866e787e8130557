"""The ONNX functions of the grouped nodes in onnxruntime, and the torch operator, against a float64 reference."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST
from localattn.core.nodes.grouped import GROUPED_VARIANTS, GroupedVariant
from localattn.exporter.lowering import function_properties
from localattn.plugins.grouped_op import grouped_attention

from ....support.models.grouped_model import LAYOUTS, GroupedCase
from ....support.models.node_model import Feed, run, session
from ....support.models.opsets import OPSETS

TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3}
WINDOWS = (
    WindowGeometry.reaching(7, 0),
    WindowGeometry.reaching(6, 4),
    WindowGeometry.reaching(0, 5),
    WindowGeometry.reaching(0, 0),
    WindowGeometry.reaching(5, 5),
    WindowGeometry(6, 0, 0, causal=True),  # chunks
    WindowGeometry(6, 0, 0),
    WindowGeometry(4, 2, 0, causal=True),
    WindowGeometry(4, 1, 1),
)
EVERYTHING = (WindowGeometry.all_keys(causal=True), WindowGeometry.all_keys(causal=False))
each_variant = pytest.mark.parametrize("variant", GROUPED_VARIANTS, ids=lambda variant: variant.op_type)


def geometries(variant: GroupedVariant) -> tuple[WindowGeometry, ...]:
    return EVERYTHING if variant.sees_all else WINDOWS


def lengths(geometry: WindowGeometry) -> list[int]:
    """Around the multiples of the window, or of the blocks of queries."""
    window = 16 if geometry.sees_all else max(geometry.window_size, geometry.backward_reach + geometry.forward_reach)
    around = {1, window - 1, window, window + 1, 2 * window, 3 * window + 1, 5 * window - 1}
    return sorted(length for length in around if length > 0)


def case_for(variant: GroupedVariant, geometry: WindowGeometry, length: int, seed: int) -> GroupedCase:
    """A case of the variant with random other properties."""
    rng = random.Random(zlib.crc32(repr((variant.op_type, geometry, length, seed)).encode()))
    heads, kv_heads = rng.choice([(4, 2), (6, 1), (3, 3), (8, 2)])
    return GroupedCase(
        geometry,
        length,
        heads,
        kv_heads,
        head_dim=rng.choice([4, 8, 20]),
        mask=variant.has_mask,
        softcap=rng.choice([1.5, 5.0]) if variant.has_softcap else 0.0,
        sinks=variant.has_sinks,
        perm=rng.choice(LAYOUTS),
        dtype="fp16" if rng.random() < 0.3 else "fp32",
        block=rng.choice([0, 0, 3, 16]) if geometry.exact_windowsize or geometry.sees_all else 0,
        opset=rng.choice(OPSETS),
        seed=seed,
    )


def check(actual: NDArray[Any], case: GroupedCase, feed: Feed) -> None:
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, case.expected(feed), rtol=0, atol=TOLERANCE[case.dtype])


def call_operator(case: GroupedCase, feed: Feed) -> torch.Tensor:
    given = {name: torch.from_numpy(array) for name, array in feed.items()}
    g = case.geometry
    output: torch.Tensor = grouped_attention(
        given["query"],
        given["key"],
        given["value"],
        given.get("key_mask"),
        given.get("sinks"),
        g.window_size,
        g.look_backward,
        g.look_forward,
        g.causal,
        g.exact_windowsize,
        case.scale,
        case.softcap,
        case.perm == SEQUENCE_FIRST,
    )
    return output


@each_variant
def test_function_and_operator_equal_the_reference(variant: GroupedVariant) -> None:
    for geometry in geometries(variant):
        around = lengths(geometry)
        for index in random.Random(geometry.describe()).sample(range(len(around)), min(4, len(around))):
            case = case_for(variant, geometry, around[index], index)
            feed = case.feed()
            check(run(case.model(), feed), case, feed)
            check(call_operator(case, feed).numpy(), case, feed)


@pytest.mark.slow
@each_variant
def test_at_every_length_and_in_every_layout(variant: GroupedVariant) -> None:
    for geometry in geometries(variant):
        for length in lengths(geometry):
            for perm in LAYOUTS:
                case = replace(case_for(variant, geometry, length, 7), perm=perm)
                feed = case.feed()
                check(run(case.model(), feed), case, feed)


@each_variant
def test_one_session_at_many_sizes(variant: GroupedVariant) -> None:
    for geometry in geometries(variant)[:2]:
        case = replace(case_for(variant, geometry, 8, 1), dynamic=True, dtype="fp32", block=0)
        opened = session(case.model())
        for batch, length in ((1, 1), (2, 3), (1, 13), (3, 64), (2, 65), (1, 200)):
            now = case.at(length, batch)
            feed = now.feed()
            check(opened.run(feed)["out"], now, feed)


@pytest.mark.parametrize("geometry", [WINDOWS[0], WINDOWS[1], WINDOWS[5], *EVERYTHING], ids=lambda g: g.describe())
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_rows_without_keys_are_zeros(geometry: WindowGeometry, sinks: bool) -> None:
    case = GroupedCase(geometry, 23, mask=True, sinks=sinks)
    feed = case.feed()
    feed["key_mask"][0] = False
    feed["key_mask"][1] = [False] * 11 + [True] * 12
    feed["key"][0] = np.inf  # nothing of what the mask hides is seen
    clean = feed | {"key": np.where(np.isfinite(feed["key"]), feed["key"], 0)}
    for output in (run(case.model(), feed), call_operator(case, clean).numpy()):
        check(output, case, clean)
        assert not output[0].any() and output[1].any()


@pytest.mark.parametrize("geometry", [WINDOWS[0], EVERYTHING[0]], ids=["window", "all"])
def test_large_scores_and_sinks_overflow_nothing(geometry: WindowGeometry) -> None:
    case = GroupedCase(geometry, 40, sinks=True, scale=40.0)
    for size in (-300.0, 0.0, 300.0):
        feed = case.feed()
        feed["sinks"][:] = np.linspace(size - 50, size + 50, 4)
        output = run(case.model(), feed)
        assert np.isfinite(output).all()
        np.testing.assert_allclose(output, case.expected(feed), rtol=0, atol=1e-3)  # scores of hundreds in fp32
        np.testing.assert_allclose(call_operator(case, feed).numpy(), case.expected(feed), rtol=0, atol=1e-3)


def test_parts_of_a_long_static_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's blocks in parts, as those of WindowedAttention."""
    monkeypatch.setattr(function_properties, "PART_BYTES", 4 * 2 * 4 * 16 * 30 * 2)
    for variant in GROUPED_VARIANTS[:8]:
        case = replace(case_for(variant, WINDOWS[1], 157, 3), block=16, dtype="fp32")
        model, feed = case.model(), case.feed()
        assert any(node.op_type == "Split" for node in model.functions[0].node)
        check(run(model, feed), case, feed)


@pytest.mark.parametrize("geometry", [WINDOWS[1], EVERYTHING[0]], ids=["window", "all"])
def test_onnx_itself_computes_the_same(geometry: WindowGeometry) -> None:
    case = GroupedCase(geometry, 21, mask=True, softcap=2.0, sinks=True, block=5)
    feed = case.feed()
    (output,) = ReferenceEvaluator(case.model()).run(None, feed)
    check(output, case, feed)


@pytest.mark.parametrize("perm", LAYOUTS, ids=["sequence_first", "heads_first"])
def test_head_h_of_the_queries_has_head_h_over_g_of_the_keys(perm: tuple[int, ...]) -> None:
    """Only one head of keys has values that are not zero."""
    for geometry in (WINDOWS[0], EVERYTHING[0]):
        case = GroupedCase(geometry, 30, heads=6, kv_heads=3, perm=perm)
        feed = case.feed()
        axis = 1 if perm == HEADS_FIRST else 2
        np.moveaxis(feed["value"], axis, 0)[[0, 2]] = 0
        output = np.moveaxis(run(case.model(), feed), axis, 0)
        assert [bool(head.any()) for head in output] == [False, False, True, True, False, False]


def test_tensorrt_rtx_builds_engines_of_the_functions() -> None:
    """Its parser takes no Scan without a state, and wants every shape inside one."""
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx builds the engines")
    for geometry in (WINDOWS[1], EVERYTHING[0]):
        case = GroupedCase(geometry, 100, mask=True, softcap=30.0, sinks=True)
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
        parsed = parser.parse(case.model().SerializeToString())
        assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
        assert builder.build_serialized_network(network, builder.create_builder_config()) is not None
