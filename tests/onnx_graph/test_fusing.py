"""The passes that name a traced model's rotary embedding, gates, packed products and layouts: graphs before and after.

Every graph is computed in onnxruntime as it is and as it was rewritten, functions included.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import parser

from localattn.exporter.lowering.functions import attach_functions
from localattn.onnx_graph.fusing import fuse
from localattn.runtime.backends.onnxruntime.session import open_bytes

from ..support.native.cpu_build import library

pytest.importorskip("onnxruntime", reason="onnxruntime computes the graphs")

Arrays = dict[str, NDArray[Any]]
HALVES = "<int64[1] a = {0}, int64[1] b = {8}, int64[1] c = {16}, int64[1] last = {3}>"
ROTATION = """
    straight = Mul({x}, {cosine})
    first = Slice({x}, a, b, last)
    second = Slice({x}, b, c, last)
    negated = Neg(second)
    turned = Concat<axis = -1>(negated, first)
    around = Mul(turned, {sine})
    {to} = Add(straight, around)
"""


def model_of(text: str) -> onnx.ModelProto:
    """A model of a graph in ONNX's own notation."""
    header = '<ir_version: 10, opset_import: ["" : 20, "localattn" : 1]>\n'
    return parser.parse_model(header + text)


def fused(text: str, weights: Arrays | None = None) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The model as it is, and rewritten; both with the functions of their nodes."""
    before = model_of(text)
    for name, content in (weights or {}).items():
        before.graph.initializer.append(onnx.numpy_helper.from_array(content, name))
    inferred = onnx.shape_inference.infer_shapes(before)
    models = [ir.from_proto(inferred), ir.from_proto(inferred)]
    fuse.apply(models[1])
    for model in models:
        attach_functions(model)
    first, second = (ir.to_proto(model) for model in models)
    onnx.checker.check_model(second)
    return first, second


def agree(first: onnx.ModelProto, second: onnx.ModelProto, **shapes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    right = open_bytes(first.SerializeToString(), "cpu", 1, "none").run(feed)
    for plugin in ("none", library()):
        found = open_bytes(second.SerializeToString(), "cpu", 1, plugin).run(feed)
        assert [*found] == [*right]
        for name, array in right.items():
            np.testing.assert_allclose(found[name], array, atol=2e-6, rtol=2e-6, err_msg=f"{name}, {plugin}")


def nodes(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("batch", ["1", "B"], ids=["shared", "own"])
@pytest.mark.parametrize("heads_first", [True, False])
def test_a_rotation_becomes_one_node(heads_first: bool, batch: str) -> None:
    """With one table for all sequences, and with a table for each."""
    x, table = ("B, 3, N, 16", f"{batch}, 1, N, 16") if heads_first else ("B, N, 3, 16", f"{batch}, N, 1, 16")
    body = ROTATION.format(x="x", cosine="c1", sine="s1", to="y")
    text = f"g (float[{x}] x, float[{table}] c1, float[{table}] s1) => (float[{x}] y) {HALVES} {{ {body} }}"
    first, second = fused(text)
    assert nodes(second) == {"RotateHeads": 1, "Reshape": 2, "Mul": 1}
    given, tables = ((2, 3, 5, 16), (2, 1, 5, 16)) if heads_first else ((2, 5, 3, 16), (2, 5, 1, 16))
    tables = tables if batch == "B" else (1, *tables[1:])
    agree(first, second, x=given, c1=tables, s1=tables)


BY_PAIRS = """
    straight = Mul(x, cosine)
    even = Slice(x, zero, end, last, two)
    odd = Slice(x, one, end, last, two)
    negated = Neg(odd)
    former = Unsqueeze(negated, behind)
    latter = Unsqueeze(even, behind)
    stacked = Concat<axis = -1>(former, latter)
    turned = Reshape(stacked, shape)
    around = Mul(turned, sine)
    y = Add(straight, around)
"""
PAIRS = (
    "<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {9223372036854775807},"
    " int64[1] last = {3}, int64[1] behind = {-1}, int64[4] shape = {0, 0, 0, 16}>"
)


@pytest.mark.parametrize("batch", ["1", "B"], ids=["shared", "own"])
@pytest.mark.parametrize("heads_first", [True, False])
def test_a_rotation_of_neighbours_becomes_one_node(heads_first: bool, batch: str) -> None:
    """As cohere2 writes it."""
    x, table = ("B, 3, N, 16", f"{batch}, 1, N, 16") if heads_first else ("B, N, 3, 16", f"{batch}, N, 1, 16")
    text = f"g (float[{x}] x, float[{table}] cosine, float[{table}] sine) => (float[{x}] y) {PAIRS} {{ {BY_PAIRS} }}"
    first, second = fused(text)
    assert nodes(second) == {"RotatePairs": 1, "Reshape": 2, "Mul": 1}
    given, tables = ((2, 3, 5, 16), (2, 1, 5, 16)) if heads_first else ((2, 5, 3, 16), (2, 5, 1, 16))
    tables = tables if batch == "B" else (1, *tables[1:])
    agree(first, second, x=given, cosine=tables, sine=tables)
    wrong = (
        ("Slice(x, one", "Slice(x, two"),
        ("(former, latter)", "(latter, former)"),
        ("Neg(odd)", "Neg(even)"),
        ("odd = Slice(x, one, end, last, two)", "odd = Slice(x, zero, end, last, two)"),
    )
    for right, other in wrong:
        _, second = fused(text.replace(right, other))
        assert nodes(second)["RotatePairs"] == 0, other


BY_HALVES = """
    first = Slice(x, a, b, last)
    second = Slice(x, b, c, last)
    one = Mul(first, cosine)
    two = Mul(second, sine)
    three = Mul(second, cosine)
    four = Mul(first, sine)
    low = Sub(one, two)
    high = Add(three, four)
    y = Concat<axis = -1>(low, high)
"""


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_rotation_by_halves_becomes_one_node(heads_first: bool) -> None:
    """With tables of half a head, as gpt_oss writes it."""
    x, table = ("B, 3, N, 16", "B, 1, N, 8") if heads_first else ("B, N, 3, 16", "B, N, 1, 8")
    text = f"g (float[{x}] x, float[{table}] cosine, float[{table}] sine) => (float[{x}] y) {HALVES} {{ {BY_HALVES} }}"
    first, second = fused(text)
    assert nodes(second) == {"RotateHeads": 1, "Concat": 2, "Reshape": 2, "Mul": 1}
    given, tables = ((2, 3, 5, 16), (2, 1, 5, 8)) if heads_first else ((2, 5, 3, 16), (2, 5, 1, 8))
    agree(first, second, x=given, cosine=tables, sine=tables)
    for right, wrong in (("Sub(one, two)", "Sub(two, one)"), ("Add(three", "Sub(three"), ("low, high", "high, low")):
        _, second = fused(text.replace(right, wrong))
        assert nodes(second)["RotateHeads"] == 0


def test_a_part_of_a_head_is_rotated_too() -> None:
    body = ROTATION.format(x="low", cosine="cosine", sine="sine", to="rotated")
    sizes = "float[B, 3, N, 24] x, float[1, 1, N, 16] cosine, float[1, 1, N, 16] sine"
    more = "int64[1] d = {24}>"
    text = f"""g ({sizes}) => (float[B, 3, N, 24] y) {HALVES[:-1]}, {more} {{
        low = Slice(x, a, c, last)
        high = Slice(x, c, d, last)
        {body}
        y = Concat<axis = -1>(rotated, high)
    }}"""
    first, second = fused(text)
    assert nodes(second)["RotateHeads"] == 1 and nodes(second)["Neg"] == 0
    agree(first, second, x=(2, 3, 5, 24), cosine=(1, 1, 5, 16), sine=(1, 1, 5, 16))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("Concat<axis = -1>(negated, first)", "Concat<axis = -1>(first, negated)"),
        ("Neg(second)", "Abs(second)"),
        ("first = Slice(x, a, b, last)", "first = Slice(x, b, c, last)"),
        ("Mul(x, cosine)", "Mul(second_x, cosine)"),
    ],
)
def test_what_only_looks_like_a_rotation_stays(right: str, wrong: str) -> None:
    body = ROTATION.format(x="x", cosine="cosine", sine="sine", to="y")
    assert right in body
    sizes = "float[B, 3, N, 16] x, float[B, 3, N, 16] second_x, float[1, 1, N, 16] cosine, float[1, 1, N, 16] sine"
    text = f"g ({sizes}) => (float[B, 3, N, 16] y) {HALVES} {{ {body.replace(right, wrong)} }}"
    _, second = fused(text)
    assert nodes(second)["RotateHeads"] == 0 and nodes(second)["Add"] == 1


@pytest.mark.parametrize(
    ("body", "op_type"),
    [
        ("a = Gelu(gate) y = Mul(a, value)", "GatedGelu"),
        ("a = Gelu(gate) y = Mul(value, a)", "GatedGelu"),
        ('a = Gelu<approximate = "tanh">(gate) y = Mul(a, value)', "GatedGeluTanh"),
        ("s = Sigmoid(gate) a = Mul(gate, s) y = Mul(a, value)", "GatedSilu"),
        ("s = Sigmoid(gate) a = Mul(s, gate) y = Mul(value, a)", "GatedSilu"),
    ],
)
def test_a_gate_becomes_one_node(body: str, op_type: str) -> None:
    first, second = fused(f"g (float[B, N, 40] gate, float[B, N, 40] value) => (float[B, N, 40] y) {{ {body} }}")
    assert nodes(second) == {op_type: 1}
    agree(first, second, gate=(2, 3, 40), value=(2, 3, 40))


@pytest.mark.parametrize(
    "text",
    [
        "g (float[B, N, 8] gate, float[B, N, 1] value) => (float[B, N, 8] y) { a = Gelu(gate) y = Mul(a, value) }",
        "g (float[B, N, 8] gate, float[B, M, 8] value) => (float[B, N, 8] y) { a = Gelu(gate) y = Mul(a, value) }",
        "g (float[8] gate, float[8] value) => (float[8] y, float[8] a) { a = Gelu(gate) y = Mul(a, value) }",
        "g (float[B, 8] gate) => (float[B, 8] y) { a = Gelu(gate) y = Mul(a, a) }",
    ],
    ids=["broadcast", "unknown", "read by others", "squared"],
)
def test_an_activation_of_another_shape_or_use_stays(text: str) -> None:
    _, second = fused(text)
    assert nodes(second) == {"Gelu": 1, "Mul": 1}


PACKED = "<int64[1] a = {0}, int64[1] b = {40}, int64[1] c = {112}, int64[1] last = {2}>"


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_matrix_is_cut_instead_of_its_product(bias: bool) -> None:
    rng = np.random.default_rng(1)
    weights = {"w": rng.standard_normal((24, 112)).astype(np.float32)}
    product = "p = MatMul(x, w)"
    if bias:
        weights["bias"] = rng.standard_normal(112).astype(np.float32)
        product = "q = MatMul(x, w) p = Add(q, bias)"
    text = f"""g (float[B, N, 24] x) => (float[B, N, 40] y, float[B, N, 72] z) {PACKED} {{
        {product}
        y = Slice(p, a, b, last)
        z = Slice(p, b, c, last)
    }}"""
    first, second = fused(text, weights)
    assert nodes(second) == {"MatMul": 2, **({"Add": 2} if bias else {})}
    assert sorted(tuple(x.dims) for x in second.graph.initializer if x.name.startswith("w")) == [(24, 40), (24, 72)]
    agree(first, second, x=(2, 3, 24))


def test_queries_keys_and_values_of_one_matrix_are_products_of_their_own() -> None:
    weights = {"w": np.random.default_rng(1).standard_normal((24, 192)).astype(np.float32)}
    cuts = "".join(
        f"c{i} = Slice(r, n{i}, n{i + 1}, n2) t{i} = Squeeze(c{i}, n2) {name} = Identity(t{i})\n"
        for i, name in enumerate("qkv")
    )
    slots = (
        "<int64[1] n0 = {0}, int64[1] n1 = {1}, int64[1] n2 = {2}, int64[1] n3 = {3}, int64[5] s = {0, 0, 3, 4, 16}>"
    )
    outputs = ", ".join(f"float[B, N, 4, 16] {name}" for name in "qkv")
    text = f"g (float[B, N, 24] x) => ({outputs}) {slots} {{ p = MatMul(x, w) r = Reshape(p, s)\n {cuts} }}"
    first, second = fused(text, weights)
    assert nodes(second) == {"MatMul": 3, "Reshape": 3, "Identity": 3}
    agree(first, second, x=(2, 3, 24))


@pytest.mark.parametrize(
    "body",
    [
        "p = MatMul(x, w) y = Slice(p, a, b, last) z = Slice(p, b, c, last) o = Abs(p)",
        "p = MatMul(x, w) y = Slice(p, a, b, last) z = Slice(p, b, c, last) o = MatMul(x, w)",
        "p = MatMul(x, w) y = Slice(p, a, c, last) z = Slice(p, b, c, last) o = Abs(x)",
    ],
    ids=["read whole", "matrix of two", "overlapping"],
)
def test_a_product_that_is_not_only_cut_stays(body: str) -> None:
    weights = {"w": np.ones((24, 112), np.float32)}
    text = f"g (float[B, N, 24] x) => (float[B, N, Y] y, float[B, N, Z] z, float[B, N, O] o) {PACKED} {{ {body} }}"
    _, second = fused(text, weights)
    assert {tuple(x.dims) for x in second.graph.initializer if x.name.startswith("w")} == {(24, 112)}


NORM = """
    squares = Pow({x}, two)
    mean = ReduceMean(squares, last)
    more = Add(mean, epsilon)
    root = Sqrt(more)
    inverse = Reciprocal(root)
    unit = Mul({x}, inverse)
    {to} = Mul(unit, weight)
"""


def test_a_reciprocal_root_is_a_division() -> None:
    text = f"""g (float[B, N, 16] x) => (float[B, N, 16] y)
    <float two = {{2}}, int64[1] last = {{-1}}, float epsilon = {{0.001}}> {{ {NORM.format(x="x", to="y")} }}"""
    first, second = fused(text, {"weight": np.linspace(0.5, 2, 16, dtype=np.float32)})
    assert nodes(second)["Div"] == 1 and nodes(second)["Reciprocal"] == 0
    agree(first, second, x=(2, 3, 16))


def attention(between: str, *, query: str = "q1", also: str = "") -> str:
    """A node that takes `[B, H, N, D]` of inputs `[B, N, H, D]`, with operations between them."""
    attributes = "scale = 0.25, causal = 1, perm = [0, 1, 2, 3], query_block = 8"
    inputs = ", ".join(f"float[B, N, 2, 16] {name}" for name in "qkv")
    constants = "float two = {2}, int64[1] minus = {-1}, float epsilon = {0.001}"
    return f"""g ({inputs}, float[1, 1, N, 16] cosine, float[1, 1, N, 16] sine) => (float[B, N, 2, 16] y{also})
    {HALVES[:-1]}, {constants}> {{
        q0 = Transpose<perm = [0, 2, 1, 3]>(q)
        k0 = Transpose<perm = [0, 2, 1, 3]>(k)
        v0 = Transpose<perm = [0, 2, 1, 3]>(v)
        {between}
        out = localattn.GlobalAttention<{attributes}>({query}, k0, v0)
        y = Transpose<perm = [0, 2, 1, 3]>(out)
    }}"""


def given() -> dict[str, tuple[int, ...]]:
    return {**dict.fromkeys("qkv", (2, 9, 2, 16)), **dict.fromkeys(("cosine", "sine"), (1, 1, 9, 16))}


def test_attention_takes_the_layout_of_products() -> None:
    """Norms and rotations are moved over the Transposes."""
    norm = NORM.format(x="q0", to="n0").replace("last", "minus")
    between = norm + ROTATION.format(x="n0", cosine="cosine", sine="sine", to="q1")
    first, second = fused(known(attention(between)), {"weight": np.linspace(0.5, 2, 16, dtype=np.float32)})
    assert nodes(second)["Transpose"] == 0 and nodes(second)["RotateHeads"] == 1
    agree(first, second, **given())


@pytest.mark.parametrize(
    ("between", "also"),
    [
        ("q1 = Softmax<axis = 2>(q0)", ""),
        ("q1 = Add(q0, cosine)", ""),
        ("q1 = Abs(q0)", ""),
        ("q1 = Neg(q0)", ", float[B, 2, N, 16] q1"),
    ],
    ids=["other axis", "of positions", "unknown", "read by others"],
)
def test_attention_behind_what_needs_its_layout_stays(between: str, also: str) -> None:
    _, second = fused(known(attention(between, also=also)))
    assert nodes(second)["Transpose"] == 4


def known(text: str) -> str:
    """The graph with the shape of the node's output, which only the exporter records."""
    start, _, rest = text.partition("> {\n")
    return f"{start}, float[B, 2, N, 16] out> {{\n{rest}"
