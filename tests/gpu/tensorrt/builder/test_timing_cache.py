"""Files of kernel times: what is taken for one, and builds that share one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localattn.core.errors import UsageError
from localattn.core.storage.file_kinds import TIMES, contents_of
from localattn.runtime.backends.tensorrt.builder.timing_cache import combined, extend

from ....conftest import Finished
from ....support.models.engine_models import needs_rtx
from ...simulators.timing_cache import Times, framed

PROCESSES = 3
TREE = Path(__file__).parents[4]


def model(folder: Path) -> Path:
    """A file that is not read: outputs come first."""
    (folder / "m.onnx").write_bytes(b"\x08\x0a")
    return folder / "m.onnx"


@pytest.mark.parametrize("content", [
    b"", b"my notes\n", b"\x89PNG\r\n\x1a\n" + bytes(60), b"\x08\x0a\x12\x03abc" + bytes(30), b"ftrt" + bytes(60),
    b"vtrt" + bytes(60), framed({"cut"})[:-1], framed({"longer"}) + b"x", b"ptrt" + bytes(20),
], ids=["empty", "text", "PNG", "ONNX", "plan", "RTX engine", "cut", "longer", "no entries"])  # fmt: skip
def test_files_of_another_kind_stay(localattn: Callable[..., Finished], tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "mine.cache"
    cache.write_bytes(content)
    finished = localattn("build", model(tmp_path), "-o", tmp_path / "x.engine", "--timing-cache", cache, "--force")
    assert finished.code == 2 and finished.out == ""
    assert "mine.cache is not replaced." in finished.err and "the output is a timing cache" in finished.err
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "mine.cache"] and cache.read_bytes() == content
    )


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_stays(localattn: Callable[..., Finished], tmp_path: Path, kind: str) -> None:
    cache, other = tmp_path / "mine.cache", tmp_path / "other.cache"
    other.write_bytes(framed({"a"}))
    {"folder": cache.mkdir, "link": lambda: cache.symlink_to(other), "pipe": lambda: os.mkfifo(cache)}[kind]()
    finished = localattn("build", model(tmp_path), "-o", tmp_path / "x.engine", "--timing-cache", cache)
    assert finished.code == 2 and "mine.cache" in finished.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "mine.cache", "other.cache"]
    assert other.read_bytes() == framed({"a"})


def test_times_of_both_sides_are_kept(tmp_path: Path) -> None:
    cache = tmp_path / "times.cache"
    assert extend(Times(), cache, framed({"a"})) == []
    assert extend(Times(), cache, framed({"b"})) == []
    assert cache.read_bytes() == framed({"a", "b"}) and contents_of(cache) == TIMES


def test_a_cache_of_another_release_stays(tmp_path: Path) -> None:
    cache, content = tmp_path / "times.cache", framed({"another release"})
    cache.write_bytes(content)
    (note,) = extend(Times(), cache, framed({"a"}))
    assert "The times were not added" in note and cache.read_bytes() == content
    with pytest.raises(UsageError, match="does not combine"):
        combined(Times(), content, framed({"a"}))


def test_what_appears_during_the_build_stays(tmp_path: Path) -> None:
    cache = tmp_path / "times.cache"
    cache.write_text("notes")
    (note,) = extend(Times(), cache, framed({"a"}))
    assert "is a text" in note and cache.read_text() == "notes"


# Processes of their own; the first with the lines above, the second with what TensorRT-RTX itself reads and writes.
_LINES = """
from localattn.runtime.backends.tensorrt.builder.timing_cache import extend
from tests.gpu.simulators.timing_cache import Times, framed
for build in range(8):
    assert extend(Times(), path, framed({f"{number}.{build}"})) == []
"""
_REAL = """
from localattn.runtime.backends.tensorrt.builder.timing_cache import extend, stage
from localattn.runtime.backends.tensorrt.library import open_library
opened = open_library("tensorrt-rtx")
builder = opened.trt.Builder(opened.logger)
folder = path.with_suffix(f".{number}")
folder.mkdir()
for _ in range(4):
    staged = stage(opened, builder, path, folder)
    made = builder.create_builder_config().create_timing_cache(staged.read_bytes() if staged.exists() else b"")
    assert extend(builder, path, bytes(made.serialize())) == []
"""


def _at_once(script: str, path: Path) -> None:
    def started(number: int) -> subprocess.Popen[str]:
        words = f"from pathlib import Path\npath, number = Path({str(path)!r}), {number}\n{script}"
        command = [sys.executable, "-c", words]
        return subprocess.Popen(command, cwd=TREE, env=env, stderr=subprocess.PIPE, text=True)

    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in (str(TREE), os.getenv("PYTHONPATH")) if path)}
    processes = [started(number) for number in range(PROCESSES)]
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said


def test_builds_at_once_lose_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "times.cache"
    _at_once(_LINES, cache)
    assert Times(cache.read_bytes()).entries == {f"{n}.{build}" for n in range(PROCESSES) for build in range(8)}
    assert [path.name for path in tmp_path.iterdir()] == ["times.cache"]


@needs_rtx
def test_real_caches_of_processes_at_once(tmp_path: Path) -> None:
    """What TensorRT-RTX itself writes and reads; its caches have no entries to lose."""
    cache = tmp_path / "times.cache"
    _at_once(_REAL, cache)
    assert contents_of(cache) == TIMES
