"""Small exported models for the engine tests, and what they need of the machine."""

from __future__ import annotations

import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import NodeAttributes, NodeVariant
from localattn.exporter.export import ExportRequest, export

from ...conftest import save_upstream
from .. import run_folder
from .node_model import one_node

# Heads 16 wide: the smallest that the attention kernel takes.
SMALL = {
    "num_tokens": 23,
    "max_seq_len": 64,
    "dim": 32,
    "depth": 2,
    "local_attn_window_size": 8,
    "dim_head": 16,
    "heads": 2,
    "causal": True,
}
NODES = 2

REAL = Path(__file__).parents[4] / "shared" / "checkpoints" / "pystdlib_w128.pt"

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx") is None or find_spec("polygraphy") is None,
    reason="tensorrt_rtx or polygraphy is not installed",
)
needs_plugin_tools = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("kernel_lens") is None or shutil.which("g++") is None,
    reason="triton, kernel-lens or g++ is not installed",
)


@cache
def _exported(dtype: str) -> Path:
    """A LocalTransformer of two layers as a checked ONNX file, made once a run."""

    def make(place: Path) -> None:
        checkpoint = save_upstream(place, "local_attention.LocalTransformer", SMALL, "small.pt")
        export(ExportRequest(checkpoint, place / "small.onnx", dtype=dtype))

    return run_folder.once(f"models/small {dtype}", make) / "small.onnx"


def small_model(dtype: str = "fp32") -> Path:
    """That file; its checkpoint lies beside it. Nobody may write there."""
    return _exported(dtype)


def small_checkpoint(dtype: str = "fp32") -> Path:
    """The checkpoint `small_model` was exported from."""
    return _exported(dtype).with_suffix(".pt")


def open_node(folder: Path) -> Path:
    """One attention node, heads 8 wide (no kernel has them), of open batch and length; without a sidecar."""
    import onnx

    geometry = WindowGeometry(window_size=8, look_backward=1, look_forward=0, causal=True, exact_windowsize=True)
    variant = NodeVariant(has_mask=False, has_bias=False, has_xpos=False)
    path = folder / "node.onnx"
    onnx.save(one_node(variant, NodeAttributes(geometry, 1.0), "seq", "batch"), path)
    return path
