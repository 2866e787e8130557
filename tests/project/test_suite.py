"""How the tests run: thinned grids name tests that exist; what workers share is made once, again where it failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support import run_folder
from ..support.native import compiled_once
from ..thinning import GRIDS, SLOW

TESTS = Path(__file__).resolve().parents[1]

ASKING = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from run_folder import once

def make(place):
    time.sleep(0.3)  # the others ask in the meantime
    (place / "made").write_text("whole")
    with Path(sys.argv[2]).open("a") as log:
        log.write("made\\n")

assert (once("a thing", make) / "made").read_text() == "whole"
"""


@pytest.mark.parametrize("row", [*GRIDS, *sorted(SLOW)])
def test_every_row_of_the_tables_is_there(row: str) -> None:
    file, _, function = row.partition("::")
    assert f"def {function}(" in (TESTS / file).read_text(encoding="utf-8")
    assert GRIDS.get(row, 2) > 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a run of its own."""
    monkeypatch.setenv("LOCALATTN_TESTS_RUN", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    return tmp_path


def compiler(folder: Path, code: int, text: str) -> list[str]:
    """What stands for a compiler: it says that it ran, and writes `text` unless it fails."""
    path = folder / "compiler"
    path.write_text(
        f'#!/bin/sh\necho ran >> {folder}/ran\n[ {code} = 0 ] || exit {code}\nprintf "{text}" > "$2"; chmod +x "$2"\n'
    )
    path.chmod(0o755)
    return [str(path)]


def test_workers_that_ask_at_the_same_time_make_it_once(run: Path) -> None:
    command = [sys.executable, "-c", ASKING, str(Path(run_folder.__file__).parent), str(run / "log")]
    workers = [subprocess.Popen(command) for _ in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert (run / "log").read_text() == "made\n"


def test_what_fails_is_made_again(run: Path) -> None:
    def fail(place: Path) -> None:
        (place / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_folder.once("a thing", fail)
    assert [*run_folder.once("a thing", lambda place: (place / "whole").touch()).iterdir()] == [
        run / "run" / "a thing" / "whole"
    ]


def test_a_library_is_compiled_again_when_anything_changes(run: Path) -> None:
    """Its sources, the options, or the compiler; where the output lies is no change."""
    sources = run / "sources"
    sources.mkdir()
    (sources / "a.cpp").write_text("one")

    def build(output: str, *options: str, tool: list[str]) -> int:
        command = [*tool, "-o", str(run / output), *options]
        assert compiled_once.run(command, cwd=sources, capture_output=True, text=True).returncode == 0
        assert (run / output).read_text() == "library" and os.access(run / output, os.X_OK)
        return len((run / "ran").read_text().splitlines())

    tool = compiler(run, 0, "library")
    assert [build(output, tool=tool) for output in ("x.so", "y.so")] == [1, 1]
    assert build("z.so", "-O2", tool=tool) == 2
    (sources / "a.h").write_text("two")
    assert build("v.so", tool=tool) == 3
    (run / "other").mkdir()
    other = [str(run / "other" / "compiler")]
    Path(other[0]).symlink_to(tool[0])
    assert build("w.so", tool=other) == 4


def test_a_compiler_that_fails_is_asked_again(run: Path) -> None:
    for _ in range(2):
        finished = compiled_once.run([*compiler(run, 3, ""), "-o", str(run / "x.so")], cwd=run, capture_output=True)
        assert finished.returncode == 3
    assert (run / "ran").read_text() == "ran\nran\n"
