"""A module of a user's own, exported once a run by a function in a file, with the notes that the export leaves."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import torch

from localattn.exporter.jobs.module import ModuleOptions, export_module
from localattn.exporter.user_module.factory import module_from_factory

from .run_folder import once

CODE = '''"""A tagger with one layer of local attention."""

import torch
from local_attention import LocalMHA
from torch import nn


class Tagger(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.proj = nn.Linear(6, 32)
        self.norm = nn.LayerNorm(32)
        self.attn = LocalMHA(dim=32, window_size=window, dim_head=8, heads=2, causal=True)
        self.head = nn.Linear(32, 3)

    def forward(self, frames):
        x = self.proj(frames)
        return {"scores": self.head(x + self.attn(self.norm(x)))}


def build(window=4):
    torch.manual_seed(0)
    return Tagger(window)
'''
INPUT = "frames:float32:[batch=1,seq=24,6]"


def tagger() -> Path:
    """A folder with tagger.py, its weights in epoch.ckpt, model.onnx, and the user's cache of that export."""
    return once("own-module", _make)


def cache(folder: Path) -> mock._patch_dict:
    """The surroundings of the user who exported the model."""
    return mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")})


def _make(folder: Path) -> None:
    (folder / "tagger.py").write_text(CODE)
    reference, weights = f"{folder}/tagger.py:build", folder / "epoch.ckpt"
    made, _ = module_from_factory(reference, None, None)
    state = {f"model.{name}": x for name, x in made.state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": {"window": 4, "lr": 0.1}, "epoch": 1}, weights)
    module, origin = module_from_factory(reference, None, weights)
    with cache(folder):
        options = ModuleOptions(checks="quick", dynamic=("seq",))
        export_module(module, [INPUT], folder / "model.onnx", options, origin=origin)
