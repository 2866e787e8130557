"""An output that is left out takes along what serves it alone, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime

from localattn.runtime.backends.onnxruntime.prefill_file import without_output

MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
model (float[2] x, bool choose) => (float[2] logits, float[2] state) <float[2] head = {5, 6}, float[2] kept = {1, 2}> {
    twice = Add(x, x)
    logits = Mul(twice, head)
    state = If(choose) <
        then_branch = then_part () => (float[2] a) { a = Add(twice, kept) },
        else_branch = else_part () => (float[2] b) { b = Identity(kept) }
    >
}
"""


def test_the_rest_stays_and_computes_the_same() -> None:
    model = onnx.parser.parse_model(MODEL)
    short = without_output(model, "logits")
    assert [node.op_type for node in short.graph.node] == ["Add", "If"]
    assert [tensor.name for tensor in short.graph.initializer] == ["kept"]
    assert len(model.graph.node) == 3, "the given model is as it was"
    session = onnxruntime.InferenceSession(short.SerializeToString(), providers=["CPUExecutionProvider"])
    for choose, wanted in ((True, [7.0, 10.0]), (False, [1.0, 2.0])):
        (state,) = session.run(None, {"x": np.array([3, 4], np.float32), "choose": np.array(choose)})
        assert state.tolist() == wanted
