"""The sound files that mutations start from, made once: small checkpoints, exports, a bundle, sidecar of an engine."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from localattn.core.storage.files import sha256

from ...conftest import TINY, save_upstream
from .case import HERE

# Heads that GPU kernels compute: `plugin rewrite` refuses narrower ones.
_SMALL = {**TINY, "depth": 1, "dim_head": 16}
ROOT = Path(__file__).resolve().parents[3]
# A library that says that it was loaded. onnxruntime finds its entry in it, and no operators.
_FOREIGN = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void mark(void) { close(open(MARKER, O_CREAT | O_WRONLY, 0644)); }
void *RegisterCustomOps(void *options, const void *api) { (void)options; (void)api; return 0; }
"""
# Stands in for a C++ compiler: asked to compile, it hands out that library.
_COMPILER = """
case "$1" in
-dumpmachine) echo {machine} ;;
--version) echo "stand-in 1.0" ;;
*) while [ $# -gt 0 ]; do [ "$1" = -o ] && cp {library} "$2"; shift; done; exit 0 ;;
esac
"""


class _Marks:
    """Pickled, it is a call that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return open, (self._marker, "w")


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

        from ...support.steps import export_steps

        folder = self._folder / "steps"
        folder.mkdir()
        export_steps(ExportRequest(self.checkpoint, folder / "step.onnx"), chunk=4)
        return folder / "step.onnx"

    @cached_property
    def npz(self) -> bytes:
        stream = io.BytesIO()
        np.savez(stream, tokens=np.arange(64, dtype=np.int64).reshape(1, 64) % 23)
        return stream.getvalue()

    @cached_property
    def golden(self) -> bytes:
        """The same inputs with what the model computes from them."""
        from localattn.runtime.session import load

        inputs = dict(np.load(io.BytesIO(self.npz)))
        stream = io.BytesIO()
        np.savez(stream, **inputs, **load(self.model, "cpu", plugin="none").run(inputs))
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
        """An engine that nothing opens, and true sidecar of it."""
        from localattn.core.documents.engine_sidecar import BuildOptions, EngineSidecar, PluginRecord, ProfileRecord
        from localattn.core.documents.sidecar import read_sidecar
        from localattn.core.tensors import TensorSpec

        path = self._folder / "model.engine"
        path.write_bytes(b"ftrt" + bytes(60))
        profile = ProfileRecord(input="tokens", min=(1, 1), opt=(1, 8), max=(1, 16))
        sidecar = EngineSidecar(
            backend="tensorrt", library_version="10.3.0", targets=["sm_87"], platform="linux-aarch64", dtype="fp32",
            inputs=[TensorSpec("tokens", "int64", (1, 16))], outputs=[TensorSpec("logits", "float32", (1, 16, 23))],
            plugin=PluginRecord(kind="library", path="/none/plugin.so", sha256="0" * 64, layers=["a"]),
            options=BuildOptions(plugin="auto", profiles=[profile]),
            onnx_name="model.onnx", onnx_sha256=sha256(self.model), engine_sha256=sha256(path), engine_bytes=64,
            created="2026-01-01T00:00:00+00:00", model=read_sidecar(self.model),
        )  # fmt: skip
        return {"model.engine": path.read_bytes(), "model.engine.json": sidecar.to_json().encode()}

    @cached_property
    def document(self) -> dict[str, Any]:
        """The sidecar's document."""
        return dict(json.loads(self.sidecar))

    @property
    def marker(self) -> Path:
        """The file that planted code makes when it runs."""
        return self._folder / "foreign-code-ran"

    @cached_property
    def foreign(self) -> bytes:
        """A library that makes the marker when it is loaded; without a C compiler, none that can be loaded."""
        source, library = self._folder / "foreign.c", self._folder / "foreign.so"
        source.write_text(_FOREIGN)
        compiler = shutil.which("cc")
        if compiler is None:
            return b"\x7fELF" + bytes(60)
        marker = f'-DMARKER="{self.marker}"'
        subprocess.run([compiler, "-shared", "-fPIC", marker, str(source), "-o", str(library)], check=True)
        return library.read_bytes()

    @cached_property
    def compiler(self) -> bytes:
        """A shell script to name in `CXX`."""
        path = self._folder / "compiled.so"
        path.write_bytes(self.foreign)
        return _COMPILER.format(machine=f"{os.uname().machine}-linux-gnu", library=path).encode()

    @cached_property
    def library(self) -> dict[str, bytes]:
        """The foreign library at a path of its own, with what a build writes beside it."""
        return {name: content for name, content in self.built.items() if "/" not in name}

    @cached_property
    def built(self) -> dict[str, bytes]:
        """What `plugin build -o` leaves: `lib.so`, the sidecar beside it, and the user's cache below `cache/`."""
        return self._build("--output={}/lib.so")

    @cached_property
    def cache(self) -> dict[str, bytes]:
        """What `plugin build` leaves: a library in the user's cache, below `cache/`."""
        return self._build()

    def _build(self, *options: str) -> dict[str, bytes]:
        folder = self._folder / f"built{len(options)}"
        folder.mkdir()
        script = self._folder / "compiler"
        script.write_bytes(self.compiler)
        environment = {**os.environ, "CXX": f"sh {script}", "XDG_CACHE_HOME": str(folder / "cache")}
        command = [
            "plugin",
            "build",
            "--backend=onnxruntime",
            *(option.replace("{}", str(folder)) for option in options),
        ]
        subprocess.run(
            [sys.executable, str(ROOT / "cli.py"), *command], env=environment, check=True, capture_output=True
        )
        self.marker.unlink(missing_ok=True)
        files = (path for path in folder.rglob("*") if path.is_file())
        return {
            path.relative_to(folder).as_posix(): path.read_bytes().replace(str(folder).encode(), HERE)
            if path.suffix == ".json"
            else path.read_bytes()
            for path in files
        }

    @cached_property
    def armed_bundle(self) -> dict[str, bytes]:
        """The files of a bundle that carries the foreign library, by path."""
        from localattn.runtime.bundle.create import BundleRequest, create_bundle

        for name, content in self.library.items():
            (self._folder / name).write_bytes(content.replace(HERE, str(self._folder).encode()))
        folder = self._folder / "armed"
        create_bundle(BundleRequest(self.model, folder, samples=1, plugins=(self._folder / "lib.so",)))
        self.marker.unlink(missing_ok=True)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    @cached_property
    def hugging_face(self) -> dict[str, bytes]:
        """A folder of a small decoder with a window, its tokenizer among its files, by name."""
        from ...support import tokenizer_folder
        from ...support.models.hugging_face import CASES, save

        folder = self._folder / "hugging-face"
        folder.mkdir()
        save(folder, next(case for case in CASES if case.name == "mistral"))
        tokenizer_folder.write(folder, {"eos_token_id": 1})
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    @cached_property
    def tokenizer(self) -> dict[str, bytes]:
        """The files of a tokenizer that fits the step file, by name."""
        from ...support import tokenizer_folder

        folder = self._folder / "tokenizer"
        folder.mkdir()
        size = self.config["kwargs"]["num_tokens"]
        letters = {letter: number for number, letter in enumerate(tokenizer_folder.letters_of_bytes()[97 : 97 + size])}
        tokenizer_folder.write(folder, {"eos_token_id": 1})
        document = json.loads((folder / "tokenizer.json").read_bytes())
        document["model"] = {"type": "WordLevel", "vocab": letters, "unk_token": next(iter(letters))}
        document["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        }
        document["decoder"] = {"type": "Fuse"}
        document |= {"added_tokens": [], "post_processor": None, "normalizer": None}
        files = {"tokenizer.json": json.dumps(document).encode()}
        files["tokenizer_config.json"] = json.dumps({"chat_template": tokenizer_folder.TEMPLATE}).encode()
        return files | {"generation_config.json": (folder / "generation_config.json").read_bytes()}

    @cached_property
    def dying(self) -> bytes:
        """A library that dies as LOCALATTN_TEST_DEATH says, once it is loaded; without a compiler, none."""
        from ...support.dying_library import SOURCE

        compiler = shutil.which("g++")
        if compiler is None:
            return b"\x7fELF" + bytes(60)
        source, library = self._folder / "dying.cpp", self._folder / "dying.so"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        return library.read_bytes()

    @cached_property
    def pickles(self) -> dict[str, bytes]:
        """Files that run code in a reader which unpickles: checkpoints of both formats, an array, a document."""
        import torch

        marks = _Marks(self.marker)
        streams = {name: io.BytesIO() for name in ("evil.pt", "legacy.pt", "evil.npz", "evil.npy")}
        torch.save({"a": marks}, streams["evil.pt"])
        torch.save({"a": marks}, streams["legacy.pt"], _use_new_zipfile_serialization=False)
        np.savez(streams["evil.npz"], tokens=np.array([marks], dtype=object))
        np.save(streams["evil.npy"], np.array([marks], dtype=object))
        text = f"!!python/object/apply:builtins.open ['{self.marker}', 'w']\n"
        files = {name: stream.getvalue() for name, stream in streams.items()}
        return files | {"evil.pkl": pickle.dumps(marks), "evil.yaml": text.encode()}

    @cached_property
    def bomb(self) -> bytes:
        """An `.npz` of two megabytes whose array has 1.5 GiB of zeros."""
        stream, zeros = io.BytesIO(), bytes(1 << 20)
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (1, 1536 << 17)})
        with (
            zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
            archive.open("tokens.npy", "w", force_zip64=True) as member,
        ):
            member.write(header.getvalue())
            for _ in range(1536):
                member.write(zeros)
        return stream.getvalue()
