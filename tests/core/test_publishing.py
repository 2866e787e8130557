"""What an interrupted write leaves is finished by the next write of that file, and by nothing and nobody else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from localattn.core.documents.engine_sidecar import read_engine_sidecar
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, LocalAttnError, UsageError
from localattn.core.storage.file_kinds import ENGINE, LIBRARY, NPZ, ONNX
from localattn.core.storage.files import MARK, publish, sha256
from localattn.core.storage.library_store import CPU_KERNELS, kind_of, read_library_sidecar
from localattn.core.storage.outputs import Output, writing
from localattn.core.storage.publishing import check_unchanged, publish_together, sealed, sidecar_path
from localattn.onnx_graph.summary import inspect_onnx
from localattn.runtime.generation.step_session import open_step
from localattn.runtime.parity.runner import open_runner
from localattn.runtime.session import load

from ..conftest import Finished

pytestmark = pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="folders of POSIX")

MODEL = b"\x08\x08\x12\x00"  # the beginning of an ONNX file
READERS: dict[str, Callable[[Path], object]] = {
    "session": lambda path: load(path, "cpu", 1),
    "inspect": inspect_onnx,
    "step session": lambda path: open_step(path, "cpu", 1),
    "parity": lambda path: open_runner(path, "cpu", "none"),
    "engine sidecar": read_engine_sidecar,
    "sidecar": read_sidecar,
    "check_unchanged": check_unchanged,
    "library sidecar": lambda path: read_library_sidecar(CPU_KERNELS, path),
    "library kind": kind_of,
}


@pytest.mark.parametrize(
    ("content", "overwrite"), [(b"PK\x03\x04 a checkpoint", False), (b"PK\x03\x04 a checkpoint", True), (MODEL, False)]
)
def test_what_appears_during_the_work_stays(tmp_path: Path, content: bytes, overwrite: bool) -> None:
    main = tmp_path / "m.onnx"
    with pytest.raises(UsageError), writing(Output(main, ONNX), overwrite=overwrite) as work:
        (work / main.name).write_bytes(MODEL)
        main.write_bytes(content)
        publish_together({work / main.name: main}, work)
    assert tree(tmp_path) == {"m.onnx": content}
    other = tmp_path / "x.npz"
    with pytest.raises(UsageError), writing(Output(other, NPZ), overwrite=overwrite) as work:
        (work / other.name).write_bytes(b"PK")
        other.write_bytes(b"notes")
        publish(work / other.name, other)
    assert tree(tmp_path) == {"m.onnx": content, "x.npz": b"notes"}


def tree(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder, and every link, by its path."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def batch_of(main: Path) -> Path:
    return main.with_name(f".localattn.next.{main.name}")


def left(folder: Path, main: Path) -> None:
    """Make of finished files what a write leaves that is killed before it has moved them."""
    folder.rename(batch_of(main))
    (batch_of(main) / MARK).touch()


def write(main: Path, content: bytes = MODEL, overwrite: bool = True) -> None:
    """Write a model, weights and a sidecar, all of one content."""
    with writing(Output(main, ONNX), overwrite=overwrite) as work:
        files = {}
        for name, bytes_ in ((f"{main.name}.data", content), (main.name, content)):
            (work / name).write_bytes(bytes_)
        data = f"{main.name}.{sha256(work / f'{main.name}.data')[:12]}.data"
        sidecar = work / "sidecar"
        sidecar.write_text(
            sealed(json.dumps({"format": "localattn-sidecar", "model_sha256": sha256(work / main.name)}))
        )
        files[work / f"{main.name}.data"] = main.with_name(data)
        files[sidecar] = sidecar_path(main)
        files[work / main.name] = main
        publish_together(files, work)


# --- attacks: a folder from elsewhere that looks like an interrupted write --------------------------------------------


@pytest.fixture(params=["x.onnx", "x.engine", "x.so"])
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file in a downloaded folder whose names would move foreign files: links out of it, and names in it."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "id").write_text("KEY")
    place = tmp_path / "downloaded"
    place.mkdir()
    main = place / request.param
    main.write_bytes(MODEL)
    (place / "thesis.txt").write_text("mine")
    (place / f".localattn.next.{main.name}").symlink_to("../private")
    (place / ".localattn.next.z").symlink_to("../private")
    (place / ".localattn.next.y").mkdir()
    (place / ".localattn.next.y" / "thesis.txt").write_text("evil")
    (place / f".localattn-{0:016x}").symlink_to("../private")
    return main


@pytest.mark.parametrize("reader", READERS)
def test_reading_moves_nothing(reader: str, hostile: Path) -> None:
    before = tree(hostile.parents[1])
    for path in (hostile, hostile.with_name("missing" + hostile.suffix)):
        with contextlib.suppress(LocalAttnError, OSError):
            READERS[reader](path)
        assert tree(hostile.parents[1]) == before


@pytest.mark.parametrize("reader", READERS)
def test_reading_moves_not_even_what_an_interrupted_write_left(reader: str, tmp_path: Path) -> None:
    main = tmp_path / "x.onnx"
    write(main)
    batch_of(main).mkdir()
    sidecar_path(main).rename(batch_of(main) / "x.onnx.json")
    before = tree(tmp_path)
    with contextlib.suppress(LocalAttnError):
        READERS[reader](main)
    assert tree(tmp_path) == before


def test_inspecting_a_downloaded_model_moves_nothing(hostile: Path, localattn: Callable[..., Finished]) -> None:
    before = tree(hostile.parents[1])
    localattn("inspect", hostile)
    localattn("run", hostile)
    assert tree(hostile.parents[1]) == before


def test_writing_follows_no_link_and_takes_no_foreign_folder(hostile: Path) -> None:
    kind = {".onnx": ONNX, ".engine": ENGINE, ".so": LIBRARY}[hostile.suffix]
    if kind is not ONNX:
        hostile.write_bytes(b"\x7fELF" if kind is LIBRARY else bytes(range(256)))
    before = tree(hostile.parents[1])
    with (
        pytest.raises(UsageError, match="is in the way"),
        writing(Output(hostile, kind), overwrite=True),
    ):
        pytest.fail("the work has begun")
    assert tree(hostile.parents[1]) == before
    batch_of(hostile).unlink()
    with writing(Output(hostile, kind), overwrite=True) as work:
        (work / "new").write_bytes(b"new")
        publish_together({work / "new": hostile}, work)
    after = tree(hostile.parents[1])
    assert after.pop(f"downloaded/{hostile.name}") == b"new"
    del before[f"downloaded/{hostile.name}"], before[f"downloaded/.localattn.next.{hostile.name}"]
    assert after == before


def another_name(batch: Path) -> None:
    (batch / "thesis.txt").write_text("evil")


def a_link(batch: Path) -> None:
    (batch / "x.onnx.json").symlink_to("../../private")


def a_folder(batch: Path) -> None:
    (batch / "x.onnx.json").mkdir()


def a_pipe(batch: Path) -> None:
    os.mkfifo(batch / "x.onnx")


def weights_of_another_digest(batch: Path) -> None:
    (batch / "x.onnx.0123456789ab.data").write_bytes(b"evil")


def weights_of_another_model(batch: Path) -> None:
    file = batch / "weights"
    file.write_bytes(b"evil")
    file.rename(batch / f"other.onnx.{sha256(file)[:12]}.data")


def another_user(batch: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    (batch / "x.onnx").write_bytes(MODEL)
    os.chown(batch, 12345, 12345)


def a_file_of_another_user(batch: Path) -> None:
    another_user(batch)
    os.chown(batch, 0, 0)
    os.chown(batch / "x.onnx", 12345, 12345)


@pytest.mark.parametrize(
    "plant",
    [
        *(another_name, a_link, a_folder, a_pipe, weights_of_another_digest, weights_of_another_model),
        *(another_user, a_file_of_another_user),
    ],
)
def test_a_folder_with_anything_foreign_stays_as_it_is(plant: Callable[[Path], None], tmp_path: Path) -> None:
    main = tmp_path / "place" / "x.onnx"
    main.parent.mkdir()
    write(main)
    (main.with_name("thesis.txt")).write_text("mine")
    batch_of(main).mkdir()
    plant(batch_of(main))
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="is in the way") as raised:
        write(main)
    assert str(batch_of(main)) in raised.value.what and raised.value.fix
    assert tree(tmp_path) == before


def test_temporary_folders_of_others_stay(tmp_path: Path) -> None:
    """Names that this package never gives, and folders of another user."""
    (tmp_path / ".localattn-notes").mkdir()
    (tmp_path / ".localattn-notes" / "diary").write_text("mine")
    given = tmp_path / f".localattn-{0:016x}"
    if os.geteuid() == 0:
        given.mkdir()
        (given / "file").write_text("theirs")
        os.chown(given, 12345, 12345)
    before = tree(tmp_path)
    write(tmp_path / "x.onnx")
    assert before.items() <= tree(tmp_path).items()


def test_a_planted_link_in_place_of_the_temporary_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "id").write_text("KEY")
    place = tmp_path / "place"
    place.mkdir()
    with writing(Output(place / "x.onnx", ONNX)) as work:
        name = work.name
    (place / name).symlink_to("../private")
    with pytest.raises(UsageError, match="is not your folder") as raised:
        write(place / "x.onnx")
    assert name in raised.value.why
    assert tree(tmp_path) == {"private/id": b"KEY", f"place/{name}": "../private"}


def test_a_folder_of_the_users_that_was_given_the_name_stays(tmp_path: Path) -> None:
    """Its files are called as those of a write would be; but it lacks the mark, which only the user can have put there.

    Who can write to the folder above can rename it, whatever its own mode is.
    """
    main, own = tmp_path / "x.onnx", tmp_path / "own"
    own.mkdir()
    write(own / "x.onnx", MODEL + b"precious")
    for name in (batch_of(main).name, f".localattn-{0:016x}"):
        own = own.rename(tmp_path / name)
        before = tree(own)
        if name.startswith(".localattn.next"):
            with pytest.raises(UsageError, match="is in the way"):
                write(main)
        else:
            write(main)
        assert tree(own) == before
    with writing(Output(tmp_path / "y.onnx", ONNX)) as work:
        name = work.name
    own = own.rename(tmp_path / name)
    with pytest.raises(UsageError, match="is not your folder"):
        write(tmp_path / "y.onnx")
    assert tree(own) == before


# --- what really was interrupted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_the_next_write_of_that_file_finishes_it(moved: int, tmp_path: Path) -> None:
    main, other = tmp_path / "x.onnx", tmp_path / "other.onnx"
    write(main)
    (tmp_path / "new").mkdir()
    write(tmp_path / "new" / "x.onnx", MODEL + b"new")
    left(tmp_path / "new", main)
    data = next(path.name for path in batch_of(main).glob("*.data"))
    for name in [data, "x.onnx", "x.onnx.json"][:moved]:
        (batch_of(main) / name).replace(tmp_path / name)

    before = tree(tmp_path)
    if moved == 2:  # the newer model beside the older sidecar
        with pytest.raises(CheckFailed, match="was interrupted") as raised:
            check_unchanged(main)
        assert "x.onnx.json is still the old one" in raised.value.why and "`overwrite=True`" in raised.value.fix
    else:
        check_unchanged(main)
    assert tree(tmp_path) == before
    write(other)
    assert batch_of(main).is_dir(), "the write of another file leaves it alone"

    write(main, MODEL + b"newest")
    check_unchanged(main)
    assert main.read_bytes() == MODEL + b"newest"
    assert (tmp_path / data).read_bytes() == MODEL + b"new", "another file may refer to it"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_first_write_that_was_interrupted_is_finished_without_force(tmp_path: Path) -> None:
    main = tmp_path / "x.onnx"
    (tmp_path / "new").mkdir()
    write(tmp_path / "new" / "x.onnx")
    left(tmp_path / "new", main)
    write(main, MODEL + b"again", overwrite=False)
    assert main.read_bytes() == MODEL + b"again" and not batch_of(main).exists()


def test_a_name_that_leaves_no_room_for_more(tmp_path: Path) -> None:
    main = tmp_path / ("n" * 230 + ".onnx")
    with writing(Output(main, ONNX)) as work:
        (work / "new").write_bytes(b"new")
        publish_together({work / "new": main}, work)
    assert tree(tmp_path) == {main.name: b"new"}
