"""Closed, full and narrow standard streams, and no home: each command ends with its own exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from localattn.cli import COMMANDS

from ..conftest import TINY, save_upstream

LOCALATTN = [sys.executable, "-m", "localattn.cli"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS = {
    "ascii": ASCII,
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "missing home": {"HOME": "/nonexistent/home", "XDG_CACHE_HOME": ""},
    "home that cannot be written": {"HOME": "/proc", "XDG_CACHE_HOME": ""},
    "home that is a file": {"HOME": "/etc/passwd", "XDG_CACHE_HOME": ""},
}
# As a shell would say it, and whether stdout can still be written.
STREAMS = {
    "stdout full": (">/dev/full", False),
    "stderr full": ("2>/dev/full", True),
    "both full": (">/dev/full 2>&1", False),
    "stdout closed": (">&-", True),
    "stderr closed": ("2>&-", True),
    "all closed": ("<&- >&- 2>&-", True),
}
# One real call of each command; OUT is a new place. `plugin path` finds no library: exit code 3.
REAL = {
    "export": "export m.pt -o OUT.onnx",
    "parity": "parity m.onnx --against m.onnx --save-outputs OUT.npz",
    "run": "run m.onnx --save-outputs OUT.npz",
    "generate": "generate m_step.onnx --prompt-ids 1,2 --max-tokens 3",
    "bench": "bench m.onnx --duration 0 --iterations 1 --rounds 1 --warmup 0 -o OUT.json",
    "inspect": "inspect m.onnx -o OUT.md",
    "plugin": "plugin list",
    "bundle": "bundle m.onnx -o OUT.tar",
    "bisect": "bisect m.onnx --against m.pt",
    "convert": "convert m.onnx -o OUT.onnx --standard-ops",
    "doctor": "doctor",
    "demo": "demo -o OUT --rows 1 --length 4",
}
SLOW = ("parity", "bench", "bundle", "bisect", "demo")
# Those of the broad matrix; the first two by default.
LIGHT = ["run", "inspect", *(pytest.param(name, marks=pytest.mark.slow) for name in ("parity", "generate", "plugin"))]
LIGHT += [pytest.param(name, marks=pytest.mark.slow) for name in ("bundle", "doctor")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its model and its step file."""
    from localattn.exporter.export import ExportRequest, export

    from ..support.steps import export_steps

    folder = tmp_path_factory.mktemp("exported")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", TINY, "m.pt")
    export(ExportRequest(checkpoint=checkpoint, output=folder / "m.onnx"))
    export_steps(ExportRequest(checkpoint=checkpoint, output=folder / "m_step.onnx"), "step", 1)
    return folder


def call(
    line: str, folder: Path, out: Path, streams: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command from a shell, with its streams as the shell makes them."""
    shell = f'exec "$@" {streams}'
    words = line.replace("OUT", str(out)).split()
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(
        ["sh", "-c", shell, "sh", *LOCALATTN, *words], cwd=folder, env=variables, capture_output=True, timeout=300
    )


def assert_clean(finished: subprocess.CompletedProcess[bytes], code: int) -> None:
    assert finished.returncode == code, finished
    for stream in (finished.stdout, finished.stderr):
        assert b"Traceback" not in stream and b"Exception ignored" not in stream, finished


def assert_written(line: str, out: Path) -> None:
    """What the command wrote is whole."""
    for path in out.parent.glob(f"{out.name}*"):
        if path.suffix == ".onnx":
            onnx.checker.check_model(path)
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    if "OUT." in line:
        suffix = line.split("OUT")[1].split()[0]
        assert out.with_name(out.name + suffix).stat().st_size > 0
    assert not list(out.parent.glob(".localattn-*"))


def test_every_command_is_called() -> None:
    assert set(REAL) | {"build"} == set(COMMANDS)  # an engine needs a GPU, or minutes


@pytest.mark.parametrize("command", COMMANDS)
def test_help_in_an_ascii_locale(tmp_path: Path, command: str) -> None:
    finished = call(f"{command} --help", tmp_path, tmp_path / "out", environment=ASCII)
    assert_clean(finished, 0)
    assert "Usage" in finished.stdout.decode("ascii")


@pytest.mark.parametrize("streams", STREAMS)
def test_help_of_all_on_broken_streams(tmp_path: Path, streams: str) -> None:
    how, fine = STREAMS[streams]
    assert_clean(call("--help", tmp_path, tmp_path / "out", how), 0 if fine else 3)
    assert_clean(call("export --help", tmp_path, tmp_path / "out", how), 0 if fine else 3)


@pytest.mark.parametrize("streams", STREAMS)
def test_errors_on_broken_streams_keep_their_code(tmp_path: Path, streams: str) -> None:
    """Usage, input, and a fault: what cannot be said does not change what it is."""
    for line in ("no-such-command", "inspect none.onnx", "run --no-such-option"):
        assert_clean(call(line, tmp_path, tmp_path / "out", STREAMS[streams][0]), 2)


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in REAL]
)
def test_commands_in_an_ascii_locale(exported: Path, tmp_path: Path, command: str) -> None:
    finished = call(REAL[command], exported, tmp_path / "out", environment=ASCII)
    assert_clean(finished, 0)
    printed = (finished.stdout + finished.stderr).decode("ascii")
    assert "+ parity" in printed or command not in ("export", "demo")
    assert_written(REAL[command], tmp_path / "out")


@pytest.mark.parametrize("environment", [name for name in ENVIRONMENTS if name != "ascii"])
@pytest.mark.parametrize("command", LIGHT)
def test_commands_elsewhere(exported: Path, tmp_path: Path, command: str, environment: str) -> None:
    finished = call(REAL[command], exported, tmp_path / "out", environment=ENVIRONMENTS[environment])
    assert_clean(finished, 0)
    assert_written(REAL[command], tmp_path / "out")


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("command", LIGHT)
def test_commands_on_broken_streams(exported: Path, tmp_path: Path, command: str, streams: str) -> None:
    how, fine = STREAMS[streams]
    finished = call(REAL[command], exported, tmp_path / "out", how)
    assert_clean(finished, 0 if fine else 3)
    if fine or command in ("run", "bundle"):  # they write before they print
        assert_written(REAL[command], tmp_path / "out")
    if streams == "stdout full":
        assert b"No space left on device" in finished.stderr
        assert len(finished.stderr.splitlines()) < 10


@pytest.mark.parametrize("streams", ["stdout full", "all closed"])
def test_an_export_on_broken_streams_is_whole(exported: Path, tmp_path: Path, streams: str) -> None:
    """The file is written before its checks are printed; nothing that is printed gets into it."""
    how, fine = STREAMS[streams]
    assert_clean(call(REAL["export"], exported, tmp_path / "out", how), 0 if fine else 3)
    assert_written(REAL["export"], tmp_path / "out")
    assert (tmp_path / "out.onnx.json").exists()


@pytest.mark.parametrize("streams", STREAMS)
def test_a_fault_survives_broken_streams(tmp_path: Path, streams: str) -> None:
    """Exit code 70, whatever cannot be said; with -v too."""
    program = (
        "import sys; from localattn import cli\n"
        "def fail(*_, **__): raise AssertionError('\\u2713 what nobody expected \\udcff')\n"
        "cli.command_line = fail\n"
        "cli.main()\n"
    )
    for arguments in ("", "-v"):
        finished = subprocess.run(
            ["sh", "-c", f'exec "$@" {STREAMS[streams][0]}', "sh", sys.executable, "-c", program, arguments],
            capture_output=True, env={**os.environ, **ASCII}, timeout=60,
        )  # fmt: skip
        assert finished.returncode == 70, finished


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """Bytes of a name are printed as they are, or spelled out."""
    name = os.fsdecode(b"caf\xe9.onnx")
    finished = call(f"inspect {name}", tmp_path, tmp_path / "out")
    assert_clean(finished, 2)
    for environment in ENVIRONMENTS.values():
        assert_clean(call("inspect café.onnx", tmp_path, tmp_path / "out", environment=environment), 2)


def test_a_reader_that_leaves(exported: Path) -> None:
    """`| head` has seen enough: no error."""
    script = f"{' '.join(LOCALATTN)} doctor 2>err | head -c 1; exit ${{PIPESTATUS[0]}}"
    finished = subprocess.run(["bash", "-c", script], cwd=exported, capture_output=True, timeout=120)
    assert_clean(finished, 0)
    said = (exported / "err").read_bytes()  # the stages of a command may stand there
    assert finished.stdout == b"T" and b"Error" not in said and b"Traceback" not in said
