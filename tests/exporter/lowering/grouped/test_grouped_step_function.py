"""The ONNX functions of the grouped step nodes, and the module's own formula, against whole sequences in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import DOMAIN, DOMAIN_VERSION, HEADS_FIRST
from localattn.core.nodes.step import STEP_VARIANTS, StepAttributes, StepVariant
from localattn.exporter.lowering.step_function import build_step
from localattn.exporter.models.parts.step_attention_op import step_attention_op
from localattn.exporter.models.parts.step_tables import StepTables
from localattn.runtime.backends.onnxruntime.session import open_bytes

from ....support import reference
from ....support.models.node_model import ELEMENT, NUMPY

BATCH, HEADS, HEAD_DIM, SLOTS, SCALE, HIDDEN = 2, 6, 8, 8, 0.35, -2e30
LENGTH = 5 * SLOTS  # several windows
GROUPED = [variant for variant in STEP_VARIANTS if variant.grouped]


def model(
    variant: StepVariant, attributes: StepAttributes, chunk: int, kv_heads: int, rank: int, dtype: str
) -> onnx.ModelProto:
    """A checked model of one node and its function."""
    seen = SLOTS + chunk * variant.chunked
    shapes: dict[str, list[int]] = {
        "query": [BATCH, HEADS, chunk, HEAD_DIM],
        **{name: [BATCH, kv_heads, chunk, HEAD_DIM] for name in ("key", "value")},
        **{name: [BATCH, kv_heads, SLOTS, HEAD_DIM] for name in ("key_cache", "value_cache")},
        "score_bias": [BATCH, 1, chunk, seen][4 - rank :],
        "write_index": [SLOTS] if variant.chunked else [BATCH, kv_heads, 1, 3],
        "sinks": [HEADS],
    }
    types = {"score_bias": ir.DataType.FLOAT, "write_index": ir.DataType.INT64}
    inputs = [
        ir.Value(name=name, shape=ir.Shape(shapes[name]), type=ir.TensorType(types.get(name, ELEMENT[dtype])))
        for name in variant.input_names
    ]
    node = ir.node(variant.op_type, inputs, attributes.as_onnx(variant), domain=DOMAIN, num_outputs=3)
    for output, name, like in zip(node.outputs, ("out", "keys", "values"), (0, 3, 4), strict=True):
        output.name, output.shape, output.type = name, inputs[like].shape, inputs[like].type
    opsets = {"": 20, DOMAIN: DOMAIN_VERSION}
    graph = ir.Graph(inputs, list(node.outputs), nodes=[node], opset_imports=opsets, name="one_node")
    functions = [build_step(variant.op_type, 20, [node])]
    made = ir.serde.serialize_model(ir.Model(graph, ir_version=10, functions=functions))
    onnx.checker.check_model(made, full_check=True)
    return made


def tables(start: int, chunk: int, kept: NDArray[np.bool_], kv_heads: int, rank: int) -> tuple[Any, Any]:
    """The bias of scores and the index of writes, counted position by position."""
    holds = [
        next((p for p in range(start - 1, start - 1 - SLOTS, -1) if p % SLOTS == slot), -1) for slot in range(SLOTS)
    ]
    new = list(range(start, start + chunk))
    if chunk == 1:
        holds[start % SLOTS] = start
        index = np.zeros((BATCH, kv_heads, 1, 3), np.int64)
        index[..., 0], index[..., 1] = np.arange(BATCH)[:, None, None], np.arange(kv_heads)[:, None]
        index[..., 2] = start % SLOTS
    else:
        after = holds + new
        index = np.array(
            [max(range(len(after)), key=lambda i: after[i] if after[i] % SLOTS == s else -9) for s in range(SLOTS)]
        )
        holds = after
    bias = np.full((BATCH, 1, chunk, len(holds)), HIDDEN, np.float32)
    for row in range(BATCH):
        for query in range(chunk):
            for place, position in enumerate(holds):
                if position >= 0 and start + query - SLOTS < position <= start + query and kept[row, position]:
                    bias[row, 0, query, place] = 0.0
    return (bias[0, 0] if rank == 2 else bias), index


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("variant", GROUPED, ids=lambda variant: variant.op_type)
def test_calls_one_after_another_are_the_whole_sequence(variant: StepVariant, kv_heads: int) -> None:
    rng = np.random.default_rng(kv_heads)
    dtype, rank = ("fp16", 2) if kv_heads == 1 and variant.has_sinks else ("fp32", 2 + 2 * (kv_heads == 3))
    window = WindowGeometry.reaching(SLOTS - 1, 0)
    attributes = StepAttributes(window, SCALE, softcap=1.5 if variant.has_softcap else 0.0)
    chunk = 5 if variant.chunked else 1
    whole = {
        name: rng.standard_normal((BATCH, heads, LENGTH, HEAD_DIM)).astype(NUMPY[dtype])
        for name, heads in (("query", HEADS), ("key", kv_heads), ("value", kv_heads))
    }
    kept = np.ones((BATCH, LENGTH), bool)
    kept[1, : 11 if rank == 4 else 0] = False  # padding longer than the ring
    optional: dict[str, Any] = {"sinks": rng.standard_normal(HEADS).astype(NUMPY[dtype])} if variant.has_sinks else {}
    expected = reference.grouped_attention(
        window, SCALE, attributes.softcap, HEADS_FIRST, **whole, **optional, **({"key_mask": kept} if rank == 4 else {})
    )
    session = open_bytes(model(variant, attributes, chunk, kv_heads, rank, dtype).SerializeToString(), "cpu", threads=1)
    caches = [np.zeros((BATCH, kv_heads, SLOTS, HEAD_DIM), NUMPY[dtype]) for _ in range(2)]
    tolerance = 1e-5 if dtype == "fp32" else 5e-3
    for start in range(0, LENGTH, chunk):
        data = [whole[name][:, :, start : start + chunk] for name in ("query", "key", "value")]
        bias, index = tables(start, chunk, kept, kv_heads, rank)
        feed = dict(zip(variant.input_names, [*data, *caches, bias, index, *optional.values()], strict=True))
        found = session.run(feed)
        view = StepTables(torch.from_numpy(bias), torch.from_numpy(index), (), ())
        tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (*data, *caches)]
        plain = step_attention_op(
            *tensors[:3], tensors[3:], view, attributes, *(torch.from_numpy(x) for x in optional.values())
        )
        caches = [found["keys"], found["values"]]
        rows = kept[:, start : start + chunk]
        for out in (found["out"], plain[0].numpy()):
            wrong = np.abs(out.astype(np.float64) - expected[:, :, start : start + chunk]).max(axis=(1, 3))
            assert (wrong * rows).max() < tolerance and np.isfinite(out).all()
        for ours, theirs in zip(caches, plain[1:], strict=True):
            np.testing.assert_array_equal(ours, theirs.numpy())
