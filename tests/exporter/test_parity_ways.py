"""`parity` on files that leave sizes open, and on step files: equal ones pass, altered ones fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from localattn.core.documents.sidecar import sidecar_path
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest

from ..conftest import Finished, save_upstream
from ..support.models.parity_folder import open_and_steps
from ..support.steps import export_steps

Command = Callable[..., Finished]
ATTENTION = {"window_size": 4, "causal": True, "dim": 8}
MHA = {"dim": 16, "window_size": 4, "heads": 2, "dim_head": 8, "causal": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small transformer, its file with dynamic sizes and its step files."""
    folder = tmp_path_factory.mktemp("made")
    open_and_steps(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The same, to be altered."""
    return Path(shutil.copytree(made, tmp_path / "files"))


@pytest.fixture
def tiny(folder: Path) -> Path:
    return folder / "model.pt"


@pytest.fixture
def open_file(folder: Path) -> Path:
    return folder / "open.onnx"


@pytest.fixture
def step_file(folder: Path) -> Path:
    return folder / "step.onnx"


def rows(finished: Finished) -> list[dict[str, str]]:
    document = json.loads(finished.out)
    found: list[dict[str, str]] = document["comparisons"]
    return found


def double_a_weight(model: Path) -> None:
    """A fault that no reader of the file sees: its largest matrix, twice."""
    proto = onnx.load(model)
    matrix = max(proto.graph.initializer, key=lambda x: len(x.raw_data))
    matrix.raw_data = (onnx.numpy_helper.to_array(matrix) * 2).tobytes()
    onnx.save(proto, model)


def test_dynamic_axes_are_compared_around_the_window(open_file: Path, tiny: Path, localattn: Command) -> None:
    finished = localattn("parity", open_file, "--against", tiny, "--seeds", 2, "--format", "json")
    assert finished.code == 0, finished.err
    called = [row["inputs"] for row in rows(finished)]
    longest = json.loads(sidecar_path(open_file).read_text())["seq_len"]
    window = json.loads(sidecar_path(open_file).read_text())["windows"][0]["window_size"]
    for length in (1, window - 1, window, window + 1, 2 * window, 2 * window + 1, longest - 1, longest):
        assert f"seed 0, batch=2 seq={length}" in called
    assert f"seed 1, batch=2 seq={longest}" in called and f"seed 0, batch=3 seq={longest}" in called
    spread = json.loads(finished.out)["errors"]["logits"]
    assert spread["positions"][-1] < longest <= spread["positions"][-1] + spread["width"]


def test_lengths_are_chosen(open_file: Path, tiny: Path, localattn: Command) -> None:
    finished = localattn("parity", open_file, "--against", tiny, "--seq-len", "3,17", "--seeds", 2, "--format", "json")
    assert finished.code == 0, finished.err
    wanted = [f"seed {seed}, batch=2 seq={length}" for length in (3, 17) for seed in (0, 1)]
    assert [row["inputs"] for row in rows(finished)] == wanted
    beyond = localattn("parity", open_file, "--against", tiny, "--seq-len", 100_000)
    assert beyond.code == 2 and "beyond the" in beyond.err
    for text in ("x", "0", "4,", "-3"):
        assert localattn("parity", open_file, "--against", tiny, f"--seq-len={text}").code == 2


def test_inputs_of_any_length_are_taken(open_file: Path, tiny: Path, tmp_path: Path, localattn: Command) -> None:
    np.savez(tmp_path / "in.npz", tokens=np.arange(7, dtype=np.int64).reshape(1, 7))
    finished = localattn("parity", open_file, "--against", tiny, "--load-inputs", tmp_path / "in.npz")
    assert finished.code == 0, finished.err


def test_without_a_sidecar_the_model_tells_its_length(open_file: Path, tiny: Path, localattn: Command) -> None:
    sidecar_path(open_file).unlink()
    finished = localattn("parity", open_file, "--against", tiny, "--seq-len", 9, "--seeds", 1)
    assert finished.code == 0, finished.err


def test_a_length_the_class_refuses_is_named(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalAttention", ATTENTION | {"autopad": False})
    request = ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(16, heads=2), dynamic=("seq",))
    export(request)
    finished = localattn("parity", tmp_path / "m.onnx", "--against", checkpoint, "--seeds", 1)
    assert finished.code == 0, finished.err
    assert "not compared at seq=3" in finished.err and "no multiple of the window size" in finished.err


def test_a_file_of_any_number_of_heads_is_no_file_of_a_checkpoint(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalAttention", ATTENTION)
    q, k, v = (onnx.helper.make_tensor_value_info(name, 1, [1, "heads", 16, 8]) for name in "qkv")
    out = onnx.helper.make_tensor_value_info("out", 1, [1, "heads", 16, 8])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Sum", list("qkv"), ["out"])], "g", [q, k, v], [out])
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / "m.onnx")
    finished = localattn("parity", tmp_path / "m.onnx", "--against", checkpoint)
    assert finished.code == 2 and "There heads and dim_head are fixed numbers" in finished.err


def test_a_fault_in_an_open_file_is_found(open_file: Path, tiny: Path, localattn: Command) -> None:
    double_a_weight(open_file)
    finished = localattn("parity", open_file, "--against", tiny, "--seeds", 1)
    assert finished.code == 1 and "NOT equal" in finished.out


@pytest.mark.parametrize("name", ["step.onnx", "step.prefill.onnx"])
def test_a_step_file_is_compared_token_by_token(step_file: Path, tiny: Path, name: str, localattn: Command) -> None:
    finished = localattn("parity", step_file.with_name(name), "--against", tiny, "--seeds", 2, "--format", "json")
    assert finished.code == 0, finished.err
    assert [row["inputs"] for row in rows(finished)] == ["seed 0", "seed 1"]
    assert "tokens were fed" in json.loads(finished.out)["notes"][-1]
    chosen = localattn("parity", step_file, "--against", tiny, "--seq-len", 8)
    assert chosen.code == 2 and "does not apply to a step file" in chosen.err


def test_a_step_files_inputs_can_be_saved_and_given(step_file: Path, tiny: Path, localattn: Command) -> None:
    folder = step_file.parent
    saved = ("--save-inputs", folder / "in.npz", "--save-outputs", folder / "out.npz")
    assert localattn("parity", step_file, "--against", tiny, "--seeds", 1, *saved).code == 0
    outputs = dict(np.load(folder / "out.npz"))
    assert outputs["logits"].shape == outputs["logits.reference"].shape
    given = localattn("parity", step_file, "--against", tiny, "--load-inputs", folder / "in.npz")
    assert given.code == 0, given.err
    np.savez(folder / "short.npz", tokens=np.zeros((1, 3), np.int64))
    short = localattn("parity", step_file, "--against", tiny, "--load-inputs", folder / "short.npz")
    assert short.code == 2 and "whole sequence" in short.err


def test_a_batch_of_steps(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    request = ExportRequest(checkpoint, tmp_path / "s.onnx", shapes=ShapeRequest(batch=3))
    export_steps(request, chunk=1)
    finished = localattn("parity", tmp_path / "s.onnx", "--against", checkpoint, "--seeds", 1)
    assert finished.code == 0, finished.err


@pytest.mark.parametrize("spoil", ["weight", "cache"])
def test_a_fault_in_a_step_file_is_found(step_file: Path, tiny: Path, spoil: str, localattn: Command) -> None:
    if spoil == "weight":
        double_a_weight(step_file)
    else:  # each call forgets one layer's keys
        proto = onnx.load(step_file)
        lost = next(x for x in proto.graph.output if x.name == "next_key_cache.0")
        for node in proto.graph.node:
            node.output[:] = ["lost" if name == lost.name else name for name in node.output]
        proto.graph.node.append(onnx.helper.make_node("Identity", ["key_cache.0"], [lost.name]))
        onnx.save(proto, step_file)
    finished = localattn("parity", step_file, "--against", tiny, "--seeds", 1)
    assert finished.code == 1, finished.err + finished.out


def test_a_static_file_has_one_length(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(9), seeds=(0,)))
    finished = localattn("parity", tmp_path / "m.onnx", "--against", checkpoint, "--seq-len", 8)
    assert finished.code == 2 and "--seq-len does not apply" in finished.err
