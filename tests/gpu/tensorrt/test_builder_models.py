"""Engines of whole trained models for RTX 30, 40 and 50, built without a GPU: with the plugin library and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localattn.core.documents.engine_sidecar import read_engine_sidecar
from localattn.demo import checkpoint_path, config_path
from localattn.exporter.export import ExportRequest, export
from localattn.runtime.backends.tensorrt.device import find_device_or_none

from ...conftest import Finished
from ...support.models.engine_models import REAL, needs_plugin_tools, needs_rtx

pytestmark = needs_rtx


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's model in fp32 and, where it is at hand, the larger trained one in fp16."""
    folder = tmp_path_factory.mktemp("models")
    made = {"demo": folder / "demo.onnx"}
    export(ExportRequest(checkpoint_path(), made["demo"], config=config_path()))
    if REAL.is_file():
        made["trained"] = folder / "trained.onnx"
        export(ExportRequest(REAL, made["trained"], dtype="fp16"))
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where plugin libraries of these tests go."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plugin", [pytest.param("library", marks=needs_plugin_tools), "none"], ids=["plugin library", "function definition"]
)
@pytest.mark.parametrize(("name", "dtype"), [("demo", "fp32"), ("trained", "fp16")])
def test_it_builds_for_rtx_30_40_and_50(
    localattn: Callable[..., Finished],
    monkeypatch: pytest.MonkeyPatch,
    models: dict[str, Path],
    cache: Path,
    tmp_path: Path,
    name: str,
    dtype: str,
    plugin: str,
) -> None:
    if name not in models:
        pytest.skip(f"{REAL.name} is not at hand")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    output = tmp_path / "model.engine"
    options = ("--backend", "tensorrt-rtx", "--target", "rtx30,rtx40,rtx50", "--plugin", plugin, "--format", "json")
    finished = localattn("build", models[name], "-o", output, *options)
    assert finished.code == 0, finished.err
    sidecar = read_engine_sidecar(output)
    assert json.loads(finished.out)["engine_sha256"] == sidecar.engine_sha256
    assert (sidecar.dtype, sidecar.targets) == (dtype, ["sm_86", "sm_89", "sm_120"])
    assert sidecar.model is not None
    windows = len(sidecar.model.windows)
    assert windows >= 3
    assert sidecar.checks[0].figures == {"plugins": windows if plugin == "library" else 0}
    layers = [] if sidecar.plugin is None else sidecar.plugin.layers
    assert len(layers) == (windows if plugin == "library" else 0)
    without_gpu = ("engine inspector", "parity")
    judged = {check.status for check in sidecar.checks if check.name not in without_gpu}
    assert judged == {"passed"}
    if find_device_or_none() is None:
        refused = localattn("run", output)
        assert (refused.code, "driver" in refused.err) == (3, True)
