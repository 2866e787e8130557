"""Modules that call the grouped operator: what nodes they become, and what the traced graph computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.exporter.checks.wide_integers import check_wide_integers
from localattn.exporter.lowering.functions import attach_functions
from localattn.exporter.lowering.trace import attention_nodes, trace_module
from localattn.exporter.models.parts.attention_op import grouped_attention_op
from localattn.onnx_graph.standard_ops import rewrite
from localattn.runtime.backends.onnxruntime.session import open_bytes

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Layers(torch.nn.Module):
    """Four layers of attention, one of each kind; in and out `[B, N, 32]`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.sinks = torch.nn.Parameter(torch.randn(HEADS, generator=generator))

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, mask = inputs
        scale = HEAD_DIM**-0.5

        def heads(count: int) -> torch.Tensor:
            return x[..., : count * HEAD_DIM].reshape(x.shape[0], x.shape[1], count, HEAD_DIM)

        query, key, all_keys = heads(HEADS), heads(KV_HEADS), heads(HEADS)
        window, chunk = WindowGeometry.reaching(6, 3), WindowGeometry(8, 0, 0, causal=True)
        everything = WindowGeometry.all_keys(causal=True)
        outputs = (
            grouped_attention_op(query, all_keys, all_keys, window, scale, key_mask=mask),
            grouped_attention_op(query, key, key, window, scale, key_mask=mask, sinks=self.sinks),
            grouped_attention_op(query, key, key, chunk, scale, softcap=2.0),
            grouped_attention_op(query, key, key, everything, scale, key_mask=mask, softcap=2.0, sinks=self.sinks),
        )
        return x + sum(outputs).flatten(2)  # type: ignore[attr-defined]


class Entry(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Layers()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(inputs)
        return result


def given(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    mask = torch.rand(batch, length, generator=generator) > 0.3
    return torch.randn(batch, length, HEADS * HEAD_DIM, generator=generator), mask


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_module_becomes_nodes_with_functions(dynamic: bool, tmp_path: Path) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("seq", max=4096)
    axes = [{0: batch, 1: length}, {0: batch, 1: length}] if dynamic else None
    entry = Entry().eval()
    model = trace_module(entry, given(2, 45), ["x", "mask"], ["y"], 20, axes)
    assert [node.op_type for node in attention_nodes(model)] == [
        "WindowedAttentionMask",
        "GroupedWindowedAttentionMaskSinks",
        "GroupedWindowedAttentionSoftcap",
        "GlobalAttentionMaskSoftcapSinks",
    ]
    attach_functions(model)
    written = ir.serde.serialize_model(model)
    sizes = {"batch": 64, "seq": 4096} if dynamic else {}
    assert check_wide_integers(written, tmp_path, {}, sizes).status == "passed"
    plain = ir.serde.serialize_model(rewrite.apply(ir.serde.deserialize_model(written)))
    assert not plain.functions and {node.domain for node in plain.graph.node} == {""}
    sessions = [open_bytes(x.SerializeToString(), "cpu", threads=1) for x in (written, plain)]
    for size in ((1, 3), (2, 64), (3, 130)) if dynamic else ((2, 45),):
        x, mask = given(*size)
        with torch.no_grad():
            expected = entry(x, mask).numpy()
        outputs = [session.run({"x": x.numpy(), "mask": mask.numpy()})["y"] for session in sessions]
        np.testing.assert_allclose(outputs[0], expected, rtol=0, atol=1e-5)
        assert np.array_equal(*outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(1, 9, 3, 8), "value": torch.zeros(1, 9, 3, 8)}, "4 heads of queries cannot share 3"),
        ({"value": torch.zeros(1, 9, 2, 6)}, "values"),
        ({"softcap": -1.0}, "softcap -1.0 is no cap"),
        ({"softcap": float("nan")}, "is no cap"),
        ({"sinks": torch.zeros(2)}, r"sinks has shape \[2\]; it must be \[4\]"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    fitting = {"query": torch.zeros(1, 9, 4, 8), "key": torch.zeros(1, 9, 2, 8), "value": torch.zeros(1, 9, 2, 8)}
    with pytest.raises(UsageError, match=message):
        grouped_attention_op(**{**fitting, **change}, geometry=WindowGeometry.reaching(3, 0), scale=1.0)
