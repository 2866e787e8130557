"""Another user who can write to the folder of an output renames and links in it while a command writes there.

Nothing of the user's is written to, moved or removed but the output itself: not what a planted link leads to, and not
the user's other folders, whatever name they are given.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localattn.core.errors import UsageError
from localattn.core.storage import files, open_folder
from localattn.core.storage.file_kinds import NPZ, ONNX
from localattn.core.storage.files import publish, work_folder
from localattn.core.storage.outputs import Output, writing
from localattn.core.storage.publishing import publish_together
from localattn.exporter.export import ExportRequest, export
from localattn.runtime.bundle import place as bundle_place
from localattn.runtime.bundle.create import BundleRequest, create_bundle

from ..conftest import TINY, Finished, save_upstream
from ..support.models.bundles import tiny_model  # noqa: F401
from ..support.models.engine_models import needs_rtx

# ruff: noqa: F811 - the fixtures are imported

pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can start a process of another user"
)

OTHER = 1002
# Renames what is or holds the work of others, and puts something of its own there. It has the folder as its working
# folder, and no right to reach it otherwise.
ATTACK = r"""
import os, sys, time
how, private, names = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
os.setgroups([]); os.setgid(2000); os.setuid(int(sys.argv[4]))
print("ready", flush=True)
number = 0
while True:
    for name in os.listdir("."):
        try:
            if not name.startswith(".localattn") or os.lstat(name).st_uid == os.getuid():
                continue
            number += 1
            os.rename(name, f"moved{number}")
            print("swapped", name, flush=True)
            if how == "links":
                os.mkdir(name); os.chmod(name, 0o2777)
                for each in names:
                    os.symlink(private + "/precious", name + "/" + each)
            elif how == "folder":
                os.symlink(private, name)
            elif how == "theirs":
                os.rename("thesis", name)
            elif how == "back":
                os.mkdir(name); time.sleep(0.002)
                os.rename(name, f"moved{number}.mine"); os.rename(f"moved{number}", name)
        except OSError:
            pass
    time.sleep(0.0003)
"""
# Names that the staged files of some command have.
STAGED = "m.onnx,m.onnx.json,m.onnx.data,weights,out.npz,page.html,bundle.tar,b.tar,bundle,gathered,lib.so,lib.so.json"
STAGED += (
    ",t.cache,timing.cache,e.engine,e.engine.json,staged,sidecar,companion-tokenizer.json,model.json,.localattn,r.onnx"
)


class Place:
    """A folder that others can write to, and what the user has there and elsewhere."""

    def __init__(self, folder: Path, mode: int) -> None:
        self.folder, self.private = folder / "shared", folder / "private"
        for each in (self.folder, self.private, self.folder / "thesis"):
            each.mkdir()
        os.chown(self.folder, 0, 2000)
        self.folder.chmod(mode)
        self.private.chmod(0o700)
        for path in (self.private / "precious", self.folder / "thesis/m.onnx", self.folder / "thesis/m.onnx.json"):
            path.write_text(f"precious {path.name}")
            path.chmod(0o600)
        for name in STAGED.split(","):
            (self.private / name).write_text("precious")
        self._before = self._kept()

    def _kept(self) -> dict[str, bytes]:
        """What must stay: the private folder, and the thesis wherever it lies now."""
        kept = {f"private/{path.name}": path.read_bytes() for path in self.private.iterdir()}
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.read_bytes().startswith(b"precious"):
                kept[f"thesis/{path.name}"] = path.read_bytes()
        return kept

    def is_whole(self) -> None:
        assert self._kept() == self._before


@contextmanager
def attacked(place: Place, how: str) -> Iterator[Callable[[], int]]:
    """Let the other user at work in the folder; yields what tells how often something was swapped so far."""
    log = place.private.with_name("log")
    with log.open("w") as told:
        command = [sys.executable, "-c", ATTACK, how, str(place.private), STAGED, str(OTHER)]
        other = subprocess.Popen(command, cwd=place.folder, stdout=told, stderr=subprocess.STDOUT)
        try:
            while "ready" not in log.read_text():
                assert other.poll() is None, log.read_text()
            yield lambda: log.read_text().count("swapped")
            assert other.poll() is None, log.read_text()
        finally:
            other.kill()
            other.wait()


HOWS = ["links", "folder", "theirs", "back"]
Run = Callable[..., Finished]


def _checkpoint(folder: Path) -> Path:
    folder.mkdir()
    return save_upstream(folder, "local_attention.LocalTransformer", {**TINY, "depth": 1})


def _with_weights(place: Place, model: Path, run: Run) -> None:
    checkpoint = _checkpoint(place.private.with_name("given"))
    export(ExportRequest(checkpoint, place.folder / "m.onnx", external_data_from=0, checks="quick"))


def _write_config(place: Place, model: Path, run: Run) -> None:
    checkpoint = _checkpoint(place.folder / "given")
    checkpoint.with_suffix(".json").unlink()
    run("inspect", checkpoint, "--write-config")


# Every command that writes, by what it writes.
COMMANDS: dict[str, Callable[[Place, Path, Run], object]] = {
    "outputs": lambda place, model, run: run("run", model, "--save-outputs", place.folder / "out.npz"),
    "inputs": lambda place, model, run: run(
        "parity", model, "--against", model, "--save-inputs", place.folder / "out.npz"
    ),
    "report": lambda place, model, run: run("inspect", model, "-o", place.folder / "page.html"),
    "tar": lambda place, model, run: run("bundle", model, "-o", place.folder / "b.tar"),
    "folder": lambda place, model, run: run("bundle", model, "-o", place.folder / "b"),
    "model": lambda place, model, run: run(
        "export", _checkpoint(place.private.with_name("given")), "-o", place.folder / "m.onnx", "--checks", "quick"
    ),
    "weights": _with_weights,
    "convert": lambda place, model, run: run("convert", model, "-o", place.folder / "m.onnx", "--standard-ops"),
    "rewrite": lambda place, model, run: run("plugin", "rewrite", model, "-o", place.folder / "r.onnx"),
    "library": lambda place, model, run: run(
        "plugin", "build", "--backend", "onnxruntime", "-o", place.folder / "lib.so"
    ),
    "engine": lambda place, model, run: run(
        *("build", model, "-o", place.folder / "e.engine", "--backend", "tensorrt-rtx", "--target", "rtx40"),
        *("--timing-cache", place.folder / "t.cache"),
    ),
    "configuration": _write_config,
    "demo": lambda place, model, run: run("demo", "-o", place.folder / "demo"),
}
SLOW = {"library", "demo", "weights"}
KINDS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [needs_rtx] if name == "engine" else [])
    for name in COMMANDS
]


@pytest.mark.parametrize("command", KINDS)
@pytest.mark.parametrize("how", HOWS)
def test_no_command_follows_what_another_user_plants(
    command: str, how: str, tmp_path: Path, tiny_model: Path, localattn: Run
) -> None:
    place = Place(tmp_path, 0o2775 if how == "links" else 0o777)
    with attacked(place, how) as swapped:
        try:
            done = COMMANDS[command](place, tiny_model, localattn)
        except UsageError:
            done = None
        place.is_whole()
        assert not isinstance(done, Finished) or done.code in (0, 2), (done.code, done.out, done.err)
        assert swapped() or command in ("configuration", "demo"), ("nothing was tried", done)
    place.is_whole()


@pytest.mark.parametrize("kind", ["sticky", "own"])
def test_a_folder_that_is_safe_is_written_to_by_its_path(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o700)
    above = folder / "above"
    above.mkdir()
    above.chmod(0o1777 if kind == "sticky" else 0o755)
    inner = above / "inner"
    inner.mkdir(mode=0o755)
    with work_folder(inner / "x.npz") as work:
        assert work.parent == inner


def test_a_folder_of_a_group_is_written_to_by_descriptor_and_keeps_the_group(tmp_path: Path) -> None:
    """Files keep the group that the folder gives them, and the mode that the umask leaves."""
    place = Place(tmp_path, 0o2775)
    before = os.umask(0o002)
    try:
        with writing(Output(place.folder / "x.npz", NPZ)) as work:
            assert str(work).startswith("/proc/") and stat.S_IMODE(work.stat().st_mode) == 0o2700
            (work / "x.npz").write_bytes(b"PK")
            publish(work / "x.npz", place.folder / "x.npz")
    finally:
        os.umask(before)
    state = (place.folder / "x.npz").stat()
    assert (stat.S_IMODE(state.st_mode), state.st_gid) == (0o664, 2000)
    assert sorted(path.name for path in place.folder.iterdir()) == ["thesis", "x.npz"]


@pytest.mark.parametrize("how", ["no /proc", "no descriptors", "no locks"])
def test_systems_that_lack_something_write_all_the_same(
    how: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, localattn: Run
) -> None:
    place = Place(tmp_path, 0o2775)
    if how == "no /proc":
        monkeypatch.setattr(
            open_folder.OpenFolder, "is_at", lambda folder, path: not str(path).startswith(("/proc", "/.vol"))
        )
    elif how == "no descriptors":  # as on Windows
        monkeypatch.setattr(open_folder, "HAS_DESCRIPTORS", False)
        monkeypatch.setattr(files, "HAS_LOCKS", False)
    else:
        monkeypatch.setattr(files, "HAS_LOCKS", False)
    for _ in range(2):
        for output in (
            ("run", tiny_model, "--save-outputs", place.folder / "out.npz"),
            ("bundle", tiny_model, "-o", place.folder / "b"),
            ("bundle", tiny_model, "-o", place.folder / "b.tar"),
            ("convert", tiny_model, "-o", place.folder / "c.onnx", "--standard-ops"),
        ):
            done = localattn(*output, "--force")
            assert done.code == 0, done.err
    place.is_whole()
    names = {"out.npz", "b", "b.tar", "c.onnx", "c.onnx.json", "thesis"}
    assert {path.name for path in place.folder.iterdir()} == names


def test_nothing_is_replaced_over_a_link_of_another_user(tmp_path: Path, tiny_model: Path, localattn: Run) -> None:
    place = Place(tmp_path, 0o777)
    results = tmp_path / "results"
    results.mkdir()
    assert localattn("run", tiny_model, "--save-outputs", results / "out.npz").code == 0
    before = (results / "out.npz").read_bytes()
    (place.folder / "mine").symlink_to(results)
    (place.folder / "planted").symlink_to(results)
    os.lchown(place.folder / "planted", OTHER, 2000)
    done = localattn("run", tiny_model, "--seed", "7", "--save-outputs", place.folder / "planted/out.npz", "--force")
    assert done.code == 2 and "symbolic link of another user" in done.err
    assert (results / "out.npz").read_bytes() == before
    done = localattn("run", tiny_model, "--seed", "7", "--save-outputs", place.folder / "mine/out.npz", "--force")
    assert done.code == 0 and (results / "out.npz").read_bytes() != before
    assert localattn("run", tiny_model, "--save-outputs", place.folder / "planted/new.npz").code == 0


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_is_swapped_in_for_a_bundle_goes_back(
    exchanges: bool, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last moment another folder of the user's has the name of the earlier bundle."""
    place = Place(tmp_path, 0o777)
    target = place.folder / "b"
    create_bundle(BundleRequest(tiny_model, target, samples=0))
    look = bundle_place.look_again

    def swap(asked: Path, parent: object) -> None:
        look(asked, parent)  # type: ignore[arg-type]
        target.rename(place.folder / "bundle")
        (place.folder / "thesis").rename(target)

    monkeypatch.setattr(bundle_place, "look_again", swap)
    if not exchanges:
        monkeypatch.setattr(bundle_place, "_exchange", lambda *places: False)
    with pytest.raises(UsageError, match="is not replaced"):
        create_bundle(BundleRequest(tiny_model, target, samples=0, overwrite=True))
    assert sorted(path.name for path in target.iterdir()) == ["m.onnx", "m.onnx.json"]
    place.is_whole()
    assert not list(place.folder.glob(".localattn*"))


@pytest.mark.parametrize("together", [False, True])
def test_a_folder_that_was_replaced_during_the_work_is_not_written_to(together: bool, tmp_path: Path) -> None:
    place = Place(tmp_path, 0o777)
    inner = place.folder / "inner"
    inner.mkdir()
    with (
        pytest.raises(UsageError, match="was replaced during the work"),
        writing(Output(inner / "q.onnx", ONNX)) as work,
    ):
        (work / "q.onnx").write_bytes(b"\x08\x08\x12\x00")
        inner.rename(place.folder / "moved")
        inner.symlink_to(place.private)
        if together:
            publish_together({work / "q.onnx": inner / "q.onnx"}, work)
        else:
            publish(work / "q.onnx", inner / "q.onnx")
    place.is_whole()


def test_a_file_that_is_replaced_at_once_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, 0o777)
    target = place.folder / "x.npz"
    replace = os.replace

    def and_replaced(source: str, name: str, **folders: int) -> None:
        replace(source, name, **folders)
        if name == target.name:
            target.unlink()
            target.symlink_to(place.private / "precious")

    with pytest.raises(UsageError, match="as soon as it was written"), writing(Output(target, NPZ)) as work:
        (work / "x.npz").write_bytes(b"PK")
        monkeypatch.setattr(os, "replace", and_replaced)
        publish(work / "x.npz", target)
    place.is_whole()
