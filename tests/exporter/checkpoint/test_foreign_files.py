"""A file that is no checkpoint is called what it is, and the advice gets a checkpoint out of it where there is one."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.load import load_state

torch = pytest.importorskip("torch")

STATE = {"to_qkv.weight": torch.arange(24.0).reshape(6, 4), "to_out.weight": torch.ones(4, 2)}


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_out = torch.nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.to_out(x)


def refusal(path: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_state(path)
    assert "damaged" not in str(caught.value)
    return caught.value


def torchscript(path: Path) -> None:
    torch.jit.save(torch.jit.trace(Small().eval(), torch.ones(1, 3)), path)


def exported_program(path: Path) -> None:
    torch.export.save(torch.export.export(Small().eval(), (torch.ones(1, 3),)), path)


@pytest.mark.parametrize(
    ("write", "name", "what"),
    [(torchscript, "m.pt", "a TorchScript program"), (exported_program, "m.pt2", "a program of torch.export")],
)
def test_programs_of_torch_give_their_weights(
    write: Callable[[Path], None], name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice is Python: it is run as it stands, and what it writes is read."""
    write(tmp_path / name)
    error = refusal(tmp_path / name)
    assert what in error.what
    monkeypatch.chdir(tmp_path)
    exec(error.fix.removeprefix("In Python: "), {"torch": torch})
    assert sorted(load_state(tmp_path / "weights.pt", roots={"to_out"}).state) == ["to_out.bias", "to_out.weight"]


def test_arrays_give_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "w.npz", **{name: tensor.numpy() for name, tensor in STATE.items()})
    error = refusal(tmp_path / "w.npz")
    assert "an .npz file of NumPy arrays" in error.what
    monkeypatch.chdir(tmp_path)
    exec(error.fix.removeprefix("In Python: "), {"torch": torch, "numpy": np})
    assert sorted(load_state(tmp_path / "weights.pt").state) == sorted(STATE)


def zipped(folder: Path) -> bytes:
    torch.save(STATE, folder / "weights.pt")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.write(folder / "weights.pt", "run/weights.pt")
    return buffer.getvalue()


def tarred(folder: Path) -> bytes:
    torch.save(STATE, folder / "weights.pt")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder / "weights.pt", "weights.pt")
    return buffer.getvalue()


FILES: list[tuple[str, Callable[[Path], bytes] | bytes, str, str]] = [
    ("m.gguf", b"GGUF" + bytes(60), "a GGUF file", "Hugging Face folder"),
    ("m.h5", b"\x89HDF\r\n\x1a\n" + bytes(60), "an HDF5 file", "Keras"),
    ("m.bin", b"\x89HDF\r\n\x1a\n" + bytes(60), "an HDF5 file", "Keras"),
    ("m.msgpack", b"\x82\xa6params" + bytes(60), "Flax", "flax"),
    ("m.npy", b"\x93NUMPY" + bytes(60), "a NumPy array", "from_numpy"),
    ("m.tflite", b"\x1c\0\0\0TFL3" + bytes(60), "TensorFlow Lite", "TensorFlow"),
    ("m.pt.xz", b"\xfd7zXZ\0" + bytes(60), "compressed (xz)", "Unpack"),
    ("m.pt", b"BZh9" + bytes(60), "compressed (bzip2)", "Unpack"),
    ("m.pt", b"<!DOCTYPE html><html>log in</html>", "a web page", "Download"),
    ("m.safetensors", b"<html>404</html>" + bytes(20), "a web page", "Download"),
    ("m.pt", b'{"error": "not found"}', "a text of JSON", "`config`"),
    ("m.pt", b"\x08\x0a\x12\x07pytorch" + bytes(60), "an ONNX file", "localattn run"),
    ("model.zip", zipped, "a ZIP archive that contains a checkpoint", "unzip"),
    ("model.pt", zipped, "a ZIP archive that contains a checkpoint", "give run/weights.pt"),
    ("model.tar", tarred, "a tar", "tar x"),
    ("model.pt.gz", lambda folder: gzip.compress(b"\x80\x02" + bytes(600)), "compressed (gzip)", "gunzip"),
]


@pytest.mark.parametrize(("name", "content", "what", "fix"), FILES, ids=[f"{x[0]}, {x[2]}" for x in FILES])
def test_files_are_called_what_they_are(
    name: str, content: Callable[[Path], bytes] | bytes, what: str, fix: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content(tmp_path))
    error = refusal(path)
    assert what in error.what
    assert fix in error.fix


def test_an_index_of_shards_without_them(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "lacks 1 of its 1 shards" in refusal(path).what


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("to_qkv.weight.absmax", "bitsandbytes"),
        ("to_qkv.qweight", "GPTQ or AWQ"),
        ("to_qkv.weight_packed", "compressed-tensors"),
        ("to_qkv._packed_params.dtype", "torch.ao"),
    ],
)
def test_quantised_weights(name: str, library: str, tmp_path: Path) -> None:
    torch.save(STATE | {name: torch.ones(3, dtype=torch.uint8)}, tmp_path / "w.pt")
    error = refusal(tmp_path / "w.pt")
    assert f"that {library} quantised: {name}" in error.what
    assert re.search("`weight_dtype='int8'`", error.fix)


def test_an_optimizer_is_called_one(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(Small().parameters())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert "the state of an optimizer" in refusal(tmp_path / "optimizer.pt").what
    torch.save((STATE, optimizer.state_dict()), tmp_path / "both.pt")
    assert sorted(load_state(tmp_path / "both.pt").state) == sorted(STATE)


def test_a_list_of_tensors(tmp_path: Path) -> None:
    torch.save([*STATE.values()], tmp_path / "w.pt")
    assert "contains a list of 2 tensors without names" in refusal(tmp_path / "w.pt").what
