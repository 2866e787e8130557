"""The page of an engine, as far as a machine without a GPU goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localattn.core.documents.sidecar import sidecar_path
from localattn.core.storage.files import sha256
from localattn.core.storage.publishing import SEAL
from localattn.runtime.backends.engines import BuildRequest
from localattn.runtime.backends.tensorrt.builder.build import build_engine

from ...conftest import Finished
from ...reports.test_report_pages import HOSTILE, assert_harmless, renderings, same_tables
from ...support.browser import assert_fits_a_phone, needs_browser, show
from ...support.models.engine_models import needs_rtx, small_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "small.engine"
    build_engine(BuildRequest(small_model(), path, "tensorrt-rtx", targets=("rtx40",)))
    return path


@needs_rtx
def test_inspect_of_an_engine(engine: Path, localattn: Callable[..., Finished]) -> None:
    document, text, page = renderings(localattn, "inspect", engine)
    rows = same_tables("engine", document, text, page)
    verdict = "Checked in part" if any(check["status"] == "skipped" for check in document["checks"]) else "Checked"
    assert f"**{verdict}**" in text and document["windows"]
    assert ["SHA-256 of the engine", sha256(engine)] in rows
    for check in document["checks"]:
        status = check["status"] if check["status"] == "passed" else check["status"].upper()
        assert [check["name"], status, check["detail"]] in [row[:3] for row in rows]


@needs_rtx
@needs_browser
def test_an_altered_engine_with_markup_in_its_sidecar(
    engine: Path, tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    copy = tmp_path / "copy.engine"
    copy.write_bytes(engine.read_bytes() + b"x")
    sidecar = json.loads(sidecar_path(engine).read_text())
    sidecar |= {"onnx_name": HOSTILE, "device": HOSTILE, "targets": [HOSTILE], "platform": HOSTILE}
    sidecar["checks"] = [{"name": HOSTILE, "status": "not proven", "detail": HOSTILE, "figures": {HOSTILE: 1.0}}]
    sidecar.pop(SEAL, None)
    sidecar_path(copy).write_text(json.dumps(sidecar))
    _, text, page = renderings(localattn, "inspect", copy)
    assert_harmless(page, text)
    assert "**Do not use**" in text and "NOT written for this engine" in text
    assert_fits_a_phone(show(tmp_path, page, dark=False), dark=False)
