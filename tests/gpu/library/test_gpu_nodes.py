"""Nodes of the project's domain as no exporter writes them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from localattn.core.errors import UsageError
from localattn.core.nodes.attention import DOMAIN
from localattn.onnx_graph.gpu_nodes import gpu_nodes, ring_nodes
from localattn.plugins.library.tensorrt_provider import rewrite_for_provider


def test_nodes_without_inputs_are_none_that_a_kernel_computes(tmp_path: Path) -> None:
    names = ("WindowedAttention", "GlobalAttention", "WindowedAttentionStep")
    nodes = [onnx.helper.make_node(name, [], [name], domain=DOMAIN) for name in names]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], []))
    assert gpu_nodes(model) == ring_nodes(model) == []
    onnx.save(model, tmp_path / "given.onnx")
    with pytest.raises(UsageError, match="It has no attention node"):
        rewrite_for_provider(tmp_path / "given.onnx", tmp_path / "made.onnx")
