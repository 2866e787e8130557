"""A module of the user's own after its export: compared, bisected and converted; and exported in other precisions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import localattn as package
from localattn.core.documents.sidecar import read_sidecar, sidecar_path
from localattn.core.errors import UsageError
from localattn.core.storage.files import sha256
from localattn.core.storage.module_places import remember
from localattn.core.storage.publishing import SEAL, sealed
from localattn.exporter.jobs.convert import convert
from localattn.exporter.jobs.module import ModuleOptions, export_module
from localattn.exporter.user_module.factory import module_from_factory
from localattn.runtime import load

from ...support.own_module import CODE, INPUT, cache, tagger


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A copy of the exported module's folder, under which nothing is known of it but by its cache."""
    shutil.copytree(tagger(), tmp_path / "own")
    return tmp_path / "own"


def broken(folder: Path) -> Path:
    checkpoint = torch.load(folder / "epoch.ckpt", weights_only=True)
    checkpoint["state_dict"]["model.attn.to_out.weight"][0, 0] += 1
    torch.save(checkpoint, folder / "broken.ckpt")
    return folder / "broken.ckpt"


def test_the_user_who_exported_compares_without_naming_the_code(localattn) -> None:
    folder = tagger()
    model, weights = folder / "model.onnx", folder / "epoch.ckpt"
    sidecar = read_sidecar(model)
    assert sidecar is not None and sidecar.factory_sha256 == sha256(folder / "tagger.py")
    with cache(folder):
        done = localattn("parity", model, "--against", weights, "--seeds", 1)
        assert done.code == 0 and "equal within" in done.out, done.err
        found = localattn("bisect", model, "--against", weights)
        assert found.code == 0 and "module boundaries agree" in found.out, found.err


def test_bisect_names_the_module_of_an_own_model(own: Path, localattn) -> None:
    with cache(own.parent):  # nothing is noted there, so the code is named
        done = localattn(
            *("bisect", own / "model.onnx", "--against", broken(own), "--factory", f"{own}/tagger.py:build"),
        )
    assert done.code == 1 and "first leaves the tolerance in: attn.to_out" in done.out and "weights" in done.out


@pytest.mark.parametrize("verb", ["parity", "bisect"])
def test_code_that_only_a_sidecar_names_is_not_run(own: Path, verb: str, localattn) -> None:
    marker = own / "ran"
    hostile = f"open({str(marker)!r}, 'w')\n{CODE}"
    path = sidecar_path(own / "model.onnx")
    (own / "other.py").write_text(hostile)
    sidecar = json.loads(path.read_text())
    sidecar.pop(SEAL)
    sidecar |= {"class": f"{own}/other.py:build", "factory_sha256": sha256(own / "other.py")}
    path.write_text(sealed(json.dumps(sidecar)))
    with cache(own.parent):
        done = localattn(verb, own / "model.onnx", "--against", own / "epoch.ckpt")
    assert done.code == 2 and not marker.exists()
    assert f"--factory {own}/other.py:build" in done.err and "not run" in done.err


def test_a_package_is_imported_from_where_it_was(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the same name in the current folder is not run."""
    name = f"tagger_{tmp_path.name}"
    code, stranger = own / f"{name}.py", tmp_path / "stranger"
    code.write_text(CODE)
    stranger.mkdir()
    (stranger / f"{name}.py").write_text("raise SystemExit('run')\n")
    path = sidecar_path(own / "model.onnx")
    sidecar = json.loads(path.read_text())
    sidecar.pop(SEAL)
    path.write_text(sealed(json.dumps(sidecar | {"class": f"{name}:build", "factory_sha256": sha256(code)})))
    monkeypatch.chdir(stranger)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with cache(own):
        note = {"code": str(code), "factory": f"{name}:build", "folder": str(own)}
        remember(sha256(code), f"{name}:build", {}, note)
        assert package.parity(own / "model.onnx", own / "epoch.ckpt", seeds=[0]).passed
    sys.modules.pop(name, None)


def test_changed_code_is_said(own: Path) -> None:
    folder = tagger()
    note = next((folder / "cache" / "localattn" / "modules").iterdir())
    noted = json.loads(note.read_text())
    (own / "tagger.py").write_text(CODE + "# changed\n")
    place = own / "cache" / "localattn" / "modules" / note.name
    place.write_text(json.dumps(noted | {"code": str(own / "tagger.py")}))
    with cache(own), pytest.raises(UsageError, match="has changed since"):
        package.parity(own / "model.onnx", own / "epoch.ckpt")


def test_notes_that_others_can_write_do_not_count(own: Path) -> None:
    (own / "cache" / "localattn" / "modules").chmod(0o777)
    with cache(own), pytest.raises(UsageError, match="not known here"):
        package.parity(own / "model.onnx", own / "epoch.ckpt")


@pytest.mark.parametrize(("dtype", "plain"), [("fp16", False), ("bf16", True)])
def test_a_file_is_converted_to_half_precision(tmp_path: Path, dtype: str, plain: bool) -> None:
    source, output = tagger() / "model.onnx", tmp_path / "half.onnx"
    (written,) = convert(source, output, dtype=dtype, standard_ops=plain)  # type: ignore[arg-type]
    assert written.passed and [check.status for check in written.checks] == ["passed"] * 3
    sidecar = read_sidecar(output)
    assert sidecar is not None and sidecar.dtype == dtype and sidecar.standard_ops == plain
    element = "float16" if dtype == "fp16" else "float32"
    assert [spec.dtype for spec in (*sidecar.inputs, *sidecar.outputs)] == [element] * 2
    assert output.stat().st_size < source.stat().st_size
    x = np.random.default_rng(0).standard_normal((1, 17, 6), np.float32)
    half, whole = load(output).run({"frames": x.astype(element)}), load(source).run({"frames": x})
    assert 0 < np.abs(half["scores"] - whole["scores"]).max() < 2e-2
    with pytest.raises(UsageError, match="already"):
        convert(output, tmp_path / "again.onnx", dtype="bf16")


@pytest.mark.parametrize(
    "options",
    [
        ModuleOptions(dtype="fp16", checks="quick", seq_len=12),
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                ModuleOptions(dtype="fp16"),
                ModuleOptions(dtype="bf16", dynamic=("seq",)),
                ModuleOptions(weight_dtype="int8", checks="quick"),
                ModuleOptions(weight_dtype="int4", standard_ops=True, opset=21),
                ModuleOptions(weight_dtype="int8-qdq", dtype="fp16"),
            )
        ),
    ],
    ids=str,
)
def test_every_precision(tmp_path: Path, options: ModuleOptions) -> None:
    folder = tagger()
    module, origin = module_from_factory(f"{folder}/tagger.py:build", None, folder / "epoch.ckpt")
    with cache(tmp_path):
        report = export_module(module, [INPUT], tmp_path / "m.onnx", options, origin=origin)
    assert report.passed and {"parity": "passed"}.items() <= {x.name: x.status for x in report.checks}.items()
    sidecar = report.sidecar
    assert sidecar.dtype == options.dtype and sidecar.options.get("weight_dtype") == options.weight_dtype
    if options.seq_len is not None:
        assert sidecar.inputs[0].shape == (1, 12, 6) and sidecar.inputs[0].dtype == "float16"
        assert "fp16 range" in {x.name for x in report.checks}


def test_arguments_that_the_checkpoint_says_otherwise_are_warned_of() -> None:
    folder = tagger()
    reference, weights = f"{folder}/tagger.py:build", folder / "epoch.ckpt"
    assert module_from_factory(reference, None, weights)[1].warnings == ()
    _, origin = module_from_factory(reference, {"window": 8}, weights)
    assert len(origin.warnings) == 1 and "window 8" in origin.warnings[0] and "with 4" in origin.warnings[0]


def test_wrong_arguments_have_one_sentence() -> None:
    module, _ = module_from_factory(f"{tagger()}/tagger.py:build", None, None)
    with pytest.raises(UsageError, match="inputs` is a Tensor"):
        export_module(module, torch.zeros(1, 8, 6), Path("x.onnx"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not take the inputs frame") as error:
        export_module(module, ["frame:float32:[1,24,6]"], Path("x.onnx"))
    assert "did you mean frames for frame?" in error.value.why
    session = load(tagger() / "model.onnx")
    with pytest.raises(UsageError, match="came as a ndarray"):
        session.run(np.zeros((1, 8, 6), np.float32))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has 500 on its axis 'seq'") as error:
        session.run({"frames": np.zeros((1, 500, 6), np.float32)})
    assert error.value.why.endswith("model.onnx takes 1 to 24.")
    assert "model.onnx on onnxruntime, cpu" in repr(session) and "frames float32" in repr(session)


def test_control_flow_by_numbers_is_three_lines(tmp_path: Path) -> None:
    """Of the dump that PyTorch prints on stderr, nothing: in a process of its own, whose stderr is none of pytest's."""
    code = "from torch import nn\n\n\nclass Signed(nn.Module):\n    def forward(self, x):\n"
    (tmp_path / "signed.py").write_text(f"{code}        if x.sum() > 0:\n            x = 2 * x\n        return x\n")
    line = ["export", "--factory", "signed.py:Signed", "--input", "x:float32:[1,8,4]", "-o", "m.onnx", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "localattn.cli", *line], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4 and len(done.stderr.splitlines()) == 3, done.stderr
    assert "signed.py:6, `if x.sum() > 0:`" in done.stderr and "torch.where" in done.stderr


class MassiveSpace(nn.Module):
    """A model of bytes in which a space, and nothing else, has a massive activation that does no more than others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        with torch.no_grad():
            self.embed.weight[32] = 0
            self.embed.weight[32, 5] = 30
            self.up.weight[0] = 0
            self.up.weight[0, 5] = 3000
            self.down.weight[:, 0] *= 1e-7

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute logits."""
        logits: torch.Tensor = self.head(self.down(torch.relu(self.up(self.embed(ids)))))
        return logits


@pytest.mark.slow
def test_a_massive_activation_of_an_own_module_is_multiplied_as_it_is(tmp_path: Path) -> None:
    """Rounded to 8 bits, it has a cosine of less than 0.9."""
    inputs = {"ids": np.arange(64).reshape(1, 64)}
    report = export_module(MassiveSpace().eval(), inputs, tmp_path / "m.onnx", ModuleOptions(weight_dtype="int8"))
    assert any(note.startswith("down (") and "multiplied as they are" in note for note in report.notes), report.notes
    (parity,) = (check for check in report.checks if check.name == "parity")
    assert parity.status == "passed" and "rows of text" in parity.detail, parity
