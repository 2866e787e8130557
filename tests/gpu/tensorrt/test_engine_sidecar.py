"""The sidecar beside an engine, and what is refused by it before TensorRT sees the engine."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from localattn.core.documents.engine_sidecar import (
    BuildOptions,
    EngineSidecar,
    PluginRecord,
    read_engine_sidecar,
)
from localattn.core.documents.sidecar import sidecar_path
from localattn.core.errors import CheckFailed, MissingDependency, UsageError
from localattn.core.storage.files import sha256
from localattn.core.storage.publishing import check_unchanged
from localattn.core.tensors import TensorSpec
from localattn.runtime.backends.registry import of_file
from localattn.runtime.backends.tensorrt.device import Device, platform_name
from localattn.runtime.backends.tensorrt.open import check_device, check_library
from localattn.runtime.session import load, read_model_sidecar

ORIN = Device("Orin", 87, "12.6")


def written(folder: Path, **changes: Any) -> tuple[Path, EngineSidecar]:
    """A file that is no engine, with a sidecar that describes it."""
    engine = folder / "model.engine"
    engine.write_bytes(b"not a real engine")
    sidecar = EngineSidecar(
        **{
            "backend": "tensorrt-rtx",
            "library_version": "1.7.1.116",
            "targets": ["sm_89"],
            "platform": platform_name(),
            "dtype": "fp32",
            "inputs": [TensorSpec("tokens", "int64", (1, 64))],
            "outputs": [TensorSpec("logits", "float32", (1, 64, 23))],
            "options": BuildOptions(plugin="none"),
            "onnx_name": "model.onnx",
            "onnx_sha256": "0" * 64,
            "engine_sha256": sha256(engine),
            "engine_bytes": engine.stat().st_size,
            "created": "2026-01-01T00:00:00+00:00",
            **changes,
        }
    )
    sidecar_path(engine).write_text(sidecar.to_json())
    return engine, sidecar


def test_a_sidecar_is_read_back(tmp_path: Path) -> None:
    plugin = PluginRecord(kind="library", path="/somewhere/plugin.so", sha256="1" * 64, layers=["attention"])
    engine, sidecar = written(tmp_path, plugin=plugin)
    assert read_engine_sidecar(engine) == sidecar
    assert read_model_sidecar(engine) is None


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt-rtx"])
def test_the_sidecar_tells_which_library_runs_the_engine(library: str, tmp_path: Path) -> None:
    engine, _ = written(tmp_path, backend=library)
    backend = of_file(engine)
    assert backend is not None and (backend.name, backend.built) == (library, True)


def test_unknown_entries_survive(tmp_path: Path) -> None:
    engine, _ = written(tmp_path)
    path = sidecar_path(engine)
    path.write_text(json.dumps({**json.loads(path.read_text()), "from_the_future": 3}))
    assert json.loads(read_engine_sidecar(engine).to_json())["from_the_future"] == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "openvino"}, "backend"),
        ({"targets": []}, "targets"),
        ({"format_version": 2}, "format_version"),
        ({"engine_bytes": 0}, "engine_bytes"),
    ],
)
def test_a_broken_sidecar_names_the_problem(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    engine, _ = written(tmp_path)
    path = sidecar_path(engine)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError) as caught:
        read_engine_sidecar(engine)
    assert named in caught.value.why


def test_an_engine_without_a_sidecar_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("polygraphy", reason="polygraphy is not installed")
    engine, _ = written(tmp_path)
    sidecar_path(engine).unlink()
    with pytest.raises(UsageError) as caught:
        load(engine)
    assert "model.engine.json" in caught.value.what


def test_a_changed_engine_is_refused(tmp_path: Path) -> None:
    engine, _ = written(tmp_path)
    check_unchanged(engine)
    engine.write_bytes(b"NOT a real engine")  # the same size
    with pytest.raises(CheckFailed, match=r"not the file that model\.engine\.json was written for") as caught:
        load(engine)
    assert "localattn build" in caught.value.fix


@pytest.mark.skipif(find_spec("polygraphy") is None, reason="polygraphy is not installed")
@pytest.mark.parametrize(("verify", "hashed"), [(True, 1), (False, 0)])
def test_an_engine_is_hashed_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool, hashed: int
) -> None:
    """Whether it is the file that was built is looked at in one place, before the backend sees it."""
    engine, _ = written(tmp_path, library_version="0.0.0.1")  # which stops the backend short of a GPU
    asked: list[Path] = []
    hashing = sha256  # this module's own name may be replaced below, too

    def counting(path: Path) -> str:
        asked.append(path)
        return hashing(path)

    for module in [
        name for name in sys.modules if name.startswith("localattn.") and name != "localattn.core.storage.files"
    ]:
        if hasattr(sys.modules[module], "sha256"):
            monkeypatch.setattr(sys.modules[module], "sha256", counting)
    with pytest.raises((UsageError, MissingDependency)):
        load(engine, verify=verify)
    assert asked.count(engine) == hashed


def test_verify_false_goes_on_with_a_changed_engine(tmp_path: Path) -> None:
    pytest.importorskip("polygraphy", reason="polygraphy is not installed")
    engine, _ = written(tmp_path, library_version="0.0.0.1")
    engine.write_bytes(b"NOT a real engine")
    with pytest.raises((UsageError, MissingDependency)) as caught:
        load(engine, verify=False)
    assert "SHA-256" not in caught.value.why


def test_another_release_is_refused_with_both_named(tmp_path: Path) -> None:
    engine, sidecar = written(tmp_path)
    check_library(engine, sidecar, "1.7.1.116")
    with pytest.raises(UsageError) as caught:
        check_library(engine, sidecar, "1.7.2.5")
    assert "1.7.1.116" in caught.value.what
    assert "1.7.2.5" in caught.value.why


def test_another_system_is_refused_with_both_named(tmp_path: Path) -> None:
    engine, sidecar = written(tmp_path, platform="plan9-mips")
    with pytest.raises(UsageError) as caught:
        check_library(engine, sidecar, "1.7.1.116")
    assert "plan9-mips" in caught.value.what
    assert platform_name() in caught.value.why


def test_another_gpu_is_refused_with_both_named(tmp_path: Path) -> None:
    engine, sidecar = written(tmp_path, targets=["sm_86", "sm_87"])
    check_device(engine, sidecar, ORIN)
    engine, sidecar = written(tmp_path, targets=["sm_86", "sm_89"], device="NVIDIA L4")
    with pytest.raises(UsageError) as caught:
        check_device(engine, sidecar, ORIN)
    assert "sm_86, sm_89 on NVIDIA L4" in caught.value.what
    assert "Orin (sm_87)" in caught.value.why


@pytest.mark.parametrize(("option", "value"), [("provider", "cpu"), ("threads", 2)])
def test_an_engine_takes_no_cpu_options(tmp_path: Path, option: str, value: Any) -> None:
    pytest.importorskip("polygraphy", reason="polygraphy is not installed")
    engine, _ = written(tmp_path)
    with pytest.raises(UsageError, match=r"model\.engine"):
        load(engine, **{option: value})
