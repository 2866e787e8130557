"""The pass to half precision: which operators round, what is stored narrow, and that the file computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from localattn.core.errors import UsageError
from localattn.onnx_graph.library_errors import infer_shapes
from localattn.onnx_graph.precision import fp32_to_half
from localattn.onnx_graph.precision.half_to_fp32 import apply as computed_in_fp32

_RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32) / 4


def model(nodes: list[onnx.NodeProto], inputs: dict, outputs: dict, **tensors: np.ndarray) -> onnx.ModelProto:
    kinds = {name: onnx.TensorProto.INT64 if name == "tokens" else onnx.TensorProto.FLOAT for name in inputs}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(x, name) for name, x in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def converted(given: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    narrow = fp32_to_half.apply(ir.serde.deserialize_model(infer_shapes(given)), dtype)
    made = ir.serde.serialize_model(narrow)
    onnx.checker.check_model(made, full_check=True)
    return made


def block() -> onnx.ModelProto:
    """A residual block behind a table, with a norm, a gate, a mask of -1e30 and a recurrent layer."""
    node = helper.make_node
    return model(
        [
            node("Gather", ["table", "tokens"], ["e"]),
            node("MatMul", ["x", "w0"], ["h"]),
            node("Add", ["e", "h"], ["stream"]),
            node("LayerNormalization", ["stream", "scale", "shift"], ["n"]),
            node("MatMul", ["n", "w1"], ["up"]),
            node("Add", ["up", "b1"], ["upb"]),
            node("Gelu", ["upb"], ["g"]),
            node("MatMul", ["g", "w2"], ["down"]),
            node("Add", ["stream", "down"], ["stream2"]),
            node("Greater", ["tokens", "four"], ["late"]),
            node("Unsqueeze", ["late", "last"], ["kept"]),
            node("Where", ["kept", "down", "low"], ["masked"]),
            node("Softmax", ["masked"], ["p"]),
            node("Transpose", ["stream2"], ["t"], perm=[1, 0, 2]),
            node("LSTM", ["t", "W", "R", "B"], ["y4", "", ""], hidden_size=8),
            node("Squeeze", ["y4", "one"], ["y"]),
        ],
        {"tokens": [2, 5], "x": [2, 5, 4]},
        {"p": [2, 5, 16], "y": [5, 2, 8]},
        table=weights(11, 16), w0=weights(4, 16), w1=weights(16, 32), b1=weights(32), w2=weights(32, 16),
        scale=np.ones(16, np.float32), shift=np.zeros(16, np.float32), four=np.array(4), last=np.array([-1]),
        low=np.float32(-1e30),
        W=weights(1, 32, 16), R=weights(1, 32, 8), B=weights(1, 64), one=np.array([1]),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_block_in_half_precision(dtype: str) -> None:
    given = block()
    narrow = converted(given, dtype)
    kind = onnx.TensorProto.FLOAT16 if dtype == "fp16" else onnx.TensorProto.BFLOAT16
    outside = onnx.TensorProto.FLOAT16 if dtype == "fp16" else onnx.TensorProto.FLOAT
    assert [value.type.tensor_type.elem_type for value in narrow.graph.output] == [outside] * 2
    assert [value.name for value in narrow.graph.output] == ["p", "y"]
    assert [value.type.tensor_type.elem_type for value in narrow.graph.input] == [onnx.TensorProto.INT64, outside]
    types = {x.name.partition(".")[0]: x.data_type for x in narrow.graph.initializer}
    stored = {"table", "w0", "w1", "b1", "w2", "W", "R", "B"} | ({"low"} if dtype == "bf16" else set())
    assert {name for name, found in types.items() if found == kind} == stored
    made = {x.name: x.type.tensor_type.elem_type for x in infer_shapes(narrow).graph.value_info}
    assert made["g"] == made["down"] == kind and made["stream"] == made["n"] == onnx.TensorProto.FLOAT
    assert (made["masked"] == kind) == (dtype == "bf16")  # fp16 has no -1e30
    inputs = {"tokens": np.arange(10).reshape(2, 5), "x": weights(2, 5, 4)}
    half = {name: x.astype(np.float16) if dtype == "fp16" and name == "x" else x for name, x in inputs.items()}
    expected = onnxruntime.InferenceSession(given.SerializeToString()).run(None, inputs)
    runs = computed_in_fp32(narrow, dtypes=("bf16", "fp16"))
    actual = onnxruntime.InferenceSession(runs.SerializeToString()).run(None, half)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-2)
        assert not np.array_equal(one, other)


def test_captured_values_are_wide() -> None:
    node, info = helper.make_node, helper.make_tensor_value_info
    real = onnx.TensorProto.FLOAT
    branches = [
        helper.make_graph([node(op, ["h"], ["r"])], op, [], [info("r", real, [2, 4])]) for op in ("Exp", "Sqrt")
    ]
    given = model(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("ReduceSum", ["x"], ["s"], keepdims=0),
            node("Cast", ["s"], ["c"], to=onnx.TensorProto.BOOL),
            node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        ],
        {"x": [2, 4]},
        {"y": [2, 4]},
        w=weights(4, 4),
    )
    x = weights(2, 4)
    narrow = converted(given, "fp16")
    (expected,) = onnxruntime.InferenceSession(given.SerializeToString()).run(None, {"x": x})
    (actual,) = onnxruntime.InferenceSession(narrow.SerializeToString()).run(None, {"x": x.astype(np.float16)})
    np.testing.assert_allclose(actual, expected, atol=2e-2)


def test_weights_beyond_fp16_are_refused() -> None:
    given = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": [1, 2]},
        {"y": [1, 2]},
        w=np.full((2, 2), 7e4, np.float32),
    )
    with pytest.raises(UsageError, match="Weights do not fit fp16: w"):
        converted(given, "fp16")
    assert converted(given, "bf16").graph.initializer[0].data_type == onnx.TensorProto.BFLOAT16
