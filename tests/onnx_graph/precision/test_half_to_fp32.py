"""bf16 on a provider without bf16: every operator rounds as PyTorch's own bf16 does, and only where the file does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto
from torch import Tensor

from localattn.core.errors import UsageError
from localattn.core.tensors import TensorSpec
from localattn.onnx_graph.precision import half_to_fp32
from localattn.runtime import load
from localattn.runtime.backends.onnxruntime.session import EMULATED, open_bytes

HEADER = '<ir_version: 10, opset_import: ["" : 20, "own" : 1]>\n'


def parsed(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + text)
    onnx.checker.check_model(model, full_check=True)
    return model


def session_of(text: str) -> Any:
    return open_bytes(parsed(text).SerializeToString())


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).bfloat16()


def fed(tensor: Tensor) -> np.ndarray:
    return tensor.float().numpy()


Case = tuple[str, Callable[[Tensor, Tensor], Tensor]]
# A body from x bf16[4,8] and y bf16[8,4], and the same in PyTorch, whose CPU kernels sum in fp32 and round once.
OPERATORS: dict[str, Case] = {
    "MatMul": ("z = MatMul(x, y)", lambda x, y: x @ y),
    "Gemm": ("z = Gemm<transA = 1, transB = 1>(x, y)", lambda x, y: x.T @ y.T),
    "Add": ("t = Transpose<perm = [1, 0]>(y)\n z = Add(x, t)", lambda x, y: x + y.T),
    "Mul": ("t = Transpose<perm = [1, 0]>(y)\n z = Mul(x, t)", lambda x, y: x * y.T),
    "Div": ("t = Transpose<perm = [1, 0]>(y)\n z = Div(x, t)", lambda x, y: x / y.T),
    "three in a row": (
        "a = MatMul(x, y)\n b = Mul(a, a)\n z = Add(b, a)",
        lambda x, y: (x @ y) * (x @ y) + x @ y,
    ),
    "Sigmoid": ("z = Sigmoid(x)", lambda x, y: torch.sigmoid(x)),
    "Gelu": ("z = Gelu(x)", lambda x, y: F.gelu(x)),
    "Tanh": ("z = Tanh(x)", lambda x, y: torch.tanh(x)),
    "Sqrt": ("a = Abs(x)\n z = Sqrt(a)", lambda x, y: x.abs().sqrt()),
    "Softmax": ("z = Softmax<axis = 1>(x)", lambda x, y: x.softmax(1)),
    "ReduceSum": (
        "i = Constant<value_ints = [1]>()\n z = ReduceSum(x, i)",
        lambda x, y: x.float().sum(1, keepdim=True).bfloat16(),
    ),
    "Split, Concat, Neg": (
        "a, b = Split<axis = 1, num_outputs = 2>(x)\n c = Neg(b)\n z = Concat<axis = 1>(c, a)",
        lambda x, y: torch.cat((-x[:, 4:], x[:, :4]), 1),
    ),
    "Gather": ("i = Constant<value_ints = [2, 0, 2]>()\n z = Gather(x, i)", lambda x, y: x[[2, 0, 2]]),
    "Pad": ("p = Constant<value_ints = [0, 0, 1, 0]>()\n z = Pad(x, p)", lambda x, y: F.pad(x, (0, 0, 0, 1))),
    "Where": ("t = Transpose<perm = [1, 0]>(y)\n c = Greater(x, t)\n z = Where(c, x, t)", lambda x, y: x.maximum(y.T)),
    "Constant": (
        "c = Constant<value_float = 0.3>()\n d = CastLike(c, x)\n z = Mul(x, d)",
        lambda x, y: x * torch.tensor(0.3).bfloat16(),
    ),
    "CastLike": (
        "a = Cast<to = 1>(x)\n b = Add(a, a)\n c = Mul(b, a)\n z = CastLike(c, x)",
        lambda x, y: ((x.float() + x.float()) * x.float()).bfloat16(),
    ),
    "ScatterND that adds": (
        "i = Constant<value = int64[2, 1] {1, 1}>()\n t = Transpose<perm = [1, 0]>(y)\n"
        ' r = Constant<value_ints = [0, 1]>()\n u = Gather(t, r)\n z = ScatterND<reduction = "add">(x, i, u)',
        lambda x, y: torch.cat((x[:1], (x[1:2].float() + y.T[0].float() + y.T[1].float()).bfloat16(), x[2:])),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_pytorch_gives_in_bf16(name: str) -> None:
    body, torchs = OPERATORS[name]
    x, y = bf16(4, 8, seed=1), bf16(8, 4, seed=2)
    expected = torchs(x, y)
    shape = ",".join(map(str, expected.shape))
    text = f"g (bfloat16[4,8] x, bfloat16[8,4] y) => (bfloat16[{shape}] z) {{ {body}\n unused = Identity(y) }}"
    session = session_of(text)
    assert session.notes == (EMULATED,)
    assert session.outputs == [TensorSpec("z", "float32", tuple(expected.shape))]
    actual = session.run({"x": fed(x), "y": fed(y)})["z"]
    if name in ("Gelu", "Tanh", "Sigmoid", "Softmax"):  # two libraries' functions: a last place where fp32 differs
        assert np.abs(actual - fed(expected)).max() <= np.abs(fed(expected)).max() * 2**-8
        assert np.mean(actual != fed(expected)) < 0.1
        np.testing.assert_array_equal(torch.from_numpy(actual).bfloat16().float().numpy(), actual)
    else:
        np.testing.assert_array_equal(actual, fed(expected))


def test_casts_round_to_nearest_even_also_what_is_tiny_huge_or_no_number() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    special = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x007FFFFF, 0x3F808000, 0x3F818000, 0x3F808001]
    special += [0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0x7FC00000, 0x7F800001]
    both = [bit | sign for bit in special for sign in (0, 0x80000000)]
    x = np.concatenate((bits, np.array(both, dtype=np.uint32))).view(np.float32)
    rounded = session_of(f"g (bfloat16[{x.size}] x) => (bfloat16[{x.size}] y) {{ y = Identity(x) }}").run({"x": x})["y"]
    wanted = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.isnan(rounded[np.isnan(wanted)]).all()
    finite = ~np.isnan(wanted)
    np.testing.assert_array_equal(rounded[finite].view(np.uint32), wanted[finite].view(np.uint32))


def test_values_round_once_and_only_where_the_file_rounds() -> None:
    """A fp32 stretch stays exact, and what only moves numbers gets no Casts."""
    model = parsed(
        "g (float[4,8] x, bfloat16[8,4] w) => (float[4,4] y) {"
        " a = Mul(x, x)\n b = Cast<to = 16>(a)\n c = Identity(b)\n d = MatMul(c, w)\n y = Cast<to = 1>(d) }"
    )
    copy = half_to_fp32.apply(model)
    rounding = [
        node for node in copy.graph.node if node.op_type == "Cast" and node.attribute[0].i == TensorProto.BFLOAT16
    ]
    assert len(rounding) == 3  # the input w, the Cast of the file, the product
    kinds = {value.type.tensor_type.elem_type for value in (*copy.graph.input, *copy.graph.output)}
    assert kinds == {TensorProto.FLOAT}
    x, w = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)), bf16(8, 4)
    expected = ((x * x).bfloat16() @ w).float()
    actual = open_bytes(model.SerializeToString()).run({"x": x.numpy(), "w": fed(w)})["y"]
    np.testing.assert_array_equal(actual, expected.numpy())


def test_functions_are_followed_inside() -> None:
    session = session_of(
        "g (bfloat16[4,8] x) => (bfloat16[4,8] y) { a = own.twice(x)\n y = own.twice(a) }\n"
        '<domain: "own", opset_import: ["" : 20, "own" : 1]> twice (a) => (c) { b = Mul(a, a)\n c = own.inner(b) }\n'
        '<domain: "own", opset_import: ["" : 20]> inner (a) => (b) { b = Add(a, a) }'
    )
    x = bf16(4, 8)
    expected = x
    for _ in range(2):
        expected = expected * expected
        expected = expected + expected
    np.testing.assert_array_equal(session.run({"x": fed(x)})["y"], fed(expected))


def test_nodes_with_a_kernel_stay_and_their_results_are_rounded_once() -> None:
    model = parsed(
        "g (bfloat16[4,8] x) => (bfloat16[4,8] y) { a = own.twice(x)\n y = own.twice(a) }\n"
        '<domain: "own", opset_import: ["" : 20, "own" : 1]> twice (a) => (c) { b = Mul(a, a)\n c = own.inner(b) }\n'
        '<domain: "own", opset_import: ["" : 20]> inner (a) => (b) { c = Add(a, a)\n b = Mul(c, a) }'
    )
    copy = half_to_fp32.apply(model, lambda domain, op_type: (domain, op_type) == ("own", "inner"))
    assert not copy.functions
    assert [node.op_type for node in copy.graph.node] == [
        *("Cast", "Cast"),  # the input
        *("Mul", "Cast", "Cast", "inner", "Cast", "Cast"),
        *("Mul", "Cast", "Cast", "inner", "Cast", "Cast"),
    ]
    assert {value.type.tensor_type.elem_type for value in copy.graph.output} == {TensorProto.FLOAT}


def test_graphs_inside_nodes_round_too() -> None:
    body = onnx.parser.parse_graph(
        "step (bfloat16[8] state, bfloat16[8] row) => (bfloat16[8] next, bfloat16[8] out)"
        " { next = Add(state, row)\n out = Mul(next, w) }"
    )
    model = parsed("g (bfloat16[4,8] x, bfloat16[8] w) => (bfloat16[4,8] y) { y = Mul(x, w) }")
    del model.graph.node[:]
    model.graph.node.extend(
        [
            onnx.helper.make_node(
                "Constant", [], ["zero"], value=onnx.helper.make_tensor("", 16, [8], b"\0" * 16, raw=True)
            ),
            onnx.helper.make_node("Scan", ["zero", "x"], ["last", "y"], body=body, num_scan_inputs=1),
        ]
    )
    onnx.checker.check_model(model, full_check=True)
    x, w = bf16(4, 8), bf16(8, seed=5)
    state, rows = torch.zeros(8).bfloat16(), []
    for row in x:
        state = state + row
        rows.append(state * w)
    actual = open_bytes(model.SerializeToString()).run({"x": fed(x), "w": fed(w)})["y"]
    np.testing.assert_array_equal(actual, fed(torch.stack(rows)))


def product_with(weight: Tensor) -> onnx.ModelProto:
    """`y = x·w` with `w` bf16 `[K, N]` stored in the model and `x` `[4, K]`."""
    k, n = weight.shape
    values = [
        onnx.helper.make_tensor_value_info(name, TensorProto.BFLOAT16, (4, size)) for name, size in (("x", k), ("y", n))
    ]
    stored = onnx.helper.make_tensor("w", 16, [k, n], weight.view(torch.int16).numpy().tobytes(), raw=True)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [stored]
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def test_external_weights_are_referred_to_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, path = bf16(8, 4, seed=3), tmp_path / "m.onnx"
    onnx.save(product_with(weight), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").stat().st_size == 64
    copy = half_to_fp32.apply(onnx.load(path, load_external_data=False))
    (stored,) = copy.graph.initializer
    assert stored.data_location == TensorProto.EXTERNAL and stored.data_type == TensorProto.BFLOAT16
    monkeypatch.chdir(tmp_path.parent)  # the folder is the model's, not the current one
    x = bf16(4, 8)
    np.testing.assert_array_equal(load(path).run({"x": fed(x)})["y"], fed(x @ weight))


def test_large_weights_come_back_whole() -> None:
    weight, x = bf16(64, 64, seed=4), bf16(4, 64)
    model = product_with(weight).SerializeToString()
    np.testing.assert_array_equal(open_bytes(model).run({"x": fed(x)})["y"], fed(x @ weight))


def test_names_that_are_taken_are_left_alone() -> None:
    model = parsed("g (bfloat16[4] x) => (bfloat16[4] y) { a = Add(x, x)\n y = Mul(a, x) }")
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = {"a": "y/exact"}.get(name, name)
    x = bf16(4)
    np.testing.assert_array_equal(open_bytes(model.SerializeToString()).run({"x": fed(x)})["y"], fed((x + x) * x))


def test_a_model_without_bf16_is_left_to_the_engine() -> None:
    fp16 = parsed("g (float16[4] x) => (float16[4] y) { y = Add(x, x) }")
    assert half_to_fp32.apply(fp16) is fp16
    assert open_bytes(fp16.SerializeToString()).notes == ()
    # No kernel, and bf16 has nothing to do with it: the reason is onnxruntime's own.
    unknown = parsed("g (double[2, 2] x) => (double y) { y = Det(x) }").SerializeToString()
    with pytest.raises(UsageError, match="in memory") as caught:
        open_bytes(unknown)
    assert "Could not find an implementation" in caught.value.why
