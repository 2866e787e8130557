"""The command line: what it prints, its exit codes, and that bad input costs one clear error."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from localattn.core.extras import as_installed
from localattn.runtime import load

from ..conftest import TINY, Finished, save_upstream

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "checkpoints" / "pystdlib_w128.pt"
Command = Callable[..., Finished]


def assert_clear_error(finished: Finished, code: int, *words: str) -> None:
    """One short error on stderr that has these words, no traceback, nothing on stdout."""
    assert finished.code == code, finished
    assert finished.out == ""
    assert finished.err.startswith(("Error: ", "Usage: ")), finished.err
    assert "Traceback" not in finished.err
    assert len(finished.err.splitlines()) <= 12
    for word in words:
        assert word in finished.err


def test_export_parity_run_inspect(tiny: Path, localattn: Command) -> None:
    model, outputs = tiny.with_name("m.onnx"), tiny.with_name("out.npz")
    exported = localattn("export", tiny, "-o", model, "--mask")
    assert exported.code == 0
    for check in ("onnx checker", "onnxruntime loads", "parity", "window", "linear memory", "no wide integers"):
        assert f"✓ {check}" in exported.out

    inputs, compared = tiny.with_name("in.npz"), tiny.with_name("compared.npz")
    parity = localattn("parity", model, "--against", tiny, "--save-inputs", inputs, "--save-outputs", compared)
    assert parity.code == 0
    assert "are equal within 0.0001" in parity.out
    saved = np.load(compared)
    np.testing.assert_allclose(saved["logits"], saved["logits.reference"], atol=1e-4)

    run = localattn("run", model, "--load-inputs", inputs, "--save-outputs", outputs)
    assert run.code == 0
    assert "on cpu" in run.out
    np.testing.assert_array_equal(np.load(outputs)["logits"], saved["logits"])

    again = localattn("parity", model, "--against", tiny, "--load-inputs", inputs, "--format", "json")
    assert [row["inputs"] for row in json.loads(again.out)["comparisons"]] == [str(inputs)]

    inspected = localattn("inspect", model)
    assert inspected.code == 0
    assert "causal exact, window 4, 1 back, 0 forward" in inspected.out
    assert "✓ parity" in inspected.out
    in_capitals = model.rename(model.with_name("M.ONNX"))
    assert "causal exact, window 4" in localattn("inspect", in_capitals).out


def test_export_json_is_only_json(tiny: Path, localattn: Command) -> None:
    finished = localattn("export", tiny, "-o", tiny.with_name("m.onnx"), "--format", "json")
    document = json.loads(finished.out)
    assert document["class"] == "local_attention.LocalTransformer"
    assert [check["status"] for check in document["checks"]] == ["passed"] * 6


def test_parity_fails_loudly(tiny: Path, localattn: Command) -> None:
    model = tiny.with_name("m.onnx")
    localattn("export", tiny, "-o", model)
    proto = onnx.load(model)
    norm = next(tensor for tensor in proto.graph.initializer if tensor.name == "model.to_logits.0.weight")
    norm.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(norm) * 1.01, norm.name))
    onnx.save(proto, model)
    finished = localattn("parity", model, "--against", tiny)
    assert finished.code == 1
    assert "FAILED" in finished.out
    assert "NOT equal" in finished.out
    assert localattn("parity", model, "--against", tiny, "--atol", 10).code == 0
    inspected = localattn("inspect", model)
    assert "NOT written for this file" in inspected.out


def test_parity_needs_the_checkpoint_that_fits(tiny: Path, tmp_path: Path, localattn: Command) -> None:
    model = tiny.with_name("m.onnx")
    localattn("export", tiny, "-o", model)
    wider = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY | {"dim": 24}, "wider.pt")
    finished = localattn("parity", model, "--against", wider)
    assert finished.code == 2
    assert "Traceback" not in finished.err


def test_dry_run_writes_nothing(tiny: Path, localattn: Command) -> None:
    finished = localattn("export", tiny, "-o", tiny.with_name("m.onnx"), "--dry-run", "--dtype", "fp16")
    assert finished.code == 0
    assert "tokens int64 [1, 64]" in finished.out
    assert not tiny.with_name("m.onnx").exists()


def test_inspect_a_checkpoint(tiny: Path, localattn: Command) -> None:
    complete = localattn("inspect", tiny)
    assert complete.code == 0
    assert "local_attention.LocalTransformer" in complete.out
    assert "local_attn_window_size" in complete.out
    tiny.with_suffix(".json").unlink()
    partial = localattn("inspect", tiny, "--format", "json")
    document = json.loads(partial.out)
    assert partial.code == 0
    assert document["inferred"]["dim"]["value"] == 16
    assert "local_attn_window_size" in document["needed"]


def hostile_files() -> dict[str, bytes]:
    """Files that are no checkpoints."""
    generator = np.random.default_rng(0)
    return {
        "empty": b"",
        "text": b"this is not a checkpoint",
        "random": generator.bytes(5000),
        "zip header": b"PK\x03\x04" + generator.bytes(500),
        "pickled object": pickle.dumps(ROOT),
        "huge claim": (1 << 60).to_bytes(8, "little") + b"{}",
    }


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".safetensors", ".onnx"])
@pytest.mark.parametrize("content", hostile_files().values(), ids=hostile_files())
@pytest.mark.parametrize("verb", ["export", "inspect"])
def test_hostile_files(tmp_path: Path, localattn: Command, content: bytes, suffix: str, verb: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    options = ["-o", tmp_path / "out.onnx"] if verb == "export" else []
    assert_clear_error(localattn(verb, path, *options), 2)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.95])
def test_cut_checkpoint(tiny: Path, localattn: Command, fraction: float) -> None:
    content = tiny.read_bytes()
    tiny.write_bytes(content[: int(len(content) * fraction)])
    assert_clear_error(localattn("export", tiny, "-o", tiny.with_name("m.onnx")), 2, tiny.name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq-len", "0"], ["--seq-len is 0"]),
        (["--seq-len", "-3"], ["--seq-len is -3"]),
        (["--seq-len", "65"], ["max_seq_len 64"]),
        (["--batch", "0"], ["--batch is 0"]),
        (["--opset", "7"], ["Opset 7"]),
        (["--opset", "99"], ["Opset 99"]),
        (["--heads", "-2"], ["heads"]),
        (["--heads", "3"], ["heads"]),
        (["--config", "missing.json"], ["missing.json"]),
        (["--dtype", "int3"], ["int3"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_impossible_requests(tiny: Path, localattn: Command, options: list[str], words: list[str]) -> None:
    before = sorted(tiny.parent.iterdir())
    assert_clear_error(localattn("export", tiny, "-o", tiny.with_name("m.onnx"), *options), 2, *words)
    assert sorted(tiny.parent.iterdir()) == before


def test_a_refused_request_leaves_no_folder(tiny: Path, localattn: Command) -> None:
    refused = localattn("export", tiny, "-o", tiny.parent / "new" / "folder" / "m.onnx", "--opset", 7)
    assert_clear_error(refused, 2, "Opset 7")
    assert not (tiny.parent / "new").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local_attn_window_size": 0}, ["local_attn_window_size"]),
        ({"heads": -1}, ["heads"]),
        ({"windows": 4}, ["windows"]),
        ({"dim": 17}, ["dim"]),
        ({"depth": 3}, ["depth", "2"]),
        ({"causal": True, "look_forward": 1}, ["look_forward"]),
        ({"global_attn_layer": "x"}, ["global_attn_layer"]),
    ],
)
def test_broken_configs(tiny: Path, localattn: Command, change: dict[str, Any], words: list[str]) -> None:
    config = {"class": "local_attention.LocalTransformer", "kwargs": TINY | change}
    tiny.with_suffix(".json").write_text(json.dumps(config))
    assert_clear_error(localattn("export", tiny, "-o", tiny.with_name("m.onnx")), 2, *words)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"class": "torch.nn.Linear"}', '{"class": 3}', "null", "\x00"])
def test_unreadable_configs(tiny: Path, localattn: Command, text: str) -> None:
    tiny.with_suffix(".json").write_text(text)
    assert_clear_error(localattn("export", tiny, "-o", tiny.with_name("m.onnx")), 2)


def test_a_whole_pickled_module_is_not_loaded(tmp_path: Path, localattn: Command) -> None:
    path = tmp_path / "whole.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    assert_clear_error(localattn("export", path, "-o", tmp_path / "m.onnx"), 2, "state_dict")


def test_a_missing_file(tmp_path: Path, localattn: Command) -> None:
    assert_clear_error(localattn("export", tmp_path / "none.pt"), 2, "none.pt")
    assert_clear_error(localattn("inspect", tmp_path / "none.onnx"), 2, "none.onnx")


def test_verbose_shows_the_traceback(tmp_path: Path, localattn: Command) -> None:
    assert "Traceback" in localattn("inspect", tmp_path / "none.pt", "-v").err


def test_demo(tmp_path: Path, localattn: Command) -> None:
    finished = localattn("demo", "-o", tmp_path, "--rows", 4, "--max-tokens", 8, "--format", "json")
    document = json.loads(finished.out)
    assert finished.code == 0
    assert abs(document["bits_per_byte"] - document["bits_per_byte_in_pytorch"]) < 0.3
    assert len(document["text"]) > len("import os\n\n\ndef ")
    assert (tmp_path / "pybytes.onnx.json").exists()


def test_the_demo_takes_any_prompt_and_shows_utf_8(
    tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever bytes a shell passes; what the model writes is decoded as a whole, not byte by byte."""
    model, prompts = tmp_path / "demo.onnx", []
    model.touch()

    def write_on(_session: object, prompt: bytes, *_: object) -> Iterator[int]:
        prompts.append(prompt)
        yield from "é\xff".encode("latin-1") if prompt == b"latin" else "é!".encode()

    report = SimpleNamespace(path=model, sidecar=SimpleNamespace(checks=[]), passed=True, outcomes={})
    session = SimpleNamespace(plugin="kernels.so")
    made = SimpleNamespace(report=report, session=session, bits_per_byte=1.0, stated=1.0, rows=1)
    monkeypatch.setattr("localattn.demo.run.run_demo", lambda *_, **__: made)
    monkeypatch.setattr("localattn.demo.run.write_on", write_on)
    shown = localattn("demo", "-o", tmp_path / "demo", "--prompt", "x = ")
    assert shown.code == 0 and "\n\nx = é!\n" in shown.out, shown
    assert "latin��\n" in localattn("demo", "-o", tmp_path / "demo", "--prompt", "latin").out
    no_text = localattn("demo", "-o", tmp_path / "demo", "--prompt", "a\udcff", "--format", "json")
    assert no_text.code == 0 and json.loads(no_text.out)["text"] == "a�é!" and prompts[-1] == b"a\xff"
    assert_clear_error(localattn("demo", "-o", tmp_path / "demo", "--prompt", ""), 2, "--prompt", "empty")


def test_demo_model_reaches_what_its_trainer_measured(tmp_path: Path) -> None:
    from localattn.demo import config_path
    from localattn.demo.run import run_demo

    result = run_demo(tmp_path, 64, lambda _: None)
    assert result.bits_per_byte == pytest.approx(
        json.loads(config_path().read_text())["about"]["bits_per_byte"], abs=5e-4
    )


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "cli.py"], [sys.executable, "-m", "localattn.cli"], [sys.executable, "-m", "localattn"]],
)
def test_the_command_line_starts_as_a_file_too(command: list[str]) -> None:
    finished = subprocess.run([*command, "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert finished.stdout.startswith("localattn ")


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL.name} is not beside this checkout")
def test_the_real_checkpoint_keeps_its_bits_per_byte(tmp_path: Path, localattn: Command) -> None:
    model, inputs, outputs = (tmp_path / name for name in ("m.onnx", "in.npz", "out.npz"))
    assert localattn("export", REAL, "-o", model, "--seq-len", 512, "--batch", 64).code == 0
    rows = np.frombuffer((REAL.parent / "pystdlib_val.bin").read_bytes(), np.uint8).reshape(64, 512)
    np.savez(inputs, tokens=rows.astype(np.int64))
    assert localattn("run", model, "--load-inputs", inputs, "--save-outputs", outputs).code == 0
    logits = torch.from_numpy(np.load(outputs)["logits"])[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), torch.from_numpy(rows[:, 1:].reshape(-1)).long())
    stated = json.loads(REAL.with_suffix(".json").read_text())["about"]["bits_per_byte"]
    assert round(float(loss) / np.log(2), 3) == round(stated, 3)


def test_run_needs_the_provider_it_was_asked_for(tiny: Path, localattn: Command) -> None:
    model = tiny.with_name("m.onnx")
    localattn("export", tiny, "-o", model)
    if load(model).provider != "cpu":
        pytest.skip("this machine has a GPU provider")
    assert_clear_error(localattn("run", model, "--provider", "cuda"), 3, "cuda")


def test_a_missing_package_is_named(tiny: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("localattn.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    assert_clear_error(localattn("export", tiny), 3, "onnx_ir", as_installed("pip install 'localattn[cpu]'"))


def test_aft_local_from_checkpoint_to_parity(tmp_path: Path, localattn: Command) -> None:
    side, dim, window = 40, 8, 5
    generator = torch.Generator().manual_seed(0)
    state = {
        f"{name}.weight": torch.randn(dim, dim, generator=generator) for name in ("query", "key", "value", "output")
    }
    state |= {"output.bias": torch.zeros(dim), "pos_bias": torch.randn(side, side, generator=generator)}
    position = torch.arange(side)
    state["local_mask"] = (position[:, None] - position).abs() < window
    checkpoint, model = tmp_path / "aft.pt", tmp_path / "aft.onnx"
    torch.save(state, checkpoint)

    inspected = json.loads(localattn("inspect", checkpoint, "--format", "json").out)
    assert inspected["class"] == "labml_nn.AFTLocal"
    assert {name: entry["value"] for name, entry in inspected["inferred"].items()} == {
        "d_model": dim,
        "seq_len": side,
        "bias": False,
        "local_window_size": window,
    }
    exported = localattn("export", checkpoint, "-o", model, "--causal", "--mask", "--seq-len", 31, "--batch", 2)
    assert exported.code == 0, exported.err
    assert "query 15 depends on nothing from token 16 on" in exported.out
    assert localattn("parity", model, "--against", checkpoint).code == 0
    assert localattn("parity", model, "--against", checkpoint, "--not-causal").code == 1
    assert_clear_error(localattn("export", checkpoint, "-o", model, "--force", "--seq-len", 41), 2, "seq_len 40")


def test_causal_is_an_option_of_aft_local_alone(tiny: Path, localattn: Command) -> None:
    assert_clear_error(localattn("export", tiny, "-o", tiny.with_name("m.onnx"), "--causal"), 2, "--causal")
