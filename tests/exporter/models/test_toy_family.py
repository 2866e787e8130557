"""A family from outside: its one file and one row are enough for every command, and CONTRIBUTING shows it as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file

from examples import toy_family
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, UsageError
from localattn.exporter.checkpoint.describe import describe_checkpoint
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.models import registry
from localattn.exporter.models.forms import FolderFamily, FolderRequest
from localattn.exporter.options import ShapeRequest
from localattn.runtime import load

from ...conftest import Finished
from ...support.steps import export_steps

Command = Callable[..., Finished]
CONFIG = {"model_type": "toy", "vocab_size": 31, "width": 16, "heads": 2, "window": 4, "max_length": 29}


@pytest.fixture(scope="module", autouse=True)
def row() -> Iterator[None]:
    """The row of the family, as the registry would have it."""
    registry.register(toy_family.TOY)
    yield
    registry.FAMILIES.remove(toy_family.TOY)
    del registry.CLASSES["toy.Tagger"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as its users have it: `tagger/` with a configuration and weights."""
    path = tmp_path_factory.mktemp("toy") / "tagger"
    path.mkdir()
    torch.manual_seed(3)
    model = toy_family.Tagger(toy_family.TaggerArgs(**{k: v for k, v in CONFIG.items() if k != "model_type"}))
    save_file({name: 2 * tensor for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    path = folder.with_name("tagger.onnx")
    export(ExportRequest(folder, path))
    return path


def test_the_file_has_the_familys_names_and_open_sizes(exported: Path, folder: Path) -> None:
    sidecar = read_sidecar(exported)
    assert sidecar is not None
    assert [spec.describe() for spec in sidecar.inputs] == [
        "input_ids int64 [batch, seq]",
        "attention_mask int64 [batch, seq]",
    ]
    assert [spec.name for spec in sidecar.outputs] == ["logits", "hidden"]
    assert (sidecar.class_name, sidecar.dynamic, sidecar.seq_len) == ("toy.Tagger", ["batch", "seq"], 29)
    assert {check.name: check.status for check in sidecar.checks}["parity"] == "passed"
    assert len(sidecar.checkpoint_sha256) == 64 and sidecar.checkpoint_name == "tagger"
    model = onnx.load(exported)
    assert [node.op_type for node in model.graph.node].count("WindowedAttentionMask") == 1


def test_both_outputs_are_those_of_the_untouched_model(exported: Path, folder: Path) -> None:
    generator = np.random.default_rng(1)
    inputs = {
        "input_ids": generator.integers(0, 31, (3, 23)),
        "attention_mask": (np.arange(23) < np.array([[23], [9], [2]])).astype(np.int64),
    }
    contents = toy_family.TOY.read(folder, FolderRequest())
    model = toy_family.Tagger(toy_family.TaggerArgs(**contents.arguments))
    model.load_state_dict(dict(contents.state))
    with torch.no_grad():
        expected = model.double()(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    outputs = load(exported).run(inputs)
    for name, wanted in zip(("logits", "hidden"), expected, strict=True):
        assert np.abs(outputs[name] - wanted.numpy()).max() < 1e-5


def test_the_command_line_exports_checks_and_compares_a_folder(
    exported: Path, folder: Path, tmp_path: Path, localattn: Command
) -> None:
    written = tmp_path / "static.onnx"
    finished = localattn("export", folder, "-o", written, "--dynamic", "none", "--seq-len", 29)
    assert finished.code == 0, finished.err
    sidecar = read_sidecar(written)
    assert sidecar is not None and sidecar.dynamic == []
    assert {check.name: check.status for check in sidecar.checks} == dict.fromkeys(
        ("onnx checker", "onnxruntime loads", "parity", "window", "linear memory", "no wide integers"), "passed"
    )
    for model in (written, exported):
        finished = localattn("parity", model, "--against", folder, "--seeds", 1, "--format", "json")
        assert finished.code == 0, finished.err
        report = json.loads(finished.out)
        assert report["passed"] and {row["output"] for row in report["comparisons"]} == {"logits", "hidden"}
    planned = localattn("export", folder, "-o", tmp_path / "other.onnx", "--dry-run")
    assert "attention_mask int64 [batch, seq]" in planned.out and "logits, hidden" in planned.out
    described = localattn("inspect", folder)
    assert described.code == 0 and "toy.Tagger" in described.out, described.err


def test_a_wrong_second_output_is_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = toy_family.Tagger.forward(self, input_ids, attention_mask)
        return logits, hidden * 1.01

    monkeypatch.setattr(toy_family.ExportableTagger, "forward", off)
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(folder, tmp_path / "off.onnx"))


def test_what_the_family_does_not_have_is_refused(folder: Path, tmp_path: Path) -> None:
    request = ExportRequest(folder, tmp_path / "x.onnx", shapes=ShapeRequest())
    with pytest.raises(UsageError, match="Tagger cannot run step by step"):
        export_steps(request)
    with pytest.raises(UsageError, match=r"needs no separate configuration"):
        export(ExportRequest(folder, tmp_path / "x.onnx", config=folder / "config.json"))
    with pytest.raises(UsageError, match=r"needs no separate configuration"):
        describe_checkpoint(folder, folder / "config.json")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UsageError, match=r"has no model\.safetensors"):
        export(ExportRequest(bare, tmp_path / "x.onnx"))
    os.mkfifo(bare / "model.safetensors")
    with pytest.raises(UsageError, match="Cannot read"):
        export(ExportRequest(bare, tmp_path / "x.onnx"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UsageError, match="is a folder of no supported family") as refused:
        export(ExportRequest(other, tmp_path / "x.onnx"))
    assert "model_type" in refused.value.why


class Tagger(toy_family.ToyFamily):
    """The same class once more."""


class Unfinished(FolderFamily[toy_family.TaggerArgs]):
    """A family without its methods."""

    name = "unfinished"


def test_a_family_is_registered_once_and_whole() -> None:
    registry.register(toy_family.TOY)
    assert registry.FAMILIES.count(toy_family.TOY) == 1
    with pytest.raises(UsageError, match=r"toy\.Tagger is a class of two families"):
        registry.register(Tagger())
    assert registry.CLASSES["toy.Tagger"].family is toy_family.TOY and len(registry.FAMILIES) == 6
    with pytest.raises(TypeError, match="abstract"):
        Unfinished()  # type: ignore[abstract]
