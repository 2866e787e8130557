"""The kinds of files that are written, one small model each: what the matrix has a row for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest

from ..conftest import TINY, save_upstream
from ..support.steps import export_steps

_FOLDER = tempfile.TemporaryDirectory(prefix="localattn-kinds-")
# Matrices 32 wide, the least that is quantized; sequences of eight windows.
_MODEL = TINY | {"dim": 32, "max_seq_len": 32}
_MHA = {"dim": 16, "window_size": 4, "dim_head": 8, "heads": 2, "causal": True}
_SEQUENCE = 32


def transformer(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Path:
    """A small model of the class that has most parts, exported with these options."""
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", _MODEL | (changes or {}))
    export(ExportRequest(checkpoint, folder / "model.onnx", **options))
    return folder / "model.onnx"


def _bias(folder: Path) -> Path:
    checkpoint = save_upstream(folder, "local_attention.LocalMHA", _MHA)
    shapes = ShapeRequest(seq_len=_SEQUENCE, attn_bias=True)
    export(ExportRequest(checkpoint, folder / "model.onnx", shapes=shapes))
    return folder / "model.onnx"


def _steps(folder: Path, class_name: str, kwargs: dict[str, Any], chunk: int, **options: Any) -> Path:
    request = ExportRequest(save_upstream(folder, class_name, kwargs), folder / "model.onnx", **options)
    export_steps(request, chunk=chunk)
    return folder / "model.onnx"


def _aft(folder: Path) -> Path:
    """AFTLocal of 32 positions and biases of 5, on both sides."""
    torch.manual_seed(0)
    place, dim = torch.arange(_SEQUENCE), 16
    state = {"pos_bias": torch.randn(_SEQUENCE, _SEQUENCE), "output.weight": torch.randn(dim, dim) / 4}
    state |= {"local_mask": (place[:, None] - place).abs() < 5, "output.bias": torch.randn(dim)}
    state |= {f"{name}.weight": torch.randn(dim, dim) / 4 for name in ("query", "key", "value")}
    torch.save(state, folder / "model.pt")
    (folder / "model.json").write_text('{"class": "labml_nn.AFTLocal"}')
    export(ExportRequest(folder / "model.pt", folder / "model.onnx"))
    return folder / "model.onnx"


class _Module(nn.Module):
    """A user's own module with an upstream layer inside."""

    def __init__(self) -> None:
        from local_attention import LocalMHA

        super().__init__()
        self.embed, self.out = nn.Embedding(23, 16), nn.Linear(16, 23)
        self.layer = LocalMHA(**_MHA)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(tokens)))


def _module(folder: Path) -> Path:
    from localattn.exporter.jobs.module import export_module

    torch.manual_seed(0)
    export_module(_Module(), [f"tokens:int64:[1,{_SEQUENCE}]"], folder / "model.onnx")
    return folder / "model.onnx"


_TRANSFORMER, _LAYER = "local_attention.LocalTransformer", "local_attention.LocalMHA"
KINDS: dict[str, Callable[[Path], Path]] = {
    "full": transformer,
    "fp16": lambda folder: transformer(folder, dtype="fp16"),
    "int8": lambda folder: transformer(folder, weight_dtype="int8-dynamic"),
    "dynamic": lambda folder: transformer(folder, dynamic=("batch", "seq")),
    "mask": lambda folder: transformer(folder, shapes=ShapeRequest(mask=True)),
    "bias": _bias,
    "xpos": lambda folder: transformer(folder, {"use_xpos": True}),
    "step": lambda folder: _steps(folder, _TRANSFORMER, _MODEL, 8),
    "step fp16": lambda folder: _steps(folder, _TRANSFORMER, _MODEL, 1, dtype="fp16"),
    "step int8": lambda folder: _steps(folder, _TRANSFORMER, _MODEL, 1, weight_dtype="int8-dynamic"),
    "endless": lambda folder: _steps(folder, _LAYER, _MHA, 1),
    "prefill": lambda folder: exported("step").with_name("model.prefill.onnx"),
    "AFT": _aft,
    "module": _module,
}


@cache
def exported(kind: str) -> Path:
    """The file of a kind, made once a process, its sidecar beside it. Nobody may write there."""
    folder = Path(_FOLDER.name) / kind
    folder.mkdir()
    return KINDS[kind](folder)
