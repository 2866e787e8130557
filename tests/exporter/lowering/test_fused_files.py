"""Exported files with fused nodes: which they have, that bodies ride with them, and that kernels and bodies agree."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from local_attention import LocalAttention, LocalMHA

from localattn.core.nodes.attention import DOMAIN
from localattn.core.nodes.fused import FUSED_BY_OP_TYPE, FUSED_DOMAIN, FUSED_VERSION
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.jobs.module import export_module
from localattn.runtime.session import load

from ...conftest import TINY, save_upstream
from ...support.native.cpu_build import library, operators_run
from ...support.native.plugin_build import folder

pytest.importorskip("onnxruntime", reason="onnxruntime opens the library")

# Two layers of attention and feed-forward: four branches, of which the first begins the streams and the last ends them.
ALONE = {"RotateHeads": 4, "GatedGelu": 2}
MIXING = ALONE | {"ReadStreamsNorm": 1, "MixReadStreamsNorm": 2, "BeginStreams": 1, "EndStreams": 1}
ADDING = ALONE | {"ReadStreamsNorm": 3, "AddToStreams": 2}
# Arguments, the release of hyper-connections, and the nodes.
MODELS: dict[str, tuple[dict[str, Any], str | None, dict[str, int]]] = {
    "four streams": ({}, None, MIXING),
    "two streams": ({"num_residual_streams": 2}, None, MIXING),
    "one stream": ({"num_residual_streams": 1}, None, ALONE),
    "older release": ({}, "0.3.9", ADDING),
    "older, two streams": ({"num_residual_streams": 2}, "0.3.9", ADDING),
}
TOLERANCE = {"fp32": 2e-5, "fp16": 5e-3}


@cache
def exported(name: str, dtype: str, *, function_body: bool = True, dynamic: tuple[str, ...] = ()) -> Path:
    """A checkpoint's file; the export has compared it with the float64 reference."""
    kwargs, release, _ = MODELS[name]
    home = folder() / f"file {name} {dtype} {function_body} {len(dynamic)}"
    home.mkdir()
    checkpoint = save_upstream(home, "local_attention.LocalTransformer", TINY | kwargs)
    if release is not None:
        config = checkpoint.with_suffix(".json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"hyper_connections": release}))
    request = ExportRequest(
        checkpoint, home / "m.onnx", dtype=dtype, function_body=function_body, dynamic=dynamic, seeds=(0,)
    )
    return export(request).path


def tokens(batch: int = 1, length: int = TINY["max_seq_len"]) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(0).integers(0, TINY["num_tokens"], (batch, length))}


def fused_nodes(model: onnx.ModelProto) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.node if node.domain == FUSED_DOMAIN))


def kernels_run(model: onnx.ModelProto, folder: Path, feed: dict[str, np.ndarray]) -> dict[str, int]:
    """The fused nodes that a run with the library computes; nothing of their bodies runs."""
    run = Counter(operators_run(model.SerializeToString(), folder, feed))
    assert run["WindowedAttention"] == TINY["depth"] and not {"Softmax", "Gelu", "Erf"} & set(run)
    return {op_type: run[op_type] for op_type in FUSED_BY_OP_TYPE if run[op_type]}


def agree(path: Path, feed: dict[str, np.ndarray], dtype: str) -> None:
    """The file with and without the library, and that both had a say."""
    with_kernels, with_bodies = load(path, plugin=library()), load(path, plugin="none")
    assert (with_kernels.plugin, with_bodies.plugin) == (library(), None)
    made, plain = with_kernels.run(feed)["logits"], with_bodies.run(feed)["logits"]
    assert np.isfinite(made).all() and np.abs(plain).max() > 0.1
    np.testing.assert_allclose(made, plain, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", MODELS)
def test_nodes_bodies_and_numbers(name: str, tmp_path: Path) -> None:
    path, nodes = exported(name, "fp32"), MODELS[name][2]
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert fused_nodes(model) == nodes
    assert {body.name for body in model.functions if body.domain == FUSED_DOMAIN} == set(nodes)
    assert {(x.domain, x.version) for x in model.opset_import if x.domain == FUSED_DOMAIN} == {
        (FUSED_DOMAIN, FUSED_VERSION)
    }
    agree(path, tokens(), "fp32")
    assert kernels_run(model, tmp_path, tokens()) == nodes


def test_each_model_is_another() -> None:
    """The release and the number of streams change the numbers, not the nodes alone."""
    outputs = [load(exported(name, "fp32"), plugin=library()).run(tokens())["logits"] for name in MODELS]
    for i, output in enumerate(outputs):
        assert all(np.abs(output - other).max() > 1e-2 for other in outputs[:i])


@pytest.mark.parametrize("name", ["four streams", "older release"])
def test_fp16(name: str, tmp_path: Path) -> None:
    """Streams stay fp32; what is rotated and gated is fp16, and its kernels run without conversions around them."""
    path = exported(name, "fp16")
    model = onnx.load(path)
    assert fused_nodes(model) == MODELS[name][2]
    agree(path, tokens(), "fp16")
    assert kernels_run(model, tmp_path, tokens()) == MODELS[name][2]
    inferred = onnx.shape_inference.infer_shapes(model)
    values = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in inferred.graph.initializer}
    for node in model.graph.node:
        if node.domain == FUSED_DOMAIN:
            wanted = (
                onnx.TensorProto.FLOAT16 if node.op_type in ("RotateHeads", "GatedGelu") else onnx.TensorProto.FLOAT
            )
            assert {types[value] for value in (*node.input, *node.output)} == {wanted}, node.op_type


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_without_function_body(dtype: str) -> None:
    """Only the attention node's body goes: nothing else computes the other nodes in TensorRT."""
    whole, bare = exported("four streams", dtype), exported("four streams", dtype, function_body=False)
    model = onnx.load(bare)
    assert {body.domain for body in onnx.load(whole).functions} == {DOMAIN, FUSED_DOMAIN}
    assert {(body.domain, body.name) for body in model.functions} == {(FUSED_DOMAIN, op_type) for op_type in MIXING}
    assert fused_nodes(model) == MIXING
    outputs = [load(path, plugin=library()).run(tokens())["logits"] for path in (whole, bare)]
    assert np.array_equal(*outputs)


@pytest.mark.parametrize("name", ["four streams", pytest.param("older release", marks=pytest.mark.slow)])
def test_open_sizes(name: str, tmp_path: Path) -> None:
    """Tables are cut to the length there; every kernel is told the shapes when it is called."""
    path = exported(name, "fp32", dynamic=("batch", "seq"))
    model = onnx.load(path)
    assert fused_nodes(model) == MODELS[name][2]
    for batch, length in ((1, 1), (1, 4), (2, 37), (3, 64)):
        agree(path, tokens(batch, length), "fp32")
    assert kernels_run(model, tmp_path, tokens(2, 9)) == MODELS[name][2]


class BothLayouts(torch.nn.Module):
    """A module of a user's, with heads after and before the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = LocalMHA(dim=32, window_size=8, dim_head=16, heads=2, causal=True)
        self.second = LocalAttention(window_size=8, dim=16, causal=True, autopad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).unflatten(-1, (2, 16)).transpose(1, 2)
        attended: torch.Tensor = self.second(heads, heads * 2, heads)
        return attended.transpose(1, 2).flatten(2)


def test_one_body_rotates_both_layouts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = BothLayouts().eval(), torch.randn(2, 50, 32)
    path = export_module(module, {"x": x}, tmp_path / "m.onnx").path
    model = onnx.load(path)
    assert fused_nodes(model) == {"RotateHeads": 4}
    assert [body.name for body in model.functions if body.domain == FUSED_DOMAIN] == ["RotateHeads"]
    tables = {tuple(tensor.dims) for tensor in model.graph.initializer}
    assert {(50, 1, 2, 8), (50, 2, 8)} <= tables
    with torch.no_grad():
        right = module(x).numpy()
    for plugin in (library(), "none"):
        (output,) = load(path, plugin=plugin).run({"x": x.numpy()}).values()
        np.testing.assert_allclose(output, right, atol=1e-5, rtol=1e-5)
    assert kernels_run(model, tmp_path, {"x": x.numpy()}) == {"RotateHeads": 4}
