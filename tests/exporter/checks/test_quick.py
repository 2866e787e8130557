"""`--checks quick`: what runs, what is left out, and that nothing of that counts as proven."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localattn.core.documents.sidecar import CheckRecord, read_sidecar

from ...conftest import Finished

Command = Callable[..., Finished]
LEFT_OUT = ("window", "linear memory")


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
        **dict.fromkeys(LEFT_OUT, "skipped"),
    }
    assert "1 seeds" in checks["parity"].detail or "1 sets of inputs" in checks["parity"].detail
    for name in LEFT_OUT:
        assert f"✓ {name}" not in ended.out and f"- {name}" in ended.out
        assert "not run, as the quick checks were asked for" in checks[name].detail
    assert not any("window" in stage or "memory" in stage for stage in ended.stages)
    assert localattn("inspect", model, "-o", page).code == 0
    assert "Checked in part" in page.read_text() and "4 of 6 checks passed" in page.read_text()


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
    assert found["parity"] == "passed" and [found[name] for name in LEFT_OUT] == ["skipped"] * 2


def test_a_fault_is_found_as_ever(tiny: Path, localattn: Command) -> None:
    ended = localattn("export", tiny, "-o", tiny.with_name("m.onnx"), "--checks", "quick", "--atol", 0, "--rtol", 0)
    assert ended.code == 1 and "parity" in ended.err and not tiny.with_name("m.onnx").exists()


def test_step_files_have_nothing_to_leave_out(tiny: Path, localattn: Command) -> None:
    ended = localattn("export", tiny, "--mode", "step", "--checks", "quick")
    assert ended.code == 2 and "--checks" in ended.err
