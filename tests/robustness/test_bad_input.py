"""Wrong arrays and altered files meet a clear error that says what came, what is wanted, and how to go on."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from localattn import load
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed
from localattn.core.storage.publishing import SEAL, sealed, sidecar_path
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.runtime.generation.step_session import open_step

from ..conftest import Finished, save_upstream
from ..support.models.damaged import TOKENS, folder, made  # noqa: F401
from ..support.models.engine_models import needs_rtx

Command = Callable[..., Finished]

# --- inputs of `run` --------------------------------------------------------------------------------------------------

# Inputs, and what the error must say of each: its name, what came, what is wanted.
INPUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dtype": ({"tokens": TOKENS.astype(np.float32)}, ["'tokens'", "dtype float32", "wanted: int64 [1, 64]"]),
    "unsigned": ({"tokens": TOKENS.astype(np.uint64)}, ["'tokens'", "dtype uint64", "wanted: int64 [1, 64]"]),
    "length": ({"tokens": TOKENS[:, :63]}, ["'tokens'", "shape [1, 63]", "wanted: int64 [1, 64]"]),
    "batch": ({"tokens": TOKENS.repeat(2, 0)}, ["'tokens'", "shape [2, 64]", "wanted: int64 [1, 64]"]),
    "rank": ({"tokens": TOKENS[0]}, ["'tokens'", "shape [64]", "wanted: int64 [1, 64]"]),
    "scalar": ({"tokens": np.int64(3)}, ["'tokens'", "shape []", "wanted: int64 [1, 64]"]),
    "nothing": ({"tokens": TOKENS[:, :0]}, ["'tokens'", "shape [1, 0]", "wanted: int64 [1, 64]"]),
    "name": ({"token": TOKENS}, ["Missing: tokens int64 [1, 64]", "Unknown: 'token'"]),
    "one more": ({"tokens": TOKENS, "mask": TOKENS}, ["Unknown: 'mask'", "takes: tokens int64 [1, 64]"]),
    "none": ({}, ["Missing: tokens int64 [1, 64]"]),
    "outside the vocabulary": ({"tokens": TOKENS + 23}, ["'tokens'", "23 to 23", "0 to 22"]),
    "negative": ({"tokens": TOKENS - 1}, ["'tokens'", "-1 to -1", "0 to 22"]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_run_names_the_input_what_came_and_what_is_wanted(
    name: str, made: Path, tmp_path: Path, localattn: Command
) -> None:
    arrays, words = INPUTS[name]
    np.savez(tmp_path / "in.npz", **arrays)
    out = tmp_path / "out.npz"
    finished = localattn("run", made / "model.onnx", "--load-inputs", tmp_path / "in.npz", "--save-outputs", out)
    assert finished.code == 2 and finished.out == ""
    for word in words:
        assert word in finished.err
    assert not out.exists()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_inputs_that_are_not_finite_are_reported(value: float, tmp_path: Path, localattn: Command) -> None:
    kwargs = {"dim": 16, "window_size": 4, "dim_head": 8, "heads": 2, "causal": True}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", kwargs)
    model = tmp_path / "model.onnx"
    export(ExportRequest(checkpoint, model, shapes=ShapeRequest(seq_len=16), seeds=(0,)))
    x = np.zeros((1, 16, 16), np.float32)
    x[0, 3, 0] = value
    np.savez(tmp_path / "in.npz", x=x)
    run = localattn("run", model, "--load-inputs", tmp_path / "in.npz", "--format", "json")
    assert run.code == 0 and "input 'x' holds NaN or Inf" in run.err
    assert json.loads(run.out)["inputs"][0]["finite"] is False
    parity = localattn("parity", model, "--against", checkpoint, "--load-inputs", tmp_path / "in.npz")
    assert parity.code in (1, 2) and "Traceback" not in parity.err
    assert "NaN" in parity.err or "nan" in parity.out, parity


# --- files that were altered ------------------------------------------------------------------------------------------


def alter_model(folder: Path) -> Path:
    """Another producer, nothing else."""
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    model.producer_name = "someone else"
    path.write_bytes(model.SerializeToString())
    return path


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def alter_data(folder: Path) -> Path:
    flip_last_bit(next((folder / "external").glob("*.data")))
    return folder / "external/model.onnx"


def alter_sidecar(folder: Path) -> Path:
    path = sidecar_path(folder / "model.onnx")
    text = path.read_text()
    path.write_text(text.replace('"num_tokens": 23', '"num_tokens": 24'))
    assert path.read_text() != text
    return folder / "model.onnx"


ALTERED = {"model": alter_model, "data": alter_data, "sidecar": alter_sidecar}
COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "run": lambda model, folder: ["run", model],
    "bench": lambda model, folder: ["bench", model, "--duration", "0", "--iterations", "1"],
    "bundle": lambda model, folder: ["bundle", model, "-o", folder / "bundle"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", ALTERED)
def test_altered_files_are_noticed(what: str, command: str, folder: Path, localattn: Command) -> None:
    model = ALTERED[what](folder)
    finished = localattn(*COMMANDS[command](model, folder))
    assert finished.code == 1, finished
    assert "was changed" in finished.err
    assert "again" in finished.err  # the way to go on
    assert finished.out == ""


@needs_rtx
@pytest.mark.parametrize("what", ALTERED)
def test_nothing_is_built_from_altered_files(what: str, folder: Path, localattn: Command) -> None:
    model = ALTERED[what](folder)
    options = ("--backend", "tensorrt-rtx", "--target", "rtx40", "--plugin", "none")
    finished = localattn("build", model, "-o", folder / "m.engine", *options)
    assert finished.code == 1, finished
    assert "was changed" in finished.err
    assert not (folder / "m.engine").exists()


@pytest.mark.parametrize("name", ["step.onnx", "step.prefill.onnx", "data"])
def test_altered_step_files_are_noticed(name: str, folder: Path, localattn: Command) -> None:
    path = folder / "steps" / name if name != "data" else next((folder / "steps").glob("*.data"))
    if name == "data":
        flip_last_bit(path)
    else:
        model = onnx.load(path, load_external_data=False)
        model.producer_name = "someone else"
        path.write_bytes(model.SerializeToString())
    finished = localattn("generate", folder / "steps/step.onnx", "--prompt-ids", "1,2,3,4,5", "--max-tokens", "1")
    assert finished.code == 1, finished
    assert "was changed" in finished.err
    with pytest.raises(CheckFailed):
        open_step(folder / "steps/step.onnx")


@pytest.mark.parametrize("what", ["model", "data"])
def test_parity_judges_altered_files_with_a_note(what: str, folder: Path, localattn: Command) -> None:
    finished = localattn("parity", ALTERED[what](folder), "--against", folder / "model.pt", "--seeds", 1)
    assert finished.code in (0, 1) and "equal within" in finished.out, finished
    assert "Note: " in finished.err and "SHA-256 differs" in finished.err
    assert localattn("parity", alter_sidecar(folder), "--against", folder / "model.pt").code == 1


def test_inspect_looks_at_altered_files(folder: Path, localattn: Command) -> None:
    finished = localattn("inspect", alter_model(folder))
    assert finished.code == 0 and "NOT written for this file" in finished.out
    document = json.loads(localattn("inspect", folder / "model.onnx", "--format", "json").out)
    assert document["sidecar_matches"] is False
    assert localattn("inspect", alter_sidecar(folder)).code == 1


def test_a_changed_file_runs_without_its_sidecar(folder: Path, tmp_path: Path, localattn: Command) -> None:
    model = alter_model(folder)
    with pytest.raises(CheckFailed, match="remove"):
        load(model)
    assert load(model, verify=False).inputs
    sidecar_path(model).unlink()
    np.savez(tmp_path / "in.npz", tokens=TOKENS)
    assert localattn("run", model, "--load-inputs", tmp_path / "in.npz").code == 0


def test_a_seal_covers_every_entry_and_may_be_absent(made: Path, tmp_path: Path) -> None:
    document = json.loads(sidecar_path(made / "model.onnx").read_bytes())
    assert len(document[SEAL]) == 64
    assert json.loads(sealed(json.dumps(document))) == document
    path = sidecar_path(tmp_path / "model.onnx")
    for name in document:
        if name in ("format", "format_version"):
            continue
        path.write_text(json.dumps({**document, name: document[name], "more": 1}))
        with pytest.raises(CheckFailed, match="was changed"):
            read_sidecar(tmp_path / "model.onnx")
    del document[SEAL]
    path.write_text(json.dumps(document))
    sidecar = read_sidecar(tmp_path / "model.onnx")
    assert sidecar is not None and SEAL not in sidecar.to_dict()
