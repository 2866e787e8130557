"""Files of a model's folder are copied beside its file, each whole, and none over another."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from localattn.core.errors import UsageError
from localattn.core.storage.accompanying_files import ACCOMPANYING_FILES
from localattn.exporter.artifact import accompanying_files
from localattn.exporter.artifact.accompanying_files import check_accompanying_files, copy_accompanying_files


@pytest.mark.parametrize("links", [True, False], ids=["", "no hard links"])
def test_they_are_copied_and_never_replace_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(*names: str, **folders: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    source, folder = tmp_path / "tokenizer.json", tmp_path / "staged"
    source.write_text("{}")
    folder.mkdir()
    output = tmp_path / "out" / "m.onnx"
    output.parent.mkdir()
    (copy,) = copy_accompanying_files([source], output, folder)
    assert copy.read_text() == "{}" and copy == tmp_path / "out" / "tokenizer.json"
    copy.write_text("another")
    with pytest.raises(UsageError, match="appeared during the export"):
        copy_accompanying_files([source], output, tmp_path)
    assert copy.read_text() == "another"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*names: str, **folders: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(os, "replace", full)
    source, folder = tmp_path / "tokenizer.json", tmp_path / "staged"
    source.write_text("{}")
    folder.mkdir()
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="No space left"):
        copy_accompanying_files([source], tmp_path / "out" / "m.onnx", folder)
    assert not [*(tmp_path / "out").iterdir()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with a whole companion of each name."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ACCOMPANYING_FILES:
        (folder / name).write_text('{"a": "ä"}', encoding="utf-8")
    return folder


def exported(model: Path) -> list[Path]:
    """What is copied beside an output."""
    output, staged = model.with_name("out") / "m.onnx", model.with_name("staged")
    output.parent.mkdir()
    staged.mkdir()
    return copy_accompanying_files(check_accompanying_files(model, ACCOMPANYING_FILES, output), output, staged)


def test_all_of_them_are_copied(model: Path) -> None:
    assert {copy.name for copy in exported(model)} == set(ACCOMPANYING_FILES)


@pytest.mark.parametrize("name", ACCOMPANYING_FILES)
@pytest.mark.parametrize("way", ["absolute", "relative", "over a folder", "over blobs"])
def test_none_leaves_the_folder_by_a_link(name: str, way: str, model: Path) -> None:
    secret = model.with_name("secret") / name
    secret.parent.mkdir()
    secret.write_text("{}")
    secret.chmod(0o600)
    place = model / name
    place.unlink()
    if way == "over a folder":
        (model / "inside").symlink_to(secret.parent)
        place.symlink_to(f"inside/{name}")
    elif way == "over blobs":  # looks like a cache of the Hub
        (model.parent / "c/snapshots").mkdir(parents=True)
        (model.parent / "c/blobs").symlink_to(secret.parent)
        model = model.rename(model.parent / "c/snapshots/model")
        (model / name).symlink_to(f"../../blobs/{name}")
    else:
        place.symlink_to(secret if way == "absolute" else f"../secret/{name}")
    output = secret.parents[1] / "m.onnx"
    with pytest.raises(UsageError, match="cannot be copied") as raised:
        check_accompanying_files(model, ACCOMPANYING_FILES, output)
    assert f"It is a link to {secret.resolve()}, outside" in raised.value.why


def test_links_of_a_cache_of_the_hub_are_followed(model: Path) -> None:
    snapshot, blobs = model.parent / "models--o--n/snapshots/abc", model.parent / "models--o--n/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, name in enumerate(ACCOMPANYING_FILES):
        (model / name).rename(blobs / str(index))
        (snapshot / name).symlink_to(f"../../blobs/{index}")
    (model / "config.json").symlink_to(snapshot)  # nothing asks for it there
    (model.parent / "named").symlink_to(snapshot)
    named = model.parent / "named"
    copies = exported(named)
    assert {copy.name for copy in copies} == set(ACCOMPANYING_FILES) and not any(copy.is_symlink() for copy in copies)


def broken(place: Path, how: str, patch: pytest.MonkeyPatch) -> None:
    place.unlink()
    if how == "pipe":
        os.mkfifo(place)
    elif how == "folder":
        place.mkdir()
    elif how == "nowhere":
        place.symlink_to("nowhere")
    elif how == "itself":
        place.symlink_to(place.name)
    elif how == "device":
        place.symlink_to("/dev/zero")
    elif how == "large":
        patch.setattr(accompanying_files, "MAX_BYTES", 100)
        place.write_text(json.dumps("x" * 100))
    elif how == "values":
        patch.setattr(accompanying_files, "_MOST_VALUES", 100)
        place.write_text(json.dumps([[]] * 100))
    else:
        place.write_bytes({"bytes": b'{"a": "\xff"}', "no JSON": b"{", "deep": b"[" * 100_000}[how])


HOW = ["pipe", "folder", "nowhere", "itself", "device", "large", "values", "bytes", "no JSON", "deep"]


@pytest.mark.parametrize("how", HOW)
def test_what_is_none_is_refused_at_once(how: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(model / "tokenizer.json", how, monkeypatch)
    with pytest.raises(UsageError, match=r"tokenizer\.json") as raised:
        check_accompanying_files(model, ACCOMPANYING_FILES, model.with_name("m.onnx"))
    assert raised.value.why and "\n" not in raised.value.why


def test_what_becomes_a_link_after_the_check_is_not_copied(model: Path) -> None:
    output = model.with_name("m.onnx")
    files = check_accompanying_files(model, ["tokenizer.json"], output)
    (model.parent / "secret").write_text("{}")
    files[0].unlink()
    files[0].symlink_to("../secret")
    with pytest.raises(UsageError, match="cannot be copied"):
        copy_accompanying_files(files, output, model.parent)
    assert not (model.parent / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("mode", "foreign_group", "expected"),
    [
        (0o600, False, 0o600),
        (0o640, False, 0o640),
        (0o640, True, 0o600),
        (0o644, True, 0o644),
        (0o604, True, 0o644),
        (0o400, False, 0o600),
        (0o666, False, 0o644),
    ],
)
def test_a_copy_is_no_more_readable_than_the_original(
    mode: int, foreign_group: bool, expected: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if foreign_group and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    source = model / "tokenizer.json"
    if foreign_group:
        os.chown(source, 1234, 1234)
    source.chmod(mode)
    before = os.umask(0o022)
    try:
        (copy,) = (each for each in exported(model) if each.name == source.name)
    finally:
        os.umask(before)
    assert stat.S_IMODE(copy.stat().st_mode) == expected
