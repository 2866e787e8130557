"""`passed`, the truth of a report, JSON and the exit code agree, whatever the command and whatever the outcome."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import localattn as package
from localattn.core.documents.report import SIGNS, Report, count_outcomes, outcomes_text
from localattn.core.documents.sidecar import CheckRecord
from localattn.core.storage.files import sha256
from localattn.exporter.bisect.bisect import run_bisect
from localattn.exporter.bisect.request import BisectRequest
from localattn.exporter.jobs.convert import to_standard_ops
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.verify import verify_bundle

from ..conftest import Finished

Command = Callable[..., Finished]


@pytest.fixture
def exported(tiny: Path, localattn: Command) -> Path:
    """A good file."""
    model = tiny.with_name("m.onnx")
    ended = localattn("export", tiny, "-o", model, "--checks", "quick", "--format", "json")
    agrees(ended, True)
    return model


@pytest.fixture
def broken(exported: Path) -> Path:
    """The same file with another weight."""
    model = onnx.load(exported)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = onnx.numpy_helper.to_array(weight).copy()
    weight.CopyFrom(onnx.numpy_helper.from_array(values * np.float32(1.5), weight.name))
    onnx.save(model, exported.with_name("broken.onnx"))
    return exported.with_name("broken.onnx")


def agrees(ended: Finished, passed: bool) -> None:
    document = json.loads(ended.out)
    assert document["passed"] is passed and ended.code == (0 if passed else 1), ended
    for checks in [document["checks"]] if "checks" in document else []:
        assert document["outcomes"] == count_outcomes(check["status"] for check in checks)
        assert passed == (document["outcomes"]["failed"] == 0)


def test_parity_and_bisect(exported: Path, broken: Path, tiny: Path, localattn: Command) -> None:
    for model, good in ((exported, True), (broken, False)):
        report = package.parity(model, tiny)
        assert bool(report) is report.passed is good
        agrees(localattn("parity", model, "--against", tiny, "--format", "json"), good)
        shown = localattn("parity", model, "--against", tiny)
        assert outcomes_text(check.status for check in report.checks) in shown.out and shown.code == (0 if good else 1)
        found = run_bisect(BisectRequest(model=model, checkpoint=tiny))
        assert bool(found) is found.passed is good
        agrees(localattn("bisect", model, "--against", tiny, "--format", "json"), good)
    with pytest.raises(AssertionError):
        assert package.parity(broken, tiny)
    both = localattn("parity", exported, broken, "--against", tiny, "--format", "json")
    assert json.loads(both.out)["passed"] is False and both.code == 1


def test_convert_and_bundle(exported: Path, tmp_path: Path, localattn: Command) -> None:
    agrees(localattn("convert", exported, "-o", tmp_path / "p.onnx", "--standard-ops", "--format", "json"), True)
    assert all(to_standard_ops(exported, tmp_path / "q.onnx", checks="quick"))
    create_bundle(BundleRequest(exported, tmp_path / "b", samples=1))
    assert verify_bundle(tmp_path / "b")
    agrees(localattn("bundle", "verify", tmp_path / "b", "--format", "json"), True)
    (sample,) = (tmp_path / "b/samples").glob("*.outputs.npz")
    text = (tmp_path / "b/manifest.json").read_text()
    entry = next(x for x in json.loads(text)["files"] if x["path"].endswith(sample.name))
    np.savez(sample, **{name: array + 1 for name, array in np.load(sample).items()})
    assert entry["size"] == sample.stat().st_size
    (tmp_path / "b/manifest.json").write_text(text.replace(entry["sha256"], sha256(sample)))
    assert not verify_bundle(tmp_path / "b")
    agrees(localattn("bundle", "verify", tmp_path / "b", "--format", "json"), False)


def test_step_files(tiny: Path, localattn: Command) -> None:
    ended = localattn("export", tiny, "--mode", "step", "--checks", "quick", "--format", "json")
    agrees(ended, True)
    assert json.loads(ended.out)["prefill"]["passed"] is True


def test_demo_says_what_its_export_says(tmp_path: Path, localattn: Command) -> None:
    made = localattn("demo", "-o", tmp_path / "demo", "--rows", "1", "--max-tokens", "0", "--format", "json")
    agrees(made, True)


def test_what_checks_nothing_has_no_verdict(
    exported: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was checked before and what is measured is neither right nor wrong, and has no `passed` to go by."""
    monkeypatch.setattr("localattn.doctor.run_probes.run_probes", lambda probes: [])
    bench = ("bench", exported, "--iterations", "1", "--duration", "0", "--rounds", "1")
    for command in (("inspect", exported), bench, ("doctor",)):
        ended = localattn(*command, "--format", "json")
        document = json.loads(ended.out)
        assert ended.code == 0 and not {"passed", "outcomes"} & set(document), (command, ended)
    sidecar = exported.with_name("m.onnx.json")
    forged = json.loads(sidecar.read_text())
    forged["checks"][0]["status"] = "failed"
    sidecar.write_text(json.dumps(forged))
    shown = localattn("inspect", exported)  # a sidecar has a digest of its own
    assert shown.code == 1 and "was changed" in shown.err and not shown.out


class Made(Report):
    """A report with given outcomes."""

    notes: list[str] = []  # noqa: RUF012

    def __init__(self, *statuses: str) -> None:
        self._checks = [CheckRecord(name="a check", status=x, detail="why") for x in statuses]  # type: ignore[arg-type]

    files: list[Path] = []  # noqa: RUF012

    @property
    def checks(self) -> list[CheckRecord]:
        return self._checks

    def headline(self) -> str:
        return "made"


def test_only_a_failed_check_makes_a_report_false() -> None:
    assert Made() and Made("passed") and Made("not proven", "skipped")
    assert not Made("passed", "failed")
    text = str(Made("passed", "not proven", "not proven", "skipped"))
    assert "1 passed, 0 failed, 2 not proven, 1 skipped" in text and "NOT PROVEN: why" in text
    assert [*SIGNS] == ["passed", "failed", "not proven", "skipped"]
