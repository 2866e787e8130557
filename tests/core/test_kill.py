"""Killed at any moment, export, build and bundle leave the old files or the new ones, which belong together."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from localattn.core.documents.engine_sidecar import read_engine_sidecar
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.storage.files import MARK, sha256, work_folder
from localattn.core.storage.publishing import check_unchanged, sidecar_path
from localattn.exporter.export import ExportRequest, export
from localattn.runtime.bundle.verify import verify_bundle
from localattn.runtime.generation.step_session import open_step
from localattn.runtime.session import load

from ..conftest import TINY, save_upstream
from ..support.kill_server import write_set
from ..support.models.engine_models import needs_rtx

ROOT = Path(__file__).resolve().parents[2]
ONE_LAYER = {**TINY, "depth": 1}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is missing")

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Run a task in a child of a server that has imported everything."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.kill_server"]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None

    def request(task: str, *arguments: object, **when: float) -> dict[str, Any]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({"task": task, "arguments": list(map(str, arguments)), **when}) + "\n")
        server.stdin.flush()
        return dict(json.loads(server.stdout.readline()))

    yield request
    server.stdin.close()
    server.wait(60)
    server.stdout.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of different sizes, each with an exported file beside it."""
    found = []
    for index, dim in enumerate((16, 24)):
        folder = tmp_path_factory.mktemp(f"checkpoint{index}")
        checkpoint = save_upstream(folder, "local_attention.LocalTransformer", {**ONE_LAYER, "dim": dim})
        export(ExportRequest(checkpoint, folder / "model.onnx", seeds=(0,)))
        found.append(checkpoint)
    return found


def judge_model(path: Path, checkpoints: list[Path]) -> None:
    """The file, its weights and its sidecar are those of one export, and it runs."""
    check_unchanged(path)
    sidecar = read_sidecar(path)
    assert sidecar is not None
    assert sidecar.checkpoint_sha256 in {sha256(checkpoint) for checkpoint in checkpoints}
    assert sidecar.external_data is not None and path.with_name(sidecar.external_data).is_file()
    tokens = np.zeros((1, sidecar.seq_len), np.int64)
    assert load(path, "cpu", 1).run({"tokens": tokens})["logits"].shape == (1, sidecar.seq_len, 23)


def judge_steps(path: Path, checkpoints: list[Path]) -> None:
    """Step and prefill file are of one export, and go on from a prompt together."""
    session = open_step(path, "cpu", 1)
    assert session.missing_prefill is None
    assert session.sidecar.checkpoint_sha256 in {sha256(checkpoint) for checkpoint in checkpoints}
    assert session.consume({"tokens": np.zeros((1, 5), np.int64)}).shape == (1, 1, 23)


def judge_bundle(path: Path, checkpoints: list[Path]) -> None:
    assert verify_bundle(path, files_only=True).report["code"] == 0


def judge_engine(path: Path, checkpoints: list[Path]) -> None:
    check_unchanged(path)
    sidecar = read_engine_sidecar(path)
    assert sidecar.engine_sha256 == sha256(path)
    assert sidecar.onnx_sha256 in {sha256(checkpoint.with_name("model.onnx")) for checkpoint in checkpoints}


# For each task: the file it writes, whether it reads the exported model, and how the result is judged.
KINDS: dict[str, tuple[str, bool, Callable[[Path, list[Path]], None]]] = {
    "export": ("model.onnx", False, judge_model),
    "steps": ("step.onnx", False, judge_steps),
    "bundle": ("bundle", True, judge_bundle),
    "bundle as tar": ("bundle.tar", True, judge_bundle),
    "build": ("model.engine", True, judge_engine),
}


def raw_is_whole(path: Path) -> None:
    """What a reader sees that knows nothing of localattn: a whole model and its weights, whatever its sidecar says."""
    if path.suffix == ".onnx":
        model = onnx.load(path)  # with its external data
        onnx.checker.check_model(model)


def is_whole(path: Path, judge: Callable[[Path], None]) -> bool:
    """Whether a reader finds files of one write; else it says that a write was interrupted, and what finishes it."""
    before = {entry.name for entry in path.parent.iterdir()}
    try:
        judge(path)
    except CheckFailed as error:
        assert "was interrupted" in error.what and "`overwrite=True`" in error.fix, error
        assert {entry.name for entry in path.parent.iterdir()} == before, "reading moves nothing"
        return False
    return True


def kill_often(kind: str, kills: int, ask: Ask, two: list[Path], folder: Path) -> None:
    """Replace files of one checkpoint by those of the other, killed at half the times by step, half by the clock."""
    task = kind.split()[0]
    name, reads_model, judge = KINDS[kind]
    output = folder / name
    sources = [path.with_name("model.onnx") if reads_model else path for path in two]
    whole = ask(task, sources[0], output)
    assert whole["code"] == 0, whole
    judge(output, two)
    saved = folder.parent / f"{folder.name}-saved"
    shutil.copytree(folder, saved)
    chance = random.Random(f"{kind} {kills}")
    ended = []
    for turn in range(kills):
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)
        if turn % 2:
            when: dict[str, float] = {"delay": chance.uniform(0, whole["seconds"])}
        else:  # the last changes are those that publish: every fourth kill is among them
            first = 1 if turn % 4 else max(1, whole["changes"] - 30)
            when = {"step": chance.randint(first, whole["changes"])}
        ended.append(ask(task, sources[1], output, **when)["code"])
        raw_is_whole(output)
        if not is_whole(output, lambda path: judge(path, two)):
            assert ask(task, sources[1], output)["code"] == 0
            judge(output, two)
    assert ended.count(-signal.SIGKILL) >= kills / 3, ended  # a late delay may let it finish
    assert set(ended) <= {0, -signal.SIGKILL}, ended
    last = ask(task, sources[1], output)
    assert last["code"] == 0
    judge(output, two)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", ["export", "bundle"])
def test_killed_at_some_moments(kind: str, ask: Ask, two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    kill_often(kind, 4, ask, two, tmp_path / "place")


@needs_rtx
def test_a_build_killed_at_some_moments(ask: Ask, two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    kill_often("build", 4, ask, two, tmp_path / "place")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "build"])
def test_killed_at_any_moment(kind: str, ask: Ask, two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    kill_often(kind, 30, ask, two, tmp_path / "place")


@pytest.mark.slow
@needs_rtx
def test_a_build_killed_at_any_moment(ask: Ask, two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    kill_often("build", 30, ask, two, tmp_path / "place")


# --- the step that publishes, killed before each of its changes -------------------------------------------------------


def test_publishing_killed_before_each_change(ask: Ask, tmp_path: Path) -> None:
    seen, interrupted = set(), 0
    for step in range(1, 60):
        folder = tmp_path / str(step)
        folder.mkdir()
        write_set(folder, b"old")
        code = ask("publish", folder, "new", step=step)["code"]
        models = [folder / "model.onnx", folder / "model.prefill.onnx"]
        contents = {path.read_bytes() for path in models}
        if code == 0:
            break
        assert code == -signal.SIGKILL
        for path in models:  # as any reader does, even before anything is finished
            assert (folder / f"model.onnx.{path.read_bytes().hex()}.data").is_file()
        whole = [is_whole(path, check_unchanged) for path in models]
        interrupted += not all(whole)
        if all(whole):
            seen |= contents
            for path in models:
                assert json.loads(sidecar_path(path).read_bytes())["content"] == path.read_bytes().hex()
        write_set(folder, b"new")
        for path in models:
            check_unchanged(path)
            assert path.read_bytes() == b"new"
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert code == 0 and step > 15
    assert seen == {b"old", b"new"} and interrupted


def test_publishing_ended_before_each_change(ask: Ask, tmp_path: Path) -> None:
    seen = set()
    for step in range(1, 80):
        folder = tmp_path / str(step)
        folder.mkdir()
        write_set(folder, b"old")
        code = ask("publish", folder, "new", step=step, signal=signal.SIGTERM)["code"]
        assert code in (0, 128 + signal.SIGTERM)
        models = [folder / "model.onnx", folder / "model.prefill.onnx"]
        contents = {path.read_bytes() for path in models}
        assert len(contents) == 1, "what has begun to move is moved"
        seen |= contents
        for path in models:
            check_unchanged(path)
        assert not list(folder.glob(".localattn.next.*"))
        if code == 0:
            break
    assert code == 0 and step > 15
    assert seen == {b"old", b"new"}


def test_places_that_are_folders_are_refused_before_anything_changes(tmp_path: Path) -> None:
    write_set(tmp_path, b"old")
    sidecar_path(tmp_path / "model.onnx").unlink()
    sidecar_path(tmp_path / "model.onnx").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        write_set(tmp_path, b"new")
    assert (tmp_path / "model.onnx").read_bytes() == b"old"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_folders_of_living_processes_stay(tmp_path: Path) -> None:
    abandoned = tmp_path / f".localattn-{0:016x}"
    link = tmp_path / f".localattn-{1:016x}"
    (abandoned / "sub").mkdir(parents=True)
    (abandoned / MARK).touch()
    with work_folder(tmp_path / "a") as held:
        assert not abandoned.exists()
        with work_folder(tmp_path / "b"):
            assert held.is_dir()
        link.symlink_to(tmp_path)
        with work_folder(tmp_path / "c"):
            assert held.is_dir()
    assert not held.exists()
    assert [path.name for path in tmp_path.iterdir()] == [link.name]  # a link is followed nowhere


POOL = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from localattn.core.machine.process import end_with_parent
if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        waiting = [pool.submit(time.sleep, 600) for _ in range(8)]
        while len(pool._processes) < 2 or not pool.submit(os.getpid).done():
            print(*pool._processes, flush=True)
            time.sleep(0.5)
"""


def test_workers_end_with_their_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    parent = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers: list[int] = []
    while len(workers) < 2:
        workers = list(map(int, parent.stdout.readline().split()))
    time.sleep(2)  # they start
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(_alive, workers)):
        assert time.monotonic() < deadline, "workers go on without their parent"
        time.sleep(0.1)


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False
