"""The advice of a model with external data that onnxruntime does not load is followed, and the model runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from localattn.core.errors import LocalAttnError
from localattn.runtime import load

from ....support.models.engine_models import small_model

TOKENS = {"tokens": np.arange(64).reshape(1, 64) % 23}


def external(path: Path, threshold: int) -> Path:
    """The small model with its weights in a file beside it, "m.data"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.load(small_model()), path, save_as_external_data=True, location="m.data", size_threshold=threshold)
    return path


def runs(path: Path) -> None:
    expected = load(small_model(), "cpu", plugin="none").run(TOKENS)["logits"]
    np.testing.assert_array_equal(load(path, "cpu", plugin="none").run(TOKENS)["logits"], expected)


def moved(folder: Path) -> Callable[[], None]:
    (folder / "m.data").rename(folder / "moved")
    return lambda: shutil.copy(folder / "moved", folder / "m.data") and None


def cut(folder: Path) -> Callable[[], None]:
    whole = (folder / "m.data").read_bytes()
    (folder / "m.data").write_bytes(whole[: len(whole) // 2])
    return lambda: (folder / "m.data").write_bytes(whole) and None


def linked_out(folder: Path) -> Callable[[], None]:
    """The data is a link to another place than the model."""
    place = folder.parent / "elsewhere"
    place.mkdir()
    (folder / "m.data").rename(place / "m.data")
    (folder / "m.data").symlink_to(place / "m.data")

    def copied() -> None:
        (folder / "m.data").unlink()
        shutil.copy(place / "m.data", folder / "m.data")

    return copied


def linked_in_a_circle(folder: Path) -> Callable[[], None]:
    (folder / "m.data").rename(folder / "moved")
    (folder / "m.data").symlink_to(folder / "m.data")

    def copied() -> None:
        (folder / "m.data").unlink()
        shutil.copy(folder / "moved", folder / "m.data")

    return copied


@pytest.mark.parametrize("threshold", [0, 1024])
@pytest.mark.parametrize(
    ("damage", "advice"),
    [
        (moved, "Copy the data file"),
        (cut, "copy it again"),
        (linked_out, "Replace the link by a copy of the file."),
        (linked_in_a_circle, "Replace the link by a copy of the file."),
    ],
)
def test_external_data_that_is_put_right_runs(
    damage: Callable[[Path], Callable[[], None]], advice: str, threshold: int, tmp_path: Path
) -> None:
    path = external(tmp_path / "model" / "m.onnx", threshold)
    runs(path)
    put_right = damage(path.parent)
    with pytest.raises(LocalAttnError) as caught:
        load(path, "cpu", plugin="none")
    assert caught.value.fix and advice in caught.value.fix, str(caught.value)
    put_right()
    runs(path)


@pytest.mark.parametrize("below", ["", "onnx"])
def test_the_cache_of_the_hub_runs(below: str, tmp_path: Path) -> None:
    """Model and data are links to files of other names, in a folder above."""
    source, snapshot = external(tmp_path / "source" / "m.onnx", 0), tmp_path / "snapshots" / "main" / below
    (tmp_path / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    up = "../" * (3 if below else 2)
    for name, blob in (("m.onnx", "0a"), ("m.data", "0b")):
        shutil.move(source.parent / name, tmp_path / "blobs" / blob)
        (snapshot / name).symlink_to(f"{up}blobs/{blob}")
    runs(snapshot / "m.onnx")
