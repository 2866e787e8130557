"""What users type from habit: short options, folders that are not there, files in the wrong place."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from localattn.commands.api.exporting import _default_output
from localattn.commands.parts.console import coloured
from localattn.commands.parts.paths import file_of_folder
from localattn.core.errors import UsageError
from localattn.core.storage.file_kinds import NPZ
from localattn.core.storage.outputs import Output, writing

from ..support.own_module import tagger


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_version(localattn) -> None:
    assert localattn("-V").out == localattn("--version").out != ""


def test_a_part_of_a_command_is_named_whole(localattn) -> None:
    done = localattn("verify", "x.tar")
    assert done.code == 2 and "localattn bundle verify" in done.err


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured(Terminal()) and not coloured(io.StringIO())
    monkeypatch.setenv(name, value)
    assert not coloured(Terminal())


def test_output_folders_are_made_and_empty_ones_do_not_stay(tmp_path: Path, localattn) -> None:
    page = tmp_path / "new" / "deep" / "page.json"
    assert localattn("inspect", tagger() / "model.onnx", "-o", page).code == 0 and page.is_file()
    with pytest.raises(RuntimeError), writing(Output(tmp_path / "other" / "x.npz", NPZ)) as folder:
        assert folder.is_dir()
        raise RuntimeError
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Cannot write"), writing(Output(tmp_path / "file" / "x.npz", NPZ)):
        pass


def test_a_name_without_suffix_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v1.2").mkdir()
    for given, meant in (
        ("encoder", "encoder/model.onnx"),
        ("v1.2", "v1.2/model.onnx"),
        ("a/b.onnx", "a/b.onnx"),
        ("b.pt", "b.pt"),
    ):
        assert file_of_folder(tmp_path / given) == tmp_path / meant


def test_a_folders_file_is_not_written_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gemma = tmp_path / "hub" / "gemma"
    gemma.mkdir(parents=True)
    (gemma / "config.json").write_text('{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}')
    assert _default_output(gemma, "_step.onnx") == Path("gemma-onnx/model_step.onnx")


@pytest.mark.parametrize("verb", ["parity", "bisect"])
def test_golden_outputs_go_to_their_option(tmp_path: Path, verb: str, localattn) -> None:
    golden = tmp_path / "golden.npz"
    np.savez(golden, frames=np.zeros(3))
    done = localattn(verb, tagger() / "model.onnx", "--against", golden)
    assert done.code == 2 and f"--golden {golden}" in done.err


def test_a_file_to_bisect_against_is_compared_with_parity(localattn) -> None:
    model = tagger() / "model.onnx"
    done = localattn("bisect", model, "--against", model)
    assert done.code == 2 and f"localattn parity {model} --against {model}" in done.err


def test_weights_in_a_hugging_face_folder_name_the_folder(tmp_path: Path, localattn) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ModernBertModel"], "model_type": "modernbert"}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    done = localattn("export", tmp_path / "model.safetensors")
    assert done.code == 2 and f"Give the folder: {tmp_path}" in done.err


def test_inspect_sees_layers_inside_a_larger_model(localattn) -> None:
    checkpoint = tagger() / "epoch.ckpt"
    done = localattn("inspect", checkpoint)
    assert done.code == 0 and "attn looks like a local_attention.LocalMHA (dim 32" in done.out
    assert f"--factory FILE.py:FUNCTION --weights {checkpoint} --input 'NAME:float32:[1,128,32]'" in done.out
    shown = localattn("inspect", checkpoint, "--factory", f"{tagger()}/tagger.py:build")
    assert shown.code == 0 and "forward takes frames" in shown.out and "window_size 4" in shown.out
