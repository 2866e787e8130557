"""Files that are often given for a model: Git LFS pointers and packed bundles, each named as what it is."""

from __future__ import annotations

import gzip
import io
import os
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from localattn.core.errors import UsageError
from localattn.core.storage.wrong_file import refuse_wrong_file

from ..conftest import Finished

Command = Callable[..., Finished]
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 3145728\n".encode()
COMMANDS = {
    "run": "run FILE",
    "parity": "parity FILE --against FILE",
    "bench": "bench FILE",
    "inspect": "inspect FILE",
    "bundle": "bundle FILE -o out.tar",
    "build": "build FILE -o out.engine",
    "export": "export FILE -o out.onnx",
}


def packed() -> bytes:
    """A tar like a bundle's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        entry = tarfile.TarInfo("model/manifest.json")
        entry.size = 2
        archive.addfile(entry, io.BytesIO(b"{}"))
    return buffer.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pointer_is_called_one(name: str, here: Path, localattn: Command) -> None:
    file = "m.pt" if name == "export" else "m.onnx"
    Path(file).write_bytes(POINTER)
    ended = localattn(*COMMANDS[name].replace("FILE", file).split())
    assert ended.code == 2 and f"{file} is a Git LFS pointer, not the file itself." in ended.err
    assert f"git lfs pull --include {file}" in ended.err


@pytest.mark.parametrize("file", ["m.engine", "m.safetensors", "m.bin"])
def test_so_is_one_of_another_kind(file: str, here: Path, localattn: Command) -> None:
    Path(file).write_bytes(POINTER)
    assert "is a Git LFS pointer" in localattn("run" if file.endswith("engine") else "inspect", file).err
    Path("in.npz").write_bytes(POINTER)
    with pytest.raises(UsageError, match="pointer"):
        refuse_wrong_file(Path("in.npz"))


@pytest.mark.parametrize("name", ["run", "parity", "bench", "inspect", "export", "verify"])
def test_a_compressed_bundle_is_unpacked_first(name: str, here: Path, localattn: Command) -> None:
    """And the line that says how works as it is printed, whatever the file is called."""
    file = Path("my bundle.tar.gz")
    file.write_bytes(gzip.compress(packed(), mtime=0))
    words = {"verify": "bundle verify FILE", **COMMANDS}[name]
    ended = localattn(*(str(file) if word == "FILE" else word for word in words.split()))
    assert ended.code == 2 and "is a compressed tar, not a model." in ended.err
    line = ended.err.partition("Unpack it: ")[2].partition(", and")[0]
    assert shlex.split(line) == ["tar", "xzf", str(file)]
    subprocess.run(["sh", "-c", line], check=True)
    assert Path("model/manifest.json").is_file()


def test_a_tar_is_a_bundle_and_no_model(here: Path, localattn: Command) -> None:
    Path("b.tar").write_bytes(packed())
    ended = localattn("run", "b.tar")
    assert ended.code == 2 and "localattn bundle verify b.tar" in ended.err
    refused = localattn("bundle", "verify", "b.tar")
    assert "not a model" not in refused.err, "it is read as the bundle it may be"


def test_what_is_no_tar_is_said_to_be_compressed(here: Path) -> None:
    for content, said in ((gzip.compress(b"weights"), "gunzip m.pt"), (b"\x1f\x8bcut", "gunzip m.pt")):
        Path("m.pt").write_bytes(content)
        with pytest.raises(UsageError) as caught:
            refuse_wrong_file(Path("m.pt"))
        assert said in caught.value.fix


def test_nothing_else_is_refused_or_waited_for(here: Path) -> None:
    Path("m.onnx").write_bytes(b"\x08\x0a")
    for path in ("m.onnx", "nowhere", "\0"):
        refuse_wrong_file(Path(path))
    os.mkfifo("pipe")
    with pytest.raises(UsageError, match="Cannot read"):
        refuse_wrong_file(Path("pipe"))
