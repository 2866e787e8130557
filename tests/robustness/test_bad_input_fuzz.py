"""Cases of every kind end as documented: no exit code 70, hang, crash, lost file or foreign code; nothing is left.

A small sample by default, a campaign among the slow tests; `python -m tests.robustness.fuzz --replay KIND:NUMBER` shows
one again. LOCALATTN_FUZZ=N tries N cases of each kind, and N in all in the campaign.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from .fuzz.campaign import draw, rota, run
from .fuzz.case import Case
from .fuzz.command_line import CALLS, parameters, unknown_paths
from .fuzz.groups import gather
from .fuzz.judge import Fault, meet
from .fuzz.kinds.outputs import case_of
from .fuzz.kinds.planted import with_cache
from .fuzz.kinds.servers import honest
from .fuzz.kinds.targets import TARGETS
from .fuzz.runner import Worker
from .fuzz.seeds import ROOT, Seeds
from .fuzz.server import OTHER, serving
from .fuzz.torn import torn

ASKED = os.environ.get("LOCALATTN_FUZZ")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return Seeds(tmp_path_factory.mktemp("seeds"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def met(worker: Worker, case: Case, seeds: Seeds) -> tuple[int | None, list[Fault]]:
    """Run a case in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="localattn-case-") as folder:
        return meet(worker, case, Path(folder), seeds.marker)


@pytest.mark.parametrize("kind", [kind for kind, target in TARGETS.items() if target.weight])
def test_sample(kind: str, seeds: Seeds, worker: Worker) -> None:
    if kind == "planted-library" and shutil.which("cc") is None:
        pytest.skip("no C compiler makes the library to plant")
    faults = {}
    for number in range(int(ASKED or TARGETS[kind].sample)):
        _, found = met(worker, draw(kind, number, seeds), seeds)
        if found:
            faults[f"{kind}:{number}"] = "; ".join(map(str, found))
    assert not faults


@pytest.mark.slow
def test_campaign(seeds: Seeds, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault of one case does not hide the next: all are run, then the table is printed."""
    with capsys.disabled():
        tally = run(islice(rota(list(TARGETS)), int(ASKED or 10_000)), seeds)
        print(f"\n{tally.table()}")
    assert not tally.faults


def test_sound_files_work(seeds: Seeds, worker: Worker) -> None:
    """Else the mutations would be refused for another reason."""
    for name, target in TARGETS.items():
        if target.start is not None and target.with_bytes is not None:
            assert met(worker, target.with_bytes(target.start(seeds), seeds), seeds) == (0, []), name


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow if any(call.seconds >= 1 for call in calls) else ())
        for command, calls in CALLS.items()
    ],
)
def test_sound_calls_work(command: str, seeds: Seeds, worker: Worker) -> None:
    """Else every call would be refused for another reason than what was changed in it."""
    for call in CALLS[command]:
        ended = met(worker, case_of(command, call, gather(seeds, call.files)), seeds)
        assert ended in [(code, []) for code in call.codes], (call, worker.last)


def test_no_command_and_no_path_is_forgotten() -> None:
    assert parameters().keys() == CALLS.keys()
    assert unknown_paths() == []


def test_what_is_lost_or_left_is_noticed(seeds: Seeds, worker: Worker) -> None:
    """The same calls, with nothing allowed to them."""
    call = CALLS["inspect"][1]
    case = case_of("inspect", call, gather(seeds, call.files))
    assert [fault.kind for fault in met(worker, replace(case, outputs=()), seeds)[1]] == ["left"]
    forced = replace(case, files={**case.files, "r.json": b""}, arguments=(*case.arguments, "--force"))
    assert [fault.kind for fault in met(worker, forced, seeds)[1]] == ["lost"]
    assert met(worker, replace(forced, replaced=("r.json",)), seeds) == (0, [])


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler makes the library to plant")
def test_foreign_code_is_noticed(seeds: Seeds, worker: Worker) -> None:
    """The library runs where it may: in the user's own cache. Elsewhere the fuzzer would see it."""
    assert [fault.kind for fault in met(worker, with_cache(seeds), seeds)[1]] == ["foreign"]


def test_a_server_that_is_believed_or_sends_elsewhere_is_noticed(seeds: Seeds, worker: Worker) -> None:
    """An honest server passes, so a lying one would be noticed where it does."""
    case = honest(seeds)
    assert met(worker, case, seeds) == (0, [])
    assert [fault.kind for fault in met(worker, replace(case, must_fail=True), seeds)[1]] == ["believed"]
    with serving(case.answers) as (names, contacts):
        host, port = names[OTHER].removeprefix("http://").split(":")
        socket.create_connection((host, int(port))).close()
    assert contacts.elsewhere


def test_half_a_file_is_noticed(seeds: Seeds) -> None:
    model, sidecar = seeds.model.read_bytes(), seeds.sidecar
    whole = {"m.onnx": model, "m.onnx.json": sidecar, "a.npz": seeds.npz}
    assert list(torn(whole, whole)) == []
    halves = {name: content[: len(content) // 2] for name, content in whole.items()}
    assert {name for name, _ in torn(halves, halves)} == set(whole)
    others = whole | {"m.onnx": model + b"\0"}
    assert [name for name, _ in torn({"m.onnx.json": sidecar}, others)] == ["m.onnx.json"]


def test_unpickling_is_noticed(seeds: Seeds) -> None:
    import pickle

    seeds.marker.unlink(missing_ok=True)
    pickle.loads(seeds.pickles["evil.pkl"])
    assert seeds.marker.exists()
    seeds.marker.unlink()


@pytest.mark.slow
def test_replay_shows_the_same_case() -> None:
    command = [sys.executable, "-m", "tests.robustness.fuzz", "--replay", "config:3"]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for _ in range(2)]
    lines = [[line for line in run.stdout.splitlines() if "bytes" in line] for run in runs]
    assert lines[0] == lines[1] != []
    assert {run.returncode for run in runs} == {0}
