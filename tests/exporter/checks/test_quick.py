"""`--checks quick`: what runs, what is left out, and that nothing of that counts as proven."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from localattn.core.documents.sidecar import CheckRecord, read_sidecar

from ...conftest import Finished

Command = Callable[..., Finished]
QUICK_SKIPS = ("window", "linear memory")


def written(model: Path) -> dict[str, CheckRecord]:
    """The checks that the sidecar of a file tells of."""
    sidecar = read_sidecar(model)
    assert sidecar is not None
    return {check.name: check for check in sidecar.checks}


_DYNAMIC = pytest.param(("--dynamic", "batch,seq"), marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [(), _DYNAMIC], ids=["static", "dynamic"])
def test_a_checkpoint(options: tuple[str, ...], tiny: Path, localattn: Command) -> None:
    model, page = tiny.with_name("m.onnx"), tiny.with_name("m.md")
    ended = localattn("export", tiny, "-o", model, "--checks", "quick", *options)
    assert ended.code == 0, ended.err
    checks = written(model)
    assert {name: check.status for name, check in checks.items()} == {
        **dict.fromkeys(("onnx checker", "onnxruntime loads", "parity", "no wide integers"), "passed"),
        **dict.fromkeys(QUICK_SKIPS, "skipped"),
    }
    assert ", 1 row of tokens drawn by rank, " in checks["parity"].detail
    for name in QUICK_SKIPS:
        assert f"✓ {name}" not in ended.out and f"- {name}" in ended.out
        assert "not run in the quick checks" in checks[name].detail
    assert not any("window" in stage or "memory" in stage for stage in ended.stages)
    assert localattn("inspect", model, "-o", page).code == 0
    assert "Checked in part" in page.read_text()
    assert "of 6 checks 4 passed, 0 failed, 0 not proven, 2 skipped" in page.read_text()


def test_a_module_of_ones_own(tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "from local_attention import LocalMHA\n\ndef make():\n"
        "    return LocalMHA(dim=16, window_size=4, causal=True, dim_head=8, heads=2)\n"
    )
    ended = localattn(
        *("export", "--factory", "net.py:make", "--input", "x:float32:[1,16,16]", "-o", "net.onnx"),
        *("--checks", "quick", "--format", "json"),
    )
    assert ended.code == 0, ended.err
    found = {check["name"]: check["status"] for check in json.loads(ended.out)["checks"]}
    assert found["parity"] == "passed" and [found[name] for name in QUICK_SKIPS] == ["skipped"] * 2


def test_a_fault_is_found_as_ever(tiny: Path, localattn: Command) -> None:
    ended = localattn("export", tiny, "-o", tiny.with_name("m.onnx"), "--checks", "quick", "--atol", 0, "--rtol", 0)
    assert ended.code == 1 and "parity" in ended.err and not tiny.with_name("m.onnx").exists()


def test_step_files_compare_fewer_positions(tiny: Path, localattn: Command) -> None:
    found = {}
    for checks in ("all", "quick"):
        model = tiny.with_name(f"{checks}.onnx")
        ended = localattn("export", tiny, "--mode", "step", "-o", model, "--checks", checks)
        assert ended.code == 0, ended.err
        parity = written(model)["parity"]
        assert parity.status == "passed" and "past the ring" in parity.detail
        found[checks] = int(re.search(r"(\d+) positions", parity.detail)[1])  # type: ignore[index]
    assert found["quick"] < found["all"]


def test_conversions_compare_one_set_of_inputs(tiny: Path, localattn: Command) -> None:
    model = tiny.with_name("m.onnx")
    assert localattn("export", tiny, "-o", model, "--checks", "quick").code == 0
    found = {}
    for checks in ("all", "quick"):
        plain = tiny.with_name(f"{checks}.onnx")
        ended = localattn("convert", model, "-o", plain, "--standard-ops", "--checks", checks, "--format", "json")
        assert ended.code == 0, ended.err
        found[checks] = {check["name"]: check["detail"] for check in json.loads(ended.out)["files"][0]["checks"]}
    assert "3 comparison" in found["all"]["same as its source"]
    assert "1 comparison" in found["quick"]["same as its source"]
