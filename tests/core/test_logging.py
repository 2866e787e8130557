"""What is logged under `localattn`: nothing by itself, decisions and times under -v, details under -vv."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from localattn.core.progress import Progress, timed_steps
from localattn.runtime import load

from ..conftest import TINY, Finished, save_upstream

Command = Callable[..., Finished]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_upstream(tmp_path_factory.mktemp("log"), "local_attention.LocalTransformer", TINY)


def test_an_export_logs_its_stages(checkpoint: Path, tmp_path: Path, localattn: Command) -> None:
    model = tmp_path / "model.onnx"
    loud = localattn("export", checkpoint, "-o", model, "-v")
    assert loud.code == 0, loud.err
    for line in (
        f"exporter.checkpoint.load: {checkpoint}: 51 tensors",
        f"exporter.checkpoint.open_checkpoint: configuration: {checkpoint.with_suffix('.json')}",
        "exporter.checks.verdict: check parity: passed: max error",
        f"core.storage.publishing: wrote {tmp_path / 'model.onnx.json'}, {model}",
    ):
        assert line in loud.err
    assert re.search(r"exporter\.pipeline: Tracing the model: took \d+\.\d\d s", loud.err)
    assert re.search(r"runtime\.backends\.onnxruntime\.session: \S+model\.onnx runs on cpu", loud.err)
    assert "core.storage.reading: reading" not in loud.err
    silent = localattn("parity", model, "--against", checkpoint, "--seeds", 1)
    assert silent.code == 0 and all(line.startswith(("Note: ", "Warning: ")) for line in silent.err.splitlines()), (
        silent.err
    )

    details = localattn("parity", model, "--against", checkpoint, "--seeds", 1, "-vv")
    assert f"core.storage.reading: reading {checkpoint}" in details.err
    assert "runtime.backends.onnxruntime.session: trying cpu" in details.err
    assert re.search(r"runtime\.parity\.compare: seed 0, logits: max error \S+, equal", details.err)
    assert re.search(r"exporter\.parity: Comparing: seed 0: took \d+\.\d\d s", details.err)


def test_a_candidate_that_does_not_open_says_why(
    checkpoint: Path, tmp_path: Path, localattn: Command, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "half.onnx"
    assert localattn("export", checkpoint, "-o", model, "--dtype", "bf16").code == 0
    with caplog.at_level(logging.INFO, logger="localattn"):
        load(model, "cpu")
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert f"{model} runs on cpu" in text and f"pass half_to_fp32 applied to {model}" in text


def test_steps_are_logged_with_their_time_and_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []

    @timed_steps(logging.getLogger("localattn.test"))
    def work(count: int, progress: Progress = lambda _: None) -> int:
        for number in range(count):
            progress(f"step {number}")
        if count > 2:
            raise ValueError("too many")
        return count

    with caplog.at_level(logging.INFO, logger="localattn.test"):
        assert work(2, shown.append) == 2
        assert work(count=1) == 1
        with pytest.raises(ValueError, match="too many"):
            work(3)
    assert shown == ["step 0", "step 1"]
    found = [re.sub(r"\d+\.\d\d", "T", record.getMessage()) for record in caplog.records]
    assert found == [
        *("step 0: took T s", "step 1: took T s"),
        "step 0: took T s",
        *("step 0: took T s", "step 1: took T s", "step 2: failed after T s"),
    ]


def test_loggers_carry_the_name_of_their_module() -> None:
    root = Path(__file__).resolve().parents[2]
    rooms = ("core", "exporter", "onnx_graph", "plugins", "runtime")
    sources = [path for room in rooms for path in (root / room).rglob("*.py") if "_log = logging" in path.read_text()]
    assert len(sources) > 25
    assert [path for path in sources if "_log = logging.getLogger(__name__)\n" not in path.read_text()] == []
