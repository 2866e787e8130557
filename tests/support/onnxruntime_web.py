"""onnxruntime-web from npm, fetched once and kept in pytest's cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def onnxruntime_web(request: pytest.FixtureRequest) -> Path:
    """The folder of npm's package; a test that needs it is skipped where it cannot be had.

    LOCALATTN_TEST_ONNXRUNTIME_WEB names a release (1.30.0), or a folder in which the package lies already.
    """
    wanted = os.environ.get("LOCALATTN_TEST_ONNXRUNTIME_WEB", "1.30.0")
    if Path(wanted).is_dir():
        return Path(wanted)
    assert request.config.cache is not None
    store = request.config.cache.mkdir(f"onnxruntime-web-{wanted}")
    package = store / "node_modules" / "onnxruntime-web"
    if not (package / "dist" / "ort-wasm-simd-threaded.wasm").is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed, and onnxruntime-web comes from it")
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(store)]
        try:
            done = subprocess.run(
                [*command, f"onnxruntime-web@{wanted}"], capture_output=True, text=True, timeout=120, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip("npm does not bring onnxruntime-web within two minutes")
        if done.returncode:
            pytest.skip(f"npm cannot bring onnxruntime-web: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    assert json.loads((package / "package.json").read_text())["version"] == wanted
    return package
