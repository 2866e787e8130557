"""The node's ONNX body in onnxruntime, and the torch operator, against a dense float64 reference."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import (
    HEADS_FIRST,
    LOWEST_BIAS,
    SEQUENCE_FIRST,
    VARIANT_BY_OP_TYPE,
    VARIANTS,
    NodeAttributes,
    NodeVariant,
    choose_query_block,
)
from localattn.exporter.lowering import function_properties
from localattn.exporter.lowering.attention_function import attention_function
from localattn.exporter.lowering.function_properties import MOST_PARTS, FunctionProperties, Part, properties_of
from localattn.exporter.models.local_attention import reference as float64_reference
from localattn.exporter.models.local_attention.arguments import LocalAttentionArgs
from localattn.exporter.models.local_mha.arguments import LocalMHAArgs
from localattn.exporter.models.parts.attention_op import windowed_attention_op
from localattn.plugins.torch_op import windowed_attention

from ...support import reference
from ...support.models import node_model
from ...support.models.node_model import HEAD_DIM, Feed, data_shape, feed_for, one_node, run, session
from ...support.models.opsets import OPSETS

TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3}
GEOMETRIES = (
    WindowGeometry(5, causal=True, exact_windowsize=True),
    WindowGeometry(4, 2, 0, causal=True),
    WindowGeometry(3, 0, 0, causal=True),
    WindowGeometry(4, 1, 1),
    WindowGeometry(5, 1, 2, exact_windowsize=True),
    WindowGeometry(3, 0, 1, exact_windowsize=True),
    WindowGeometry(4, 2, 0),
    WindowGeometry(1, 2, 1, exact_windowsize=True),
)
# Small windows alone would never run a block of 64.
WIDE = WindowGeometry(32, 2, 0, causal=True, exact_windowsize=True)

each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.op_type)
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.describe().replace(" ", "_"))


def lengths(window: int) -> list[int]:
    """Around the multiples of the window."""
    around = {window - 1, window, window + 1, 2 * window, 3 * window + 1, 5 * window - 1}
    return sorted(length for length in around if length)


def attributes_for(
    variant: NodeVariant, geometry: WindowGeometry, length: int, rng: random.Random, **fixed: Any
) -> NodeAttributes:
    """Random attributes that fit the geometry."""
    free = geometry.exact_windowsize and not variant.has_bias
    block = rng.choice([1, 3, 7, 16, length]) if free else geometry.window_size
    if rng.random() < 0.3:
        block = choose_query_block(geometry, length, has_bias=variant.has_bias)
    choice = {
        "scale": rng.choice([HEAD_DIM**-0.5, 0.3]),
        "shared_qk": rng.random() < 0.4,
        "perm": rng.choice([SEQUENCE_FIRST, HEADS_FIRST]),
        "query_block": block,
        "xpos_scale_base": rng.choice([2.0, max(1, geometry.window_size // 2)]) if variant.has_xpos else 0.0,
    }
    return NodeAttributes(geometry, **(choice | fixed))


def expected(attributes: NodeAttributes, feed: Feed) -> NDArray[np.float64]:
    return reference.windowed_attention(attributes, **feed)


def check(actual: NDArray[Any], attributes: NodeAttributes, feed: Feed, dtype: str) -> None:
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected(attributes, feed), rtol=0, atol=TOLERANCE[dtype])
    if "key_mask" in feed:
        dead = reference.rows_without_keys(attributes.geometry, feed["key_mask"])
        rows = actual if attributes.perm == SEQUENCE_FIRST else actual.transpose(0, 2, 1, 3)
        assert not rows[dead].any()


def seeded(*parts: object) -> random.Random:
    return random.Random(zlib.crc32(repr(parts).encode()))


@each_geometry
@each_variant
def test_body_equals_reference(variant: NodeVariant, geometry: WindowGeometry) -> None:
    rng = seeded(variant.op_type, geometry)
    for index, length in enumerate(lengths(geometry.window_size)):
        attributes = attributes_for(variant, geometry, length, rng)
        dtype = "fp16" if rng.random() < 0.35 else "fp32"
        model = one_node(variant, attributes, length, dtype=dtype, opset=rng.choice(OPSETS))
        feed = feed_for(variant, attributes, length, dtype=dtype, seed=index)
        check(run(model, feed), attributes, feed, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("perm", [SEQUENCE_FIRST, HEADS_FIRST], ids=["sequence_first", "heads_first"])
@pytest.mark.parametrize("opset", OPSETS)
def test_body_in_every_opset_layout_and_dtype(opset: int, perm: tuple[int, ...], dtype: str) -> None:
    geometry = WindowGeometry(4, 1, 1, exact_windowsize=True)
    for variant in (VARIANT_BY_OP_TYPE["WindowedAttention"], VARIANT_BY_OP_TYPE["WindowedAttentionMaskBiasXpos"]):
        attributes = attributes_for(variant, geometry, 13, random.Random(opset), perm=perm)
        feed = feed_for(variant, attributes, 13, dtype=dtype, seed=opset)
        model = one_node(variant, attributes, 13, dtype=dtype, opset=opset)
        check(run(model, feed), attributes, feed, dtype)


@pytest.mark.parametrize("block", [1, 2, 5, 16, 32, 64, 96, 100, 128, 200])
def test_any_query_block_gives_the_same(block: int) -> None:
    for op_type in ("WindowedAttention", "WindowedAttentionMaskXpos"):
        variant = VARIANT_BY_OP_TYPE[op_type]
        base = 16.0 if variant.has_xpos else 0.0
        attributes = NodeAttributes(WIDE, 0.3, query_block=block, xpos_scale_base=base)
        feed = feed_for(variant, attributes, 200, batch=1)
        check(run(one_node(variant, attributes, 200, 1), feed), attributes, feed, "fp32")


@each_variant
def test_one_session_at_many_sizes(variant: NodeVariant) -> None:
    for geometry in (WindowGeometry(4, 1, 1), WindowGeometry(4, 2, 0, causal=True, exact_windowsize=True)):
        attributes = attributes_for(variant, geometry, 8, random.Random(1))
        opened = session(one_node(variant, attributes, "length", "batch"))
        for batch, length in ((1, 1), (2, 3), (1, 4), (3, 5), (2, 8), (1, 21), (2, 64)):
            feed = feed_for(variant, attributes, length, batch, seed=length)
            check(opened.run(feed)["out"], attributes, feed, "fp32")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.has_mask], ids=lambda v: v.op_type)
def test_fully_masked_rows_are_zeros(variant: NodeVariant, dtype: str) -> None:
    for geometry in GEOMETRIES:
        attributes = attributes_for(variant, geometry, 11, seeded(geometry), shared_qk=False)
        feed = feed_for(variant, attributes, 11, dtype=dtype)
        feed["key_mask"][0] = False
        feed["key_mask"][1] = [True, *[False] * 10]
        if variant.has_bias:
            feed["attn_bias"] *= 500
        feed["query"] *= 50
        output = run(one_node(variant, attributes, 11, dtype=dtype), feed)
        check(output, attributes, feed, dtype)
        assert not output[0].any()
        assert output[1].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[4]], ids=["block_local", "exact"])
def test_a_bias_may_hide_keys(geometry: WindowGeometry, dtype: str) -> None:
    """-inf, as masks are often written; every query keeps itself."""
    window, back = geometry.window_size, geometry.look_backward
    for op_type in ("WindowedAttentionBias", "WindowedAttentionMaskBiasXpos"):
        variant = VARIANT_BY_OP_TYPE[op_type]
        attributes = attributes_for(variant, geometry, 17, seeded(op_type), shared_qk=False)
        feed = feed_for(variant, attributes, 17, dtype=dtype)
        hidden = np.random.default_rng(5).random(feed["attn_bias"].shape) < 0.5
        hidden[:, np.arange(window), back * window + np.arange(window)] = False
        feed["attn_bias"][hidden] = -np.inf
        if variant.has_mask:
            feed["key_mask"][:] = True
        model = one_node(variant, attributes, 17, dtype=dtype)
        check(run(model, feed), attributes, feed, dtype)
        check(call_operator(attributes, feed).numpy(), attributes, feed, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [-np.inf, -3e38, -1e30, -9e29])
@pytest.mark.parametrize("op_type", ["WindowedAttentionMaskBias", "WindowedAttentionMaskBiasXpos"])
def test_a_masked_key_lies_below_every_bias(op_type: str, bias: float, dtype: str) -> None:
    """The kept keys of a row may all have the lowest bias: they share its weight, and masked keys get none."""
    variant = VARIANT_BY_OP_TYPE[op_type]
    for geometry in GEOMETRIES:
        attributes = attributes_for(variant, geometry, 13, seeded(geometry), shared_qk=False)
        feed = feed_for(variant, attributes, 13, dtype=dtype, keep=0.4)
        with np.errstate(over="ignore"):
            feed["attn_bias"][:, ::2] = np.array(bias).astype(feed["attn_bias"].dtype)
        raised = feed | {"attn_bias": feed["attn_bias"].astype(np.float64).clip(LOWEST_BIAS)}
        check(run(one_node(variant, attributes, 13, dtype=dtype), feed), attributes, raised, dtype)


def test_the_self_score_replaces_the_bias() -> None:
    """A bias that hides every key of a row leaves a shared_qk token its own value."""
    variant = VARIANT_BY_OP_TYPE["WindowedAttentionBias"]
    attributes = NodeAttributes(GEOMETRIES[1], 0.3, shared_qk=True, query_block=4)
    feed = feed_for(variant, attributes, 9)
    feed["attn_bias"][:] = -1e9
    np.testing.assert_allclose(expected(attributes, feed), feed["value"], atol=1e-6)
    check(call_operator(attributes, feed).numpy(), attributes, feed, "fp32")
    check(run(one_node(variant, attributes, 9), feed), attributes, feed, "fp32")


def test_a_bias_that_hides_everything_gives_no_nan() -> None:
    variant = VARIANT_BY_OP_TYPE["WindowedAttentionBias"]
    attributes = NodeAttributes(GEOMETRIES[1], 0.3, query_block=4)
    feed = feed_for(variant, attributes, 9)
    feed["attn_bias"][:] = -np.inf
    body = run(one_node(variant, attributes, 9), feed)
    assert np.isfinite(body).all()
    np.testing.assert_allclose(call_operator(attributes, feed).numpy(), body, atol=1e-5)


@pytest.mark.parametrize("perm", [SEQUENCE_FIRST, HEADS_FIRST], ids=["sequence_first", "heads_first"])
@each_variant
def test_what_is_known_of_a_node_changes_no_result(variant: NodeVariant, perm: tuple[int, ...]) -> None:
    """The body of a short aligned sequence in its own layout, and the one that knows nothing."""
    for geometry in (GEOMETRIES[1], GEOMETRIES[3], WindowGeometry(8, 1, 1, exact_windowsize=True)):
        base = 2.0 if variant.has_xpos else 0.0
        block = geometry.window_size
        shared = geometry.causal
        attributes = NodeAttributes(geometry, 0.3, perm=perm, query_block=block, xpos_scale_base=base, shared_qk=shared)
        for length in (block, 2 * block, geometry.keys_per_window + block, 6 * block):
            properties = properties_of(variant, attributes.as_onnx(), length)
            assert properties.aligned
            assert properties.heads_first == (perm == HEADS_FIRST)
            short = block < length <= geometry.keys_per_window and not (variant.has_bias or variant.has_xpos)
            assert properties.whole == short
            sees = 1 if geometry.exact_windowsize else block  # positions from its window's first one on
            assert properties.all_seen == (short and not geometry.causal and length <= sees + geometry.forward_reach)
            feed = feed_for(variant, attributes, length)
            known = one_node(variant, attributes, length)
            plain = one_node(variant, attributes, length)
            plain.functions[0].CopyFrom(ir.serde.serialize_function(attention_function(variant, 20)))
            operators = [node.op_type for node in known.functions[0].node]
            tables = 2 * variant.has_xpos  # of the decay, for queries and for keys
            gathers = (0 if short and not variant.has_mask else 1 if short else 2 + variant.has_mask) + tables
            assert operators.count("Gather") == gathers
            for model in (known, plain):
                check(run(model, feed), attributes, feed, "fp32")


def without_parts(variant: NodeVariant, attributes: NodeAttributes, model: onnx.ModelProto, length: int) -> Any:
    """The same model with the body in one part."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    body = attention_function(variant, 20, properties_of(variant, attributes.as_onnx(), length))
    plain.functions[0].CopyFrom(ir.serde.serialize_function(body))
    return plain


@each_geometry
@each_variant
def test_parts_change_no_bit(variant: NodeVariant, geometry: WindowGeometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of at most so many blocks, lengths around the window's multiples, short whole sequences included."""
    rng = seeded("parts", variant.op_type, geometry)
    window, cut = geometry.window_size, 0
    for index, length in enumerate((2 * window, 3 * window + 1, 9 * window + 2)):
        most = rng.choice([1, 3])
        block = rng.choice([1, 3, 4]) if geometry.exact_windowsize and not variant.has_bias else geometry.window_size
        attributes = attributes_for(variant, geometry, length, rng, query_block=block)
        keys = geometry.backward_reach + geometry.forward_reach + block
        monkeypatch.setattr(function_properties, "PART_BYTES", most * 4 * 2 * 2 * block * keys)  # batch 2, 2 heads
        model = one_node(variant, attributes, length)
        feed = feed_for(variant, attributes, length, seed=index)
        output = run(model, feed)
        check(output, attributes, feed, "fp32")
        splits = [node for node in model.functions[0].node if node.op_type == "Split"]
        properties = properties_of(variant, attributes.as_onnx(), length, 4)
        assert properties.whole or bool(properties.parts) == (-(-length // block) > most)
        assert bool(splits) == bool(properties.parts)
        cut += bool(splits)
        np.testing.assert_array_equal(output, run(without_parts(variant, attributes, model, length), feed))
    assert cut


@pytest.mark.parametrize("geometry", [*GEOMETRIES, WIDE], ids=lambda g: g.describe().replace(" ", "_"))
def test_parts_are_all_blocks_and_inside_where_they_say(
    geometry: WindowGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = VARIANT_BY_OP_TYPE["WindowedAttention"]
    for block in (1, 3, geometry.window_size) if geometry.exact_windowsize else (geometry.window_size,):
        attributes = NodeAttributes(geometry, 0.3, query_block=block).as_onnx()
        keys = geometry.backward_reach + geometry.forward_reach + block
        for length in range(1, 9 * block + keys, 1 + block // 4):
            for most in (1, 2, 5):
                monkeypatch.setattr(function_properties, "PART_BYTES", most * 4 * block * keys)
                properties = properties_of(variant, attributes, length, 1)
                if properties.whole or not properties.parts:
                    continue
                assert sum(part.blocks for part in properties.parts) == -(-length // block)
                at = 0
                for part in properties.parts:
                    starts = np.arange(at, at + part.blocks) * block
                    first, end = starts - geometry.backward_reach, starts + block + geometry.forward_reach
                    assert part.inside == bool((first >= 0).all() and (end <= length).all())
                    at += part.blocks


def test_long_sequences_have_few_parts_and_short_ones_none() -> None:
    variant = VARIANT_BY_OP_TYPE["WindowedAttention"]
    geometry = WindowGeometry(512, 1, 0, causal=True, exact_windowsize=True)
    attributes = NodeAttributes(geometry, 0.125, query_block=128).as_onnx()
    large = properties_of(variant, attributes, 8192, 12).parts
    # A block of 12 heads is 3.75 MiB of scores, so that 64 blocks would be as many parts.
    assert large == (*[Part(2, False)] * 2, *[Part(2, True)] * 30)
    assert MOST_PARTS <= len(properties_of(variant, attributes, 1 << 20, 12).parts) <= MOST_PARTS + 2
    assert properties_of(variant, attributes, 1024, 1).parts == ()
    assert properties_of(variant, attributes, None, 12).parts == ()
    assert properties_of(variant, attributes, 8192, None).parts == ()


def test_what_two_nodes_share() -> None:
    parts = (Part(2, True),)
    assert FunctionProperties(aligned=True, parts=parts) & FunctionProperties(
        aligned=True, whole=True
    ) == FunctionProperties(aligned=True)
    assert FunctionProperties(parts=parts) & FunctionProperties(parts=parts) == FunctionProperties(parts=parts)


def test_reference_evaluator_agrees() -> None:
    geometry = WindowGeometry(3, 1, 1, exact_windowsize=True)
    for op_type in ("WindowedAttention", "WindowedAttentionMaskBias", "WindowedAttentionMaskBiasXpos"):
        variant = VARIANT_BY_OP_TYPE[op_type]
        attributes = attributes_for(variant, geometry, 7, random.Random(3), shared_qk=True)
        feed = feed_for(variant, attributes, 7)
        (output,) = ReferenceEvaluator(one_node(variant, attributes, 7)).run(None, feed)
        check(output, attributes, feed, "fp32")


def test_body_keeps_no_quadratic_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is not baked: nothing in the file grows with the length, but parts up to their largest number."""
    variant = VARIANT_BY_OP_TYPE["WindowedAttentionMask"]

    def size(length: int) -> int:
        return one_node(variant, NodeAttributes(WIDE, 1.0, query_block=64), length).ByteSize()

    assert abs(size(1 << 18) - size(1 << 20)) < 64
    monkeypatch.setattr(function_properties, "PART_BYTES", 1 << 40)
    assert abs(size(256) - size(1 << 20)) < 64


def call_operator(attributes: NodeAttributes, feed: Feed) -> torch.Tensor:
    return windowed_attention(*operator_arguments(attributes, feed))


def operator_arguments(attributes: NodeAttributes, feed: Feed) -> tuple[Any, ...]:
    g = attributes.geometry
    tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
    return (
        *(tensors[name] for name in ("query", "key", "value")),
        tensors.get("key_mask"),
        tensors.get("attn_bias"),
        g.window_size,
        g.look_backward,
        g.look_forward,
        g.causal,
        g.exact_windowsize,
        attributes.scale,
        attributes.shared_qk,
        attributes.perm == SEQUENCE_FIRST,
        attributes.xpos_scale_base,
    )


@each_geometry
@each_variant
def test_torch_operator_equals_reference(variant: NodeVariant, geometry: WindowGeometry) -> None:
    rng = seeded(geometry, variant.op_type)
    for index, length in enumerate(lengths(geometry.window_size)):
        for dtype in TOLERANCE:
            attributes = attributes_for(variant, geometry, length, rng)
            feed = feed_for(variant, attributes, length, dtype=dtype, seed=index)
            output = call_operator(attributes, feed)
            assert output.dtype == torch.from_numpy(feed["query"]).dtype
            check(output.numpy(), attributes, feed, dtype)


@pytest.mark.parametrize("length", [511, 513, 1100])
def test_torch_operator_beyond_its_own_block(length: int) -> None:
    variant = VARIANT_BY_OP_TYPE["WindowedAttentionMaskXpos"]
    for geometry in (WIDE, WindowGeometry(48, 1, 1)):
        attributes = NodeAttributes(geometry, 0.3, xpos_scale_base=24.0)
        feed = feed_for(variant, attributes, length, batch=1)
        check(call_operator(attributes, feed).numpy(), attributes, feed, "fp32")


@each_variant
def test_torch_operator_is_well_formed(variant: NodeVariant) -> None:
    for perm in (SEQUENCE_FIRST, HEADS_FIRST):
        base = 2.0 if variant.has_xpos else 0.0
        attributes = NodeAttributes(GEOMETRIES[3], 0.3, perm=perm, xpos_scale_base=base)
        feed = feed_for(variant, attributes, 9)
        assert list(feed["query"].shape) == data_shape(attributes, 2, 9)
        torch.library.opcheck(torch.ops.localattn.windowed_attention.default, operator_arguments(attributes, feed))


def test_models_are_checked_for_real() -> None:
    """`one_node` runs onnx's full check; a wrong output shape must not pass it."""
    variant = VARIANT_BY_OP_TYPE["WindowedAttention"]
    model = one_node(variant, NodeAttributes(GEOMETRIES[0], 1.0, query_block=5), 10)
    model.functions[0].node[0].op_type = "NoSuchOperator"
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("has_bias", [False, True], ids=["mask", "mask_and_bias"])
def test_what_the_mask_hides_may_be_anything(has_bias: bool, poison: float) -> None:
    """Every bit of the output is that of a call with other numbers there."""
    for has_xpos in (False, True):
        variant = NodeVariant(has_mask=True, has_bias=has_bias, has_xpos=has_xpos)
        for geometry in GEOMETRIES:
            attributes = attributes_for(variant, geometry, 21, random.Random(1), perm=SEQUENCE_FIRST)
            model, feed = one_node(variant, attributes, 21), feed_for(variant, attributes, 21)
            poisoned = {name: array.copy() for name, array in feed.items()}
            for name in ("key", "value"):
                poisoned[name][~feed["key_mask"]] = poison
            np.testing.assert_array_equal(run(model, poisoned), run(model, feed), err_msg=str(geometry))


@pytest.mark.parametrize("name", ["key", "value"])
def test_a_nan_reaches_the_blocks_of_queries_that_gather_it(name: str) -> None:
    """Every query that sees it, and no block of queries that none of them is in."""
    variant = NodeVariant(has_mask=False, has_bias=False, has_xpos=False)
    for geometry in GEOMETRIES:
        attributes = attributes_for(variant, geometry, 60, random.Random(1), perm=SEQUENCE_FIRST, shared_qk=False)
        block = attributes.query_block
        model, feed = one_node(variant, attributes, "n"), feed_for(variant, attributes, 60)
        clean = run(model, feed)
        feed[name][0, 31, 1, 3] = np.nan
        output = run(model, feed)
        sees = reference.upstream_visibility(geometry, 60)[:, 31]
        first = np.arange(60) // block * block
        gathers = (first - geometry.backward_reach <= 31) & (first + block + geometry.forward_reach > 31)
        assert (sees <= gathers).all()
        channels = [3] if name == "value" else slice(None)
        assert np.isnan(output[0, sees, 1][:, channels]).all(), geometry
        output[0, gathers, 1] = clean[0, gathers, 1]
        np.testing.assert_array_equal(output, clean, err_msg=str(geometry))


def test_the_judge_keeps_a_nan() -> None:
    """Rows without visible keys are zeros; rows that see a NaN are none of them."""
    args = LocalAttentionArgs(window_size=4, causal=True, use_rotary_pos_emb=False)
    q, k, v = (torch.ones(1, 1, 16, 2, dtype=torch.float64) for _ in range(3))
    k[0, 0, 8, 0] = torch.nan
    mask = torch.arange(16)[None] > 1
    output = float64_reference.local_attention(args, {}, q, k, v, mask)
    rows = output[0, 0, :, 0].round(decimals=9)
    assert rows[:2].tolist() == [0, 0] and rows[2:8].tolist() == [1] * 6 and rows[8:].isnan().all()


def test_heads_without_pairs_of_channels_take_no_xpos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of one channel gave other numbers in every call: sums of no products, in memory that was not cleared."""
    variant = NodeVariant(has_mask=False, has_bias=False, has_xpos=True)
    attributes = NodeAttributes(WindowGeometry(4, causal=True), 1.0, query_block=4, xpos_scale_base=2.0)
    for head_dim in (1, 3):
        monkeypatch.setattr(node_model, "HEAD_DIM", head_dim)
        for length in (16, "n"):
            with pytest.raises(UsageError, match=r"Gather|cannot be loaded"):
                run(one_node(variant, attributes, length), feed_for(variant, attributes, 16))
        x = torch.ones(1, 16, 1, head_dim)
        with pytest.raises(UsageError, match=f"the heads are {head_dim} wide"):
            windowed_attention(x, x, x, None, None, 4, 1, 0, True, False, 1.0, False, True, 2.0)
        with pytest.raises(UsageError, match=f"the heads are {head_dim} wide"):
            windowed_attention_op(x, x, x, attributes.geometry, 1.0, xpos_scale_base=2.0)
        with pytest.raises(UsageError, match="odd number"):
            LocalMHAArgs(dim=8, window_size=4, dim_head=head_dim, use_xpos=True)
        with pytest.raises(UsageError, match="odd number"):
            LocalAttentionArgs(window_size=4, dim=head_dim, use_xpos=True)
