"""fp16 on the CPU is rounded where the file says so, as `onnx.reference` rounds it, and what is too large is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from localattn.core.nodes.fused import FUSED_DOMAIN, FUSED_NODES, FUSED_VERSION, ROTATIONS
from localattn.exporter.lowering.fused_functions import build_fused
from localattn.onnx_graph.precision import half_to_fp32
from localattn.runtime.backends.onnxruntime.session import ROUNDED, open_bytes, open_file
from localattn.runtime.parity.overflow import beyond_fp16, describe, range_record

from ...support.models.opsets import when_run
from ...support.native.fused_reference import shapes

HEADER = '<ir_version: 10, opset_import: ["" : 20, "own" : 1]>\n'
# A body from x fp16[4,8] and y fp16[8,4] to z; numbers of which some overflow, and others vanish.
BODIES = {
    "MatMul": "z = MatMul(x, y)",
    "sums of squares": "a = Mul(x, x)\n i = Constant<value_ints = [1]>()\n z = ReduceSum(a, i)",
    "a norm": "a = Mul(x, x)\n i = Constant<value_ints = [1]>()\n b = ReduceMean(a, i)\n c = Sqrt(b)\n z = Div(x, c)",
    "Softmax": "z = Softmax<axis = 1>(x)",
    "exp and back": "a = Exp(x)\n z = Log(a)",
    "Gelu": "z = Gelu(x)",
    "twice": "a = Add(x, x)\n b = Sub(a, x)\n z = Sub(b, x)",
    "a detour in fp32": "a = Cast<to = 1>(x)\n b = Mul(a, a)\n c = Sqrt(b)\n z = Cast<to = 10>(c)",
    "moved": "t = Transpose<perm = [1, 0]>(y)\n a = Concat<axis = 0>(x, t)\n z = Neg(a)",
}
SCALES = {"small": 1e-6, "usual": 1.0, "large": 3e3}


def parsed(body: str, inputs: str = "float16[4,8] x, float16[8,4] y", functions: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEADER} m ({inputs}) => (float16 z) {{\n{body}\n}}{functions}")


def numbers(shape: tuple[int, ...], scale: float, seed: int = 0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float16)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("body", BODIES)
def test_it_computes_what_the_reference_computes(body: str, scale: str) -> None:
    model = parsed(BODIES[body])
    feed = {"x": numbers((4, 8), SCALES[scale]), "y": numbers((8, 4), SCALES[scale], 1)}
    with np.errstate(all="ignore"):
        (expected,) = ReferenceEvaluator(model).run(None, feed)
    session = open_file(_bytes(model), "cpu", plugin="none", halves="rounded")
    found = session.run(feed)["z"]
    assert found.dtype == np.float16 == expected.dtype and ROUNDED in session.notes
    assert np.array_equal(np.isnan(found), np.isnan(expected)) and np.array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    # The reference sums in another order, and takes some operators apart: a few units in the last place.
    size = np.abs(expected[finite]).max(initial=0.0)
    assert np.allclose(found[finite].astype(float), expected[finite].astype(float), rtol=4e-3, atol=1e-3 * size + 1e-7)


def _bytes(model: onnx.ModelProto) -> Any:
    from localattn.onnx_graph.onnx_file import OnnxFile

    return OnnxFile.of_bytes(model.SerializeToString())


@pytest.mark.parametrize("scale, overflows", [("small", False), ("usual", False), ("large", True)])
def test_what_is_too_large_is_named(scale: str, overflows: bool) -> None:
    model = parsed("a = MatMul(x, y)\n z = Tanh(a)")
    model.graph.node[0].metadata_props.add(key=half_to_fp32.MODULE, value="layers.3.mlp")
    session = open_file(_bytes(model), "cpu", plugin="none", halves="rounded")
    x, y = numbers((4, 8), SCALES[scale]), numbers((8, 4), SCALES[scale], 1)
    assert np.isfinite(session.run({"x": x, "y": y})["z"]).all()  # the tanh of infinity is one
    found = beyond_fp16([session])
    assert [one.module for one in found] == ["layers.3.mlp"] * overflows
    if found:
        assert found[0].size == pytest.approx(np.abs(x.astype(np.float32) @ y.astype(np.float32)).max(), rel=1e-5)
        assert describe(found) == f"layers.3.mlp reaches {found[0].size:,.0f}"


def test_without_rounding_every_value_is_measured() -> None:
    """A NaN from the first product hides the second one."""
    model = parsed("a = MatMul(x, y)\n b = MatMul(a, x)\n z = MatMul(b, y)")
    session = open_file(_bytes(model), "cpu", plugin="none", halves="rounded")
    session.run({"x": numbers((4, 8), 3e3), "y": numbers((8, 4), 3e3, 1)})
    assert len(beyond_fp16([session])) == 1 and len(beyond_fp16([session], without_overflow=True)) == 3


# Bodies in which x² is beyond fp16, and whether what follows is the same to the bit for infinity and the true value.
ENDINGS = {
    "Tanh": ("z = Tanh(a)", True),
    "Sigmoid": ("z = Sigmoid(a)", True),
    "a gate": ("b = Sigmoid(a)\n z = Mul(x, b)", True),
    "Erf": ("z = Erf(a)", True),
    "Clip": ("kc = Constant<value_float = 6.0>()\n c = CastLike(kc, x)\n n = Neg(c)\n z = Clip(a, n, c)", True),
    "Min": ("kc = Constant<value_float = 6.0>()\n c = CastLike(kc, x)\n z = Min(a, c)", True),
    "Max": ("kc = Constant<value_float = 6.0>()\n c = CastLike(kc, x)\n b = Neg(a)\n z = Max(b, c)", True),
    "Where": ("c = Less(y, y)\n z = Where(c, a, x)", True),
    "Exp": ("b = Neg(a)\n z = Exp(b)", True),
    "Softmax of a small score": ("b = Neg(a)\n c = Concat<axis = 1>(b, x)\n z = Softmax<axis = 1>(c)", True),
    "gelu by tanh": (
        "b = Mul(a, x)\n kc = Constant<value_float = 0.0357>()\n c = CastLike(kc, x)\n d = Mul(b, c)\n"
        " e = Add(x, d)\n f = Tanh(e)\n"
        " ko = Constant<value_float = 1.0>()\n o = CastLike(ko, x)\n g = Add(f, o)\n z = Mul(x, g)",
        True,
    ),
    # Finite at infinity, and another number there.
    "a quotient": ("z = Div(x, a)", False),
    "a norm": ("b = Add(a, x)\n c = Sqrt(b)\n z = Div(x, c)", False),
    "a narrow Tanh": ("kc = Constant<value_float = 1e-5>()\n c = CastLike(kc, x)\n b = Mul(a, c)\n z = Tanh(b)", False),
    "a wide Clip": ("kc = Constant<value_float = 6e4>()\n c = CastLike(kc, x)\n b = Mul(y, c)\n d = Add(a, b)\n"
        " z = Sub(d, a)", False),
    # Infinite or NaN.
    "a sum": ("z = Add(a, x)", False),
    "a difference": ("b = Mul(a, x)\n c = Abs(b)\n z = Sub(a, c)", False),
    "times zero": ("b = Tanh(a)\n c = Sub(b, b)\n z = Mul(a, c)", False),
    "Softmax of a large score": ("z = Softmax<axis = 1>(a)", False),
    "Sqrt": ("z = Sqrt(a)", False),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_infinity_passes_where_the_true_value_gives_the_same_bits(ending: str) -> None:
    body, same = ENDINGS[ending]
    model = parsed(f"a = Mul(x, x)\n {body}", "float16[4,8] x, float16[4,8] y")
    feed = {"x": np.array([[300, -300, 2, 45, -45, 0.5, -0.5, 1]] * 4, np.float16), "y": numbers((4, 8), 1)}
    session = open_file(_bytes(model), "cpu", plugin="none", halves="rounded")
    with np.errstate(all="ignore"):
        (expected,) = ReferenceEvaluator(model).run(None, feed)
    assert bool(np.isfinite(session.run(feed)["z"]).all()) is bool(np.isfinite(expected).all())
    record = range_record([session], "one row")
    assert record is not None and record.status == ("passed" if same else "failed")
    assert "90,000" in record.detail and ("changes no bit of the outputs" in record.detail) is same


@pytest.mark.parametrize("inner, same", [("Tanh", True), ("Sqrt", False)])
def test_an_overflow_inside_a_loop_shows_in_the_results(inner: str, same: bool) -> None:
    body = f"""
    s = Constant<value = float16[8] {{0, 0, 0, 0, 0, 0, 0, 0}}>()
    last, a = Scan<num_scan_inputs = 1, body = g (float16[8] state, float16[8] row)
        => (float16[8] next, float16[8] out) {{
        next = Identity(state)
        out = Mul(row, row)
    }}>(s, x)
    z = {inner}(a)"""
    session = open_file(_bytes(parsed(body, "float16[4,8] x")), "cpu", plugin="none", halves="rounded")
    session.run({"x": np.full((4, 8), 300, np.float16)})
    record = range_record([session], "one row")
    assert record is not None and record.status == ("passed" if same else "failed")
    assert ("reaches" in record.detail) is False and (same or "z is infinite or NaN" in record.detail)


@pytest.mark.parametrize("x", [None, 0, np.nan])
def test_a_range_of_nothing_is_not_proven(x: float | None) -> None:
    session = open_file(_bytes(parsed("z = Mul(x, x)", "float16[4,8] x")), "cpu", plugin="none", halves="rounded")
    if x is not None:
        session.run({"x": np.full((4, 8), x, np.float16)})
    record = range_record([session], "no rows")
    assert record is not None and record.status == "not proven"


def test_infinity_without_an_overflow_is_left_to_the_comparison() -> None:
    """The squares of small numbers are 0 in fp16, and a mask may be infinite: neither is beyond fp16."""
    model = parsed("a = Mul(x, x)\n b = Div(x, a)\n z = Tanh(b)", "float16[4,8] x")
    session = open_file(_bytes(model), "cpu", plugin="none", halves="rounded")
    session.run({"x": np.full((4, 8), 1e-5, np.float16)})
    assert not session.overflow_shows and not beyond_fp16([session]) and session.not_finite.any()


@pytest.mark.parametrize("to", [7, 9, 11])
def test_casts_from_integers_booleans_and_doubles_are_watched(to: int) -> None:
    body = f"b = Cast<to = {to}>(x)\n c = Cast<to = 10>(b)\n z = Mul(c, y)"
    session = open_file(_bytes(parsed(body, "float16[4,8] x, float16[4,8] y")), "cpu", plugin="none", halves="rounded")
    x = np.full((4, 8), 300, np.float16)
    found = session.run({"x": x, "y": x})["z"]
    assert (found == (300 if to == 9 else np.inf)).all()
    assert session.peaks.tolist() == ([1, 300] if to == 9 else [300, 90_000])
    assert {spec.name for spec in session.inputs} == {"x", "y"} and {spec.name for spec in session.outputs} == {"z"}


def test_functions_that_compute_in_fp32_do_not_count() -> None:
    wide = (
        '<domain: "own", opset_import: ["" : 20]> square (x) => (y) {\n'
        "a = Cast<to = 1>(x)\n b = Mul(a, a)\n c = Sqrt(b)\n y = CastLike(c, x)\n}"
    )
    narrow = '<domain: "own", opset_import: ["" : 20]> square (x) => (y) {\n b = Mul(x, x)\n y = Sqrt(b)\n}'
    for body, overflows in ((wide, False), (narrow, True)):
        model = parsed("z = own.square(x)", "float16[4,8] x", body)
        model.graph.node[0].metadata_props.add(key=half_to_fp32.MODULE, value="norm")
        session = open_file(_bytes(model), "cpu", plugin="none", halves="rounded")
        session.run({"x": numbers((4, 8), 3e3)})
        assert {one.module for one in beyond_fp16([session])} == ({"norm"} if overflows else set())


@pytest.mark.parametrize("opset", [when_run(number) for number in (18, 20, 24)])
@pytest.mark.parametrize("op_type", [node.op_type for node in FUSED_NODES if "fp16" in node.dtypes])
def test_values_inside_of_fused_functions_are_watched(op_type: str, opset: int) -> None:
    """Each number that the body of a node computes in fp16, by onnx's own inliner; what it only moves is not."""
    sizes = {"streams": 0, "dim": 16, "heads": 2, "heads_first": True, "own_positions": False}
    kind = sizes if op_type in ROTATIONS else {"streams": 4, "dim": 16}
    given = shapes(op_type, 2, 11, **kind)
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, x) for name, x in given.items()]
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, None)
    node = onnx.helper.make_node(op_type, [*given], ["y"], domain=FUSED_DOMAIN)
    node.metadata_props.add(key=half_to_fp32.MODULE, value="layers.3.mlp")
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(FUSED_DOMAIN, FUSED_VERSION)]
    body = ir.serde.serialize_function(build_fused(op_type, opset))
    graph = onnx.helper.make_graph([node], "one_node", values, [result])
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[body])
    plain = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(model))
    types = {x.name: x.type.tensor_type.elem_type for x in (*plain.graph.value_info, *plain.graph.output)}
    computed = {
        name
        for one in plain.graph.node
        if one.op_type not in ("Reshape", "Slice", "Split", "Concat")
        for name in one.output
        if types[name] == onnx.TensorProto.FLOAT16
    }
    watched = half_to_fp32.watch(model).values
    assert computed and {name for name, _ in watched} == computed
    assert {module for _, module in watched} == {"layers.3.mlp"}


def test_a_cube_inside_of_a_gated_gelu_is_named() -> None:
    """Below opset 20 its body is written out; the gate is 100."""
    body = ir.serde.serialize_function(build_fused("GatedGeluTanh", 18))
    text = f"""<ir_version: 10, opset_import: ["" : 18, "{FUSED_DOMAIN}" : {FUSED_VERSION}]>
    m (float16[4,8] x, float16[4,8] y) => (float16[4,8] z) {{ z = {FUSED_DOMAIN}.GatedGeluTanh(x, y) }}"""
    model = onnx.parser.parse_model(text)
    model.functions.append(body)
    model.graph.node[0].metadata_props.add(key=half_to_fp32.MODULE, value="layers.3.mlp")
    session = open_file(_bytes(model), "cpu", plugin="none", halves="rounded")
    ones = np.ones((4, 8), np.float16)
    assert (session.run({"x": ones, "y": ones * 100})["z"] == 100).all()
    record = range_record([session], "one row")
    assert record is not None and record.status == "passed"
    assert "layers.3.mlp reaches 1,000,000" in record.detail and "changes no bit" in record.detail


def test_loops_round_inside() -> None:
    body = """
    s = Constant<value = float16[8] {0, 0, 0, 0, 0, 0, 0, 0}>()
    last, z = Scan<num_scan_inputs = 1, body = g (float16[8] state, float16[8] row)
        => (float16[8] next, float16[8] out) {
        next = Add(state, row)
        squared = Mul(row, row)
        out = Sqrt(squared)
    }>(s, x)"""
    model = parsed(body, "float16[4,8] x")
    feed = {"x": numbers((4, 8), 3e3)}
    found = open_file(_bytes(model), "cpu", plugin="none", halves="rounded").run(feed)["z"]
    with np.errstate(all="ignore"):
        expected = np.sqrt(feed["x"] * feed["x"])
    assert np.isinf(found).any() and np.array_equal(np.isinf(found), np.isinf(expected))


def test_usual_sessions_stay_as_they_are() -> None:
    fp32 = onnx.parser.parse_model(f"{HEADER} m (float[4] x) => (float[4] z) {{ z = Neg(x) }}")
    assert half_to_fp32.watch(fp32).model is fp32
    session = open_file(_bytes(fp32), "cpu", plugin="none", halves="rounded")
    assert not session.watched and not session.notes
    assert not open_bytes(parsed("z = Neg(x)").SerializeToString()).watched
