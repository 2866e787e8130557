"""The sound files that mutations start from, made once: small checkpoints, exports, a bundle, facts of an engine."""

from __future__ import annotations

import io
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from localattn.core.files import sha256

from ..conftest import TINY, save_upstream

_SMALL = {**TINY, "depth": 1}


class Seeds:
    """Files in a folder, each made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def checkpoint(self) -> Path:
        return save_upstream(self._folder, "local_attention.LocalTransformer", _SMALL)

    @cached_property
    def config(self) -> dict[str, Any]:
        return {"class": "local_attention.LocalTransformer", "kwargs": dict(_SMALL), "hyper_connections": "0.4.11"}

    @cached_property
    def legacy(self) -> bytes:
        """The same tensors in torch's format before 1.6, wrapped as trainers do."""
        import torch

        stream = io.BytesIO()
        state = {"model": torch.load(self.checkpoint, weights_only=True), "step": 7}
        torch.save(state, stream, _use_new_zipfile_serialization=False)
        return stream.getvalue()

    @cached_property
    def safetensors(self) -> bytes:
        import torch
        from safetensors.torch import save

        return bytes(save({k: v.contiguous() for k, v in torch.load(self.checkpoint, weights_only=True).items()}))

    @cached_property
    def model(self) -> Path:
        from localattn.exporter.export import ExportRequest, export

        path = self._folder / "model.onnx"
        export(ExportRequest(self.checkpoint, path))
        return path

    @cached_property
    def sidecar(self) -> bytes:
        return self.model.with_name("model.onnx.json").read_bytes()

    @cached_property
    def external(self) -> dict[str, bytes]:
        """The model with its weights in a file beside it, by file name."""
        import onnx

        folder = self._folder / "external"
        folder.mkdir()
        onnx.save(
            onnx.load(self.model),
            folder / "model.onnx",
            save_as_external_data=True,
            location="weights.bin",
            size_threshold=64,
        )
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    @cached_property
    def step(self) -> Path:
        from localattn.exporter.export import ExportRequest
        from localattn.exporter.step_export import StepRequest, export_steps

        folder = self._folder / "steps"
        folder.mkdir()
        export_steps(StepRequest(ExportRequest(self.checkpoint, folder / "step.onnx"), chunk=4))
        return folder / "step.onnx"

    @cached_property
    def npz(self) -> bytes:
        stream = io.BytesIO()
        np.savez(stream, tokens=np.arange(64, dtype=np.int64).reshape(1, 64) % 23)
        return stream.getvalue()

    @cached_property
    def bundle(self) -> dict[str, bytes]:
        """The files of a bundle, by path."""
        from localattn.runtime.bundle.create import BundleRequest, create_bundle

        folder = self._folder / "bundle"
        create_bundle(BundleRequest(self.model, folder, samples=1))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    @cached_property
    def engine(self) -> dict[str, bytes]:
        """An engine that nothing opens, and true facts of it."""
        from localattn.core.engine_facts import BuildOptions, EngineFacts, PluginFacts, ProfileFacts
        from localattn.core.sidecar import read_sidecar
        from localattn.core.tensors import TensorSpec

        path = self._folder / "model.engine"
        path.write_bytes(b"ftrt" + bytes(60))
        profile = ProfileFacts(input="tokens", min=(1, 1), opt=(1, 8), max=(1, 16))
        facts = EngineFacts(
            backend="tensorrt", library_version="10.3.0", targets=["sm_87"], platform="linux-aarch64", dtype="fp32",
            inputs=[TensorSpec("tokens", "int64", (1, 16))], outputs=[TensorSpec("logits", "float32", (1, 16, 23))],
            plugin=PluginFacts(kind="library", path="/none/plugin.so", sha256="0" * 64, layers=["a"]),
            options=BuildOptions(plugin="auto", profiles=[profile]),
            onnx_name="model.onnx", onnx_sha256="0" * 64, engine_sha256=sha256(path), engine_bytes=64,
            created="2026-01-01T00:00:00+00:00", model=read_sidecar(self.model),
        )  # fmt: skip
        return {"model.engine": path.read_bytes(), "model.engine.json": facts.to_json().encode()}

    @cached_property
    def document(self) -> dict[str, Any]:
        """The sidecar's document."""
        return dict(json.loads(self.sidecar))
