"""The operators onnxruntime really runs: a guard against layout changes, casts and copies creeping back in.

Counts are exact and do not depend on the machine's speed. They are taken from the graph after onnxruntime's own
optimization, so what it folds or fuses away is not held against the export.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import onnx
import pytest

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST, VARIANT_BY_OP_TYPE, NodeAttributes
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.lowering import function_properties

from ...conftest import TINY, save_upstream
from ...support.models.node_model import HEADS, one_node
from ...support.models.optimized import operators

LONG = 256
EXACT = WindowGeometry(32, 1, 0, causal=True, exact_windowsize=True)


# What raises the scores of hidden keys: two passes over the scores (ReduceMax, Max), the others over a number a query.
FLOOR = {"ReduceMax": 1, "Sub": 1, "LeakyRelu": 1, "Min": 1, "Max": 1}
CORE = {"FusedMatMul": 1, "MatMul": 1, "Softmax": 1, "Reshape": 2, **FLOOR}
NODES = {
    # op type, layout: what it takes beyond the two products and the softmax.
    ("WindowedAttention", HEADS_FIRST): {"Gather": 2, "Add": 1},
    ("WindowedAttention", SEQUENCE_FIRST): {"Gather": 2, "Add": 1, "Transpose": 4},
    # The mask: gathered, made a bias (Where), added to the two small ones that hide the rest. Keys and values get a
    # row of zeros (Concat), from which those of masked keys are gathered (Where).
    ("WindowedAttentionMask", HEADS_FIRST): {
        "Gather": 3, "Add": 3, "Where": 2, "Unsqueeze": 2, "Concat": 2, "Reshape": 2,
    },
    # A bias that is an input: kept finite (Max), windowed, and one pass for what lies outside the sequence.
    ("WindowedAttentionBias", HEADS_FIRST): {"Gather": 2, "Add": 3, "Max": 1, "Unsqueeze": 1, "Where": 1},
}  # fmt: skip


@pytest.mark.parametrize(("op_type", "perm"), NODES, ids=lambda x: str(x))
def test_the_node_runs_these_operators_and_no_others(op_type: str, perm: tuple[int, ...], tmp_path: Path) -> None:
    variant = VARIANT_BY_OP_TYPE[op_type]
    attributes = NodeAttributes(EXACT, 0.3, perm=perm, query_block=32)
    found = operators(one_node(variant, attributes, LONG).SerializeToString(), tmp_path)
    assert found == Counter(CORE) + Counter(NODES[op_type, perm])


@pytest.mark.parametrize("op_type", ["WindowedAttention", "WindowedAttentionMask", "WindowedAttentionBias"])
def test_a_body_in_parts_runs_these_operators(op_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks of which the first sees positions before the sequence, two at a time: 1, 2, 2, 2 and 1."""
    monkeypatch.setattr(function_properties, "PART_BYTES", 2 * 4 * (2 * HEADS) * 32 * 64)
    variant = VARIANT_BY_OP_TYPE[op_type]
    model = one_node(variant, NodeAttributes(EXACT, 0.3, perm=HEADS_FIRST, query_block=32), LONG)
    found = operators(model.SerializeToString(), tmp_path)
    parts = {**CORE, "Gather": 2}
    once = {"Split": 1, "Concat": 1}
    own = {
        # One small bias for all blocks that are inside; the first block's other one is a pass of its own.
        "WindowedAttention": Counter({"Add": 5 + 1}),
        # Each part's keys: gathered mask, made a bias, added to the window's; the first block's, to one more.
        "WindowedAttentionMask": Counter(
            {"Gather": 5, "Where": 2 * 5, "Unsqueeze": 2 * 5, "Add": 2 * 5 + 1, "Concat": 2, "Reshape": 2}
        ),
        "WindowedAttentionBias": Counter({"Add": 1 + 5 + 1, "Max": 1, "Unsqueeze": 1, "Where": 1}),
    }  # fmt: skip
    assert found == Counter({name: 5 * count for name, count in parts.items()}) + Counter(once) + own[op_type]


def test_a_body_in_parts_keeps_no_bias_of_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What onnxruntime folds: one window for a block, and what hides the positions before the sequence."""
    variant = VARIANT_BY_OP_TYPE["WindowedAttention"]
    attributes = NodeAttributes(EXACT, 0.3, perm=HEADS_FIRST, query_block=32)

    def constants() -> int:
        operators(one_node(variant, attributes, LONG).SerializeToString(), tmp_path)
        graph = onnx.load(tmp_path / "optimized.onnx").graph
        return sum(math.prod(x.dims) for x in graph.initializer if x.data_type == onnx.TensorProto.FLOAT)

    blocks, window = LONG // 32, 32 * 64
    assert blocks * window <= constants() < blocks * window + 100
    monkeypatch.setattr(function_properties, "PART_BYTES", 2 * 4 * (2 * HEADS) * 32 * 64)
    assert window <= constants() < window + 64 + 100


def test_scores_meet_one_bias_and_no_where(tmp_path: Path) -> None:
    """With a mask too: a Where is on the mask gathered or on indices, never on a tensor that has channels."""
    variant = VARIANT_BY_OP_TYPE["WindowedAttentionMask"]
    model = one_node(variant, NodeAttributes(EXACT, 0.3, perm=HEADS_FIRST, query_block=32), LONG)
    operators(model.SerializeToString(), tmp_path)
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    makers = {name: node for node in graph.node for name in node.output}
    softmax = next(node for node in graph.node if node.op_type == "Softmax")
    floored = makers[softmax.input[0]]
    assert floored.op_type == "Max"
    add = makers[floored.input[0]]
    assert add.op_type == "Add"
    assert [makers[name].op_type for name in add.input if name in makers and makers[name].op_type == "FusedMatMul"]


def test_a_short_sequence_gathers_nothing(tmp_path: Path) -> None:
    variant = VARIANT_BY_OP_TYPE["WindowedAttention"]
    attributes = NodeAttributes(EXACT, 0.3, perm=HEADS_FIRST, query_block=32)
    found = operators(one_node(variant, attributes, 64).SerializeToString(), tmp_path)
    assert "Gather" not in found and found["Add"] == 1
    sees_all = NodeAttributes(WindowGeometry(32, 1, 1), 0.3, perm=HEADS_FIRST, query_block=32)
    found = operators(one_node(variant, sees_all, 64).SerializeToString(), tmp_path)
    assert "Gather" not in found and "Add" not in found


def test_the_whole_model_runs_these_operators_and_no_others(tmp_path: Path) -> None:
    """A rotary transformer with four residual streams: what each layer and each end of it takes."""
    depth = TINY["depth"]
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)
    report = export(ExportRequest(checkpoint, tmp_path / "m.onnx"))
    found = operators(report.path.read_bytes(), tmp_path)
    connections = 2 * depth
    # q, k, v and out; three of the feed-forward; two of the node; logits. Of each hyper-connection the weights, the
    # branch's input and the mixed streams; the first one reads and mixes one stream, which takes no product.
    assert found["MatMul"] + found["FusedMatMul"] == depth * (4 + 3 + 2) + 1 + 3 * connections - 2
    assert found["Transpose"] == depth * 4  # the node's layout
    assert found["Slice"] == 2 * depth  # rotary turns the halves of q and of k round
    assert found["Split"] == connections  # the weights of streams
    assert found["LayerNormalization"] == connections + 1
    assert found["Gelu"] == depth
    assert found["Softmax"] == depth
    # Squares, A and β: two of each connection; β times the output; rotary; the gate; two for the first connection.
    assert found["Mul"] == 3 * connections + 4 * depth + depth + 2
    for absent in ("Where", "Cast", "ReduceL2", "Sigmoid", "Erf", "Pow", "Concat", "Expand", "SkipLayerNormalization"):
        assert absent not in found, absent


def test_plain_residuals_are_not_fused_with_the_last_norm(tmp_path: Path) -> None:
    """onnxruntime's SkipLayerNormalization takes several times as long as the sum and the norm do."""
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY | {"num_residual_streams": 1})
    found = operators(export(ExportRequest(checkpoint, tmp_path / "m.onnx")).path.read_bytes(), tmp_path)
    assert found["LayerNormalization"] == 2 * TINY["depth"] + 1
    assert "SkipLayerNormalization" not in found
