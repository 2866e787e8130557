"""`run`, `inspect` and `parity` with engines, as far as a machine without a GPU goes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from localattn.core.documents.sidecar import sidecar_path
from localattn.core.errors import UsageError
from localattn.core.storage.publishing import sealed
from localattn.runtime.backends.engines import BuildRequest
from localattn.runtime.backends.tensorrt.builder.build import build_engine
from localattn.runtime.backends.tensorrt.device import find_device_or_none
from localattn.runtime.backends.tensorrt.library import open_library

from ...conftest import Finished
from ...support.models.engine_models import needs_rtx, small_checkpoint, small_model

no_gpu = pytest.mark.skipif(find_device_or_none() is not None, reason="this machine has a GPU")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the small model for RTX 40, from its function definition."""
    path = tmp_path_factory.mktemp("engine") / "small.engine"
    build_engine(BuildRequest(small_model(), path, "tensorrt-rtx", targets=("rtx40",)))
    return path


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy of that engine that a test may change."""
    for file in (built, sidecar_path(built)):
        shutil.copy(file, tmp_path)
    return tmp_path / built.name


def change(engine: Path, **entries: object) -> None:
    path = sidecar_path(engine)
    path.write_text(sealed(json.dumps({**json.loads(path.read_text()), **entries})))


@needs_rtx
@no_gpu
def test_without_a_driver_nothing_runs(localattn: Callable[..., Finished], engine: Path) -> None:
    for arguments in (("run", engine), ("parity", engine, "--against", small_checkpoint())):
        finished = localattn(*arguments)
        assert finished.code == 3
        assert "No NVIDIA driver is installed" in finished.err
        assert finished.out == ""


@needs_rtx
def test_another_release_is_refused(localattn: Callable[..., Finished], engine: Path) -> None:
    change(engine, library_version="1.6.0.3")
    finished = localattn("run", engine)
    assert finished.code == 2
    assert "1.6.0.3" in finished.err and open_library("tensorrt-rtx").version in finished.err


@needs_rtx
def test_a_changed_engine_is_refused(localattn: Callable[..., Finished], engine: Path) -> None:
    engine.write_bytes(engine.read_bytes()[:-1])
    finished = localattn("run", engine)
    assert finished.code == 1
    assert "not the file that small.engine.json was written for" in finished.err
    report = json.loads(localattn("inspect", engine, "--format", "json").out)
    assert report["unchanged"] is False and "SHA-256 differs" in report["why_closed"]


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="tensorrt is installed")
@needs_rtx
def test_a_missing_library_says_how_to_get_it(localattn: Callable[..., Finished], engine: Path) -> None:
    change(engine, backend="tensorrt", library_version="10.3.0")
    for arguments in (("run", engine), ("build", small_model(), "-o", engine.parent / "new.engine")):
        finished = localattn(*arguments)
        assert finished.code == 3
        assert "tensorrt is not installed" in finished.err
        assert "JetPack" in finished.err and "pip install tensorrt" in finished.err


@needs_rtx
def test_a_process_uses_one_of_the_two_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other one is refused before it is imported; a module of its name is enough to show it."""
    open_library("tensorrt-rtx")
    if find_spec("tensorrt") is None:
        (tmp_path / "tensorrt.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        open_library("tensorrt")
    assert "tensorrt-rtx" in caught.value.why
    with pytest.raises(UsageError, match="no backend"):
        open_library("openvino")


@needs_rtx
@no_gpu
def test_inspect_shows_the_sidecar(localattn: Callable[..., Finished], engine: Path) -> None:
    finished = localattn("inspect", engine)
    assert finished.code == 0
    assert "sm_89" in finished.out and "tokens int64 [1, 64]" in finished.out
    assert "Layers cannot be shown on this machine: No NVIDIA driver" in finished.out
    report = json.loads(localattn("inspect", engine, "--format", "json").out)
    assert report["unchanged"] is True
    assert report["layers"] is None
    assert report["model"]["kwargs"]["num_tokens"] == 23


@needs_rtx
def test_inspect_says_what_would_not_fit(localattn: Callable[..., Finished], engine: Path) -> None:
    plugin = {"kind": "library", "path": "/nowhere/plugin.so", "sha256": "0" * 64, "layers": ["a"]}
    change(engine, plugin=plugin, library_version="1.6.0.3")
    engine.write_bytes(b"another file")
    finished = localattn("inspect", engine)
    assert finished.code == 0
    assert "needs the plugin library plugin.so" in finished.out and "0" * 64 in finished.out
    assert "--plugin-library PATH" in finished.out
    assert "NOT written for this engine" in finished.out


def test_parity_judges_several_files(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    checkpoint = small_checkpoint()
    files = [small_model(), tmp_path / "copy.onnx"]
    shutil.copy(files[0], files[1])
    shutil.copy(sidecar_path(files[0]), sidecar_path(files[1]))
    finished = localattn("parity", *files, "--against", checkpoint, "--seeds", 1)
    assert finished.code == 0
    assert finished.out.count("are equal within") == 2
    strict = localattn(
        "parity", *files, "--against", checkpoint, "--seeds", 1, "--atol", 0, "--rtol", 0, "--format", "json"
    )
    assert strict.code == 1
    report = json.loads(strict.out)
    assert report["passed"] is False
    assert [file["model"] for file in report["files"]] == [str(file) for file in files]
    saved = localattn("parity", *files, "--against", checkpoint, "--save-outputs", tmp_path / "out.npz")
    assert saved.code == 2
