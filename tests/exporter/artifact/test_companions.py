"""Files of a model's folder are copied beside its file, each whole, and none over another."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from localattn.core.errors import UsageError
from localattn.exporter.artifact.companions import copy_companions


@pytest.mark.parametrize("links", [True, False], ids=["", "no hard links"])
def test_they_are_copied_and_never_replace_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    source, folder = tmp_path / "tokenizer.json", tmp_path / "staged"
    source.write_text("{}")
    folder.mkdir()
    output = tmp_path / "out" / "m.onnx"
    output.parent.mkdir()
    (copy,) = copy_companions([source], output, folder)
    assert copy.read_text() == "{}" and copy == tmp_path / "out" / "tokenizer.json"
    copy.write_text("another")
    with pytest.raises(UsageError, match="appeared during the export"):
        copy_companions([source], output, tmp_path)
    assert copy.read_text() == "another"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(Path, "replace", full)
    source, folder = tmp_path / "tokenizer.json", tmp_path / "staged"
    source.write_text("{}")
    folder.mkdir()
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="No space left"):
        copy_companions([source], tmp_path / "out" / "m.onnx", folder)
    assert not [*(tmp_path / "out").iterdir()]
