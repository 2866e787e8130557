"""What a model's graph is made of with the compiled kernels and without: a guard against passes creeping back."""

from __future__ import annotations

from pathlib import Path

from localattn.exporter.export import ExportRequest, export

from ...support.models.optimized import operators
from ...support.native.cpu_build import library


def test_between_products_lie_norms_and_one_node_for_each_pass(tiny: Path, tmp_path: Path) -> None:
    depth, branches = 2, 4
    path = export(ExportRequest(tiny, tmp_path / "m.onnx", seeds=(0,))).path
    found = operators(str(path), tmp_path, library=library())
    linear = 7 * depth + 1  # q, k, v, out; value, gate, contract; logits
    assert found.pop("MatMul") == linear + 1  # the first connection's weights, of what is no stream yet
    assert found.pop("LayerNormalization") == 2  # the first branch's, and the last of all
    assert found.pop("Reshape") == 4 * depth  # heads: q, k, v apart, and the output together
    passes = {
        "WindowedAttention": depth,
        "RotateHeads": 2 * depth,
        "GatedGelu": depth,
        "BeginStreams": 1,
        "ReadStreamsNorm": 1,
        "MixReadStreamsNorm": branches - 2,
        "EndStreams": 1,
    }
    assert {name: found.pop(name) for name in passes} == passes
    assert found.total() == 16, found  # token and position embeddings, the first connection, views of the ends


def test_the_bodies_add_no_operator_that_is_not_needed(tiny: Path, tmp_path: Path) -> None:
    """A reading connection: three products with the streams, five passes for their weights, one cut."""
    depth, branches = 2, 4
    path = export(ExportRequest(tiny, tmp_path / "m.onnx", seeds=(0,))).path
    found = operators(str(path), tmp_path)
    assert found["Split"] == branches and found["Tanh"] == branches
    assert found["Slice"] == 2 * depth, "the halves of q and k turned round"
    assert found["Gelu"] == depth
    assert found["Transpose"] == 4 * depth, "heads first, and back, in the attention nodes alone"
