"""fp16 products on a provider that would sum them in fp16: each is summed in fp32 and rounded once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto

from localattn.core.machine.processor import host_arch
from localattn.exporter.export import ExportRequest, export
from localattn.onnx_graph.precision import fp16_matmul_in_fp32
from localattn.runtime import load, open_step
from localattn.runtime.backends.onnxruntime.providers import PROVIDERS, SUMMED
from localattn.runtime.backends.onnxruntime.session import open_bytes
from localattn.runtime.backends.onnxruntime.tuned import OPTIMIZED, open_tuned

from ...exporter.test_step_export import steps
from ...support.models.engine_models import small_checkpoint, small_model

HEADER = '<ir_version: 10, opset_import: ["" : 20, "own" : 1, "localattn" : 1]>\n'
FUNCTIONS = """
<domain: "localattn", opset_import: ["" : 20]> ours (a, b) => (c) { c = MatMul(a, b) }
<domain: "own", opset_import: ["" : 20]> theirs (a, b) => (c) { c = MatMul(a, b) }
"""
RESULT = "g (float16[3,512] x, float16[512,4] y, bool c) => (float16[3,4] z) "
# Each is x @ y.
MODELS = {
    "MatMul": RESULT + "{ z = MatMul(x, y) }",
    "Gemm": RESULT + "{ t = Transpose(x)\n o = Constant<value_float = 0.0>()\n h = CastLike(o, x)\n"
    " z = Gemm<transA = 1>(t, y, h) }",
    "weights": RESULT.replace(", float16[512,4] y", "") + "{ z = MatMul(x, y) }",
    "a branch": RESULT + "{ z = If(c) <then_branch = t () => (float16[3,4] p) { p = MatMul(x, y) },"
    " else_branch = e () => (float16[3,4] q) { q = MatMul(x, y) }> }",
    "a function of ours": RESULT + "{ z = localattn.ours(x, y) }" + FUNCTIONS,
}


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEADER + text)


def whole_numbers() -> tuple[np.ndarray, np.ndarray]:
    """Numbers whose sums fp32 holds and fp16, which has 11 bits, does not on the way; the results it can round."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 8, (3, 512)).astype(np.float16), generator.integers(0, 8, (512, 4)).astype(np.float16)


def products(graph: Any) -> list[list[str]]:
    """The operators that feed each product of a graph or function, and of the graphs inside."""
    made = {output: node for node in graph.node for output in node.output}
    found = []
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            found.append([made[name].op_type for name in node.input if name in made])
        for attribute in node.attribute:
            found += products(attribute.g)
    return found


@pytest.fixture
def sums_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """This processor is one on which onnxruntime sums products of fp16 in fp16."""
    here = {host_arch(): "1.0"}
    monkeypatch.setitem(PROVIDERS, "cpu", replace(PROVIDERS["cpu"], sums_halves=here))


@pytest.mark.parametrize("name", MODELS)
def test_a_product_is_summed_in_fp32_and_rounded_once(name: str, sums_halves: None) -> None:
    x, y = whole_numbers()
    model = parsed(MODELS[name])
    if name == "weights":
        model.graph.initializer.append(onnx.numpy_helper.from_array(y, "y"))
    session = open_bytes(model.SerializeToString())
    assert session.notes == (SUMMED,)
    given = {spec.name: {"x": x, "y": y, "c": np.array(True)}[spec.name] for spec in session.inputs}
    exact = x.astype(np.float64) @ y.astype(np.float64)
    assert exact.min() > 2048  # where fp16 no longer counts in ones
    np.testing.assert_array_equal(session.run(given)["z"], exact.astype(np.float16))
    copy = fp16_matmul_in_fp32.apply(model)
    onnx.checker.check_model(copy, full_check=True)
    found = products(copy.graph) + [row for f in copy.functions if f.domain == "localattn" for row in products(f)]
    assert found and all(row == ["Cast"] * len(row) and len(row) >= 2 for row in found)


@pytest.mark.parametrize(
    "body",
    [
        "g (float16[2,2] h, float[3,512] x, float[512,4] y) => (float[3,4] z) { z = MatMul(x, y) }",
        "g (float16[2,2] h, int64[3,512] x, int64[512,4] y) => (int64[3,4] z) { z = MatMul(x, y) }",
        "g (float16[2,2] h, double[3,512] x, double[512,4] y) => (double[3,4] z) { z = MatMul(x, y) }",
        "g (float16[2,2] h, double[3,512] x, double[512,4] y) => (double[3,4] z) { z = own.theirs(x, y) }" + FUNCTIONS,
    ],
)
def test_other_products_stay_as_they_are(body: str) -> None:
    copy = fp16_matmul_in_fp32.apply(parsed(body))
    assert not any("Cast" in row for row in products(copy.graph))
    assert not any("Cast" in row for f in copy.functions if f.domain == "own" for row in products(f))


def test_a_model_without_fp16_is_not_copied(sums_halves: None) -> None:
    model = onnx.load(small_model())
    assert fp16_matmul_in_fp32.apply(model) is model
    assert load(small_model(), "cpu", plugin="none").notes == ()


def test_every_product_of_an_exported_file(tmp_path: Path) -> None:
    """Those of the weights and those inside the attention; the functions stay, for compiled kernels to take."""
    copy, file = fp16_matmul_in_fp32.apply(onnx.load(small_model("fp16"))), onnx.load(small_model("fp16"))
    onnx.checker.check_model(copy, full_check=True)
    calls = [Counter(node.op_type for node in m.graph.node if node.domain) for m in (copy, file)]
    assert calls[0] == calls[1] and calls[0]["WindowedAttention"] == 2
    fp16 = TensorProto.FLOAT16
    weights = {tensor.name for tensor in file.graph.initializer if tensor.data_type == fp16}
    of_weights = [n for n in copy.graph.node if n.op_type == "MatMul" and weights & {*n.input}]
    assert of_weights == []  # each reads its weights through a Cast
    attention = next(f for f in copy.functions if f.name == "WindowedAttention")
    assert products(attention) and all(set(row) == {"Cast"} for row in products(attention))


@pytest.mark.parametrize("external", [False, True])
def test_an_exported_file_gives_the_same(external: bool, sums_halves: None, tmp_path: Path) -> None:
    path = small_model("fp16")
    if external:
        path = tmp_path / "beside.onnx"
        export(ExportRequest(small_checkpoint(), path, dtype="fp16", external_data_from=0))
    given = {"tokens": np.arange(64).reshape(1, 64) % 23}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROVIDERS, "cpu", replace(PROVIDERS["cpu"], sums_halves={}))
        plain = load(path, "cpu", plugin="none")
    session = load(path, "cpu", plugin="none")
    assert (plain.notes, session.notes) == ((), (SUMMED,))
    np.testing.assert_allclose(session.run(given)["logits"], plain.run(given)["logits"], rtol=1e-2, atol=1e-2)
    profiled = open_tuned(path, "cpu", None, cuda_graph=False, profile=str(tmp_path))
    assert profiled.notes == (SUMMED,)
    assert (tmp_path / OPTIMIZED).is_file()
    np.testing.assert_array_equal(profiled.native.run(None, given)[0], session.run(given)["logits"])


def test_a_step_file_gives_the_same(sums_halves: None, tmp_path: Path) -> None:
    path = tmp_path / "small.pt"
    path.write_bytes(small_checkpoint().read_bytes())
    path.with_suffix(".json").write_bytes(small_checkpoint().with_suffix(".json").read_bytes())
    step = steps(path, 8, dtype="fp16")[0].path
    tokens = np.arange(20).reshape(1, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROVIDERS, "cpu", replace(PROVIDERS["cpu"], sums_halves={}))
        plain = open_step(step, "cpu").consume({"tokens": tokens})
    np.testing.assert_allclose(open_step(step, "cpu").consume({"tokens": tokens}), plain, rtol=1e-2, atol=1e-2)
