"""An ONNX file is read once, and what was checked is what is opened."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from localattn import load
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.machine import process
from localattn.core.storage.publishing import sealed, sidecar_path
from localattn.onnx_graph import onnx_file
from localattn.onnx_graph.onnx_file import OnnxFile
from localattn.runtime.backends.onnxruntime.session import open_file
from localattn.runtime.backends.tensorrt.builder.source import read_source, stripped
from localattn.runtime.session import find_model

from ..conftest import Finished
from ..support.models.engine_models import small_model

Command = Callable[..., Finished]


def adding(value: float, size: int = 4) -> onnx.ModelProto:
    """x + w, with w a weight that holds `value`."""
    text = f'<ir_version: 10, opset_import: ["" : 20]> g (float[{size}] x) => (float[{size}] y) {{ y = Add(x, w) }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(size, value, np.float32), "w"))
    return model


def first(session: object, size: int = 4) -> float:
    return float(session.run({"x": np.zeros(size, np.float32)})["y"][0])  # type: ignore[attr-defined]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that this process opens, by Python's own account."""
    names: list[str] = []
    watching = [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watching[0] and event == "open":
            names.append(str(arguments[0]))

    sys.addaudithook(hook)
    yield names
    watching[0] = False


@pytest.mark.parametrize("arguments", [["run"], ["inspect"], ["bundle", "-o", "{}/b"]])
def test_a_command_opens_the_file_once(
    arguments: list[str], tmp_path: Path, localattn: Command, opened: list[str]
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small_model().read_bytes())
    sidecar_path(path).write_bytes(sidecar_path(small_model()).read_bytes())
    verb, *options = arguments
    opened.clear()
    finished = localattn(verb, path, *[option.format(tmp_path) for option in options])
    assert finished.code == 0, finished
    # In memory, and so not read by onnxruntime either, whose own reading the hook does not see.
    assert opened.count(str(path)) == 1


def test_parity_and_builds_open_it_once(tmp_path: Path, opened: list[str]) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small_model().read_bytes())
    source = read_source(path)
    assert source.file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    opened.clear()
    read_source(source.file)
    assert stripped(source.file.parse(), ["WindowedAttention"])
    assert find_model(source.file) is source.file and OnnxFile.read(source.file) is source.file
    assert open_file(source.file).run({"tokens": np.zeros((1, 64), np.int64)})
    assert str(path) not in opened


def test_what_was_read_is_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(adding(1), path)
    file = OnnxFile.read(path)
    onnx.save(adding(2), path)
    assert first(open_file(file)) == 1 and first(open_file(path)) == 2
    assert file.sha256 != OnnxFile.read(path).sha256


def test_a_large_file_that_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "IN_MEMORY", 100)
    path, other = tmp_path / "m.onnx", tmp_path / "other.onnx"
    onnx.save(adding(1, 64), path)
    onnx.save(adding(2, 64), other)
    file = OnnxFile.read(path)
    assert file.original is None and file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert file.parse().graph.node[0].op_type == "Add"
    assert first(open_file(file), 64) == 1
    other.replace(path)
    with pytest.raises(CheckFailed, match=r"m\.onnx changed while it was opened"):
        open_file(file)
    # The hash is that of what was read, not of what lies at the path now.
    assert OnnxFile.read(path).sha256 != file.sha256
    assert first(open_file(path), 64) == 2
    file = OnnxFile.read(path)
    onnx.save(adding(2, 64), path)  # in place, before anything was asked of it
    with pytest.raises(CheckFailed, match="changed"):
        open_file(file)


def test_external_data_that_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(adding(1), path, save_as_external_data=True, location="w.data", size_threshold=0)
    file = OnnxFile.read(path)
    file.check()
    (tmp_path / "w.data").write_bytes(np.full(4, 3, np.float32).tobytes())
    with pytest.raises(CheckFailed, match=r"w\.data changed"):
        open_file(file)
    assert first(open_file(path)) == 3


def test_external_data_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    onnx.save(adding(5), tmp_path / "sub/m.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    monkeypatch.chdir(tmp_path)
    assert first(load("sub/m.onnx")) == 5
    monkeypatch.chdir("/")
    assert first(load(tmp_path / "sub/m.onnx")) == 5


def test_a_lean_session_is_opened_again_from_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(adding(1, 64), path)
    session = open_file(path, lean=True)
    session.rest()
    onnx.save(adding(2, 64), path)
    assert first(session, 64) == 1
    monkeypatch.setattr(onnx_file, "IN_MEMORY", 100)
    session = open_file(path, lean=True)
    session.rest()
    onnx.save(adding(3, 64), path)
    with pytest.raises(CheckFailed, match="changed"):
        session.wake()


def test_an_altered_file_is_refused_by_its_one_reading(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(adding(1), path)
    sidecar_path(path).write_text(sealed(json.dumps({"model_sha256": OnnxFile.read(path).sha256})))
    file = OnnxFile.read(path)
    file.check_unchanged()
    onnx.save(adding(2), path)
    file.check_unchanged()  # what was read is what the sidecar says, and is what would be opened
    with pytest.raises(CheckFailed, match=r"m\.onnx is not the file"):
        load(path)


@pytest.mark.parametrize("make", ["pipe", "folder", "nothing", "no name"])
def test_what_is_no_plain_file_is_refused_at_once(make: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    if make == "pipe":
        os.mkfifo(path)
    elif make == "folder":
        path.mkdir()
    elif make == "no name":
        path = tmp_path / "m\0.onnx"
    with pytest.raises(UsageError, match="Cannot read"):
        OnnxFile.read(path)


def grouped(model: bytes, number: int = 100) -> bytes:
    """The model after a group: a field of protobuf that ONNX has not, and that protobuf passes over."""
    tag = []
    for value in ((number << 3) | 3, (number << 3) | 4):
        tag.append(bytes([value & 0x7F | 0x80, value >> 7]))
    inside = b"\x0a\x01x" + tag[0] + tag[1]  # a field with a length, and a group in the group
    return tag[0] + inside + tag[1] + model


def test_a_group_hides_nothing(tmp_path: Path) -> None:
    model = adding(1)
    plain = grouped(model.SerializeToString())
    assert onnx.load_model_from_string(plain).graph == model.graph
    assert OnnxFile.of_bytes(plain).operators == {("", "Add")}
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../secret.bin")
    (tmp_path / "m.onnx").write_bytes(grouped(model.SerializeToString()))
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        load(tmp_path / "m.onnx")
    assert "'../secret.bin', which is not a file in its folder" in caught.value.why


@pytest.mark.parametrize("content", [b"\x23", b"\x24", b"\x23\x2c", b"\x23\x0a\x09", b"\xff" * 30, b""])
def test_what_is_no_model_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError, match="is not an ONNX model"):
        OnnxFile.of_bytes(content).check()


PEAK = """
import resource, sys
import numpy as np
from localattn import load
load({path!r}, "cpu", plugin="none").run({{"x": np.zeros({size}, np.float32)}})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
PLAIN = """
import resource, sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession({path!r}, providers=["CPUExecutionProvider"])
session.run(None, {{"x": np.zeros({size}, np.float32)}})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read as Linux counts it")
@pytest.mark.parametrize("external", [False, True])
def test_a_large_file_is_in_memory_no_more_often_than_onnxruntime_needs(external: bool, tmp_path: Path) -> None:
    size, path = 30_000_000, tmp_path / "m.onnx"  # 120 MB
    onnx.save(adding(1, size), path, save_as_external_data=external, location="w.data")
    peaks = []
    for program in (PEAK, PLAIN):
        command = [sys.executable, "-c", program.format(path=str(path), size=size)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[0] < peaks[1] + 4 * size // 2, peaks


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "localattn")
    return caplog


def test_why_a_provider_was_passed_over_is_logged(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ..runtime.backends.onnxruntime.test_providers import CPU, CUDA, FakeRuntime

    model = adding(1).SerializeToString()
    monkeypatch.setitem(sys.modules, "onnxruntime", FakeRuntime([CUDA, CPU], [CPU], "CUDA failure 35"))
    assert load_bytes(model).provider == "cpu"
    assert any("does not open on cuda: CUDA failure 35" in message for message in log.messages)
    assert any(message.endswith("runs on cpu") for message in log.messages)
    log.clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", FakeRuntime([CPU], [CPU]))
    load_bytes(model)
    assert f"{CUDA} is not in this onnxruntime build" in log.messages


def load_bytes(model: bytes) -> object:
    return open_file(OnnxFile.of_bytes(model))


def test_the_log_is_silent_until_it_is_asked_for(tmp_path: Path, localattn: Command) -> None:
    onnx.save(adding(1), tmp_path / "m.onnx")
    for flags, shown, hidden in (
        ([], "", "runs on cpu"),
        (["-v"], "runs on cpu", "reading "),
        (["-vv"], f"reading {tmp_path / 'm.onnx'}", "Traceback"),
        (["-v", "-v"], "reading ", "Traceback"),
    ):
        finished = localattn("run", tmp_path / "m.onnx", *flags, "--format", "json")
        assert finished.code == 0 and shown in finished.err and hidden not in finished.err, (flags, finished)
        assert json.loads(finished.out)
    code = f"import localattn\nlocalattn.load({str(tmp_path / 'm.onnx')!r})"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == finished.stderr == ""


def test_nothing_of_the_process_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither onnxruntime's logger nor stdout, unless the process is the command line's."""
    from ..runtime.backends.onnxruntime.test_providers import CPU, CUDA, FakeRuntime

    class Watched(FakeRuntime):
        def set_default_logger_severity(self, severity):
            severities.append(severity)

        def open(self, model, options, providers):
            streams.append(sys.stdout)
            return super().open(model, options, providers)

    severities: list[int] = []
    streams: list[object] = []
    monkeypatch.setitem(sys.modules, "onnxruntime", Watched([CUDA, CPU], [CUDA, CPU]))
    monkeypatch.setattr(process, "owned", False)
    assert load_bytes(adding(1).SerializeToString()).provider == "cuda"
    assert severities == [] and streams == [sys.stdout]
    monkeypatch.setattr(process, "owned", True)
    load_bytes(adding(1).SerializeToString())
    assert severities == [4]


def test_what_onnxruntime_prints_of_missing_libraries_is_logged(
    log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from localattn.runtime.backends.onnxruntime.providers import PROVIDERS, load_libraries

    class Runtime:
        pass

    def preload_dlls(cuda: bool = True) -> None:
        print(f"Failed to load libcudnn: {cuda}")

    Runtime.preload_dlls = staticmethod(preload_dlls)
    load_libraries(Runtime, PROVIDERS["cuda"])
    assert capsys.readouterr().out == "" and "Failed to load libcudnn: True" in log.messages
    if hasattr(onnxruntime, "preload_dlls"):
        load_libraries(onnxruntime, PROVIDERS["cuda"])
        assert capsys.readouterr().out == ""
