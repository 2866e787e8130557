"""The command line outlives what libraries do: crashes, aborts, deaf native code, requests to end at any moment."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from localattn import cli
from localattn.commands.parts.console import Stopped
from localattn.commands.supervisor.supervise import GRACE
from localattn.core.errors import UsageError

from ..support.dying_library import dying_library

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the command line is one process here")
COMMAND = [sys.executable, "-m", "localattn.cli"]
WORDS = ("run", "m.onnx", "--plugin-library", "dying.so", "--save-outputs", "out.npz")
ERROR_LINES = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and the library that dies as it is told to."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, str(tmp_path / "m.onnx"))
    (tmp_path / "dying.so").symlink_to(dying_library())
    return tmp_path


def start(folder: Path, death: str = "", *words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "LOCALATTN_TEST_DEATH": death, "TMPDIR": str(folder / "tmp")}
    environment["LOCALATTN_TEST_FOLDER"] = str(folder / "reached")
    environment = {name: value for name, value in environment.items() if value} | options.pop("environment", {})
    (folder / "tmp").mkdir(exist_ok=True)
    limits = options.pop("limits", lambda: None)

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # a test run in the background ignores them
            signal.signal(number, signal.SIG_DFL)
        limits()

    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([*COMMAND, *(words or WORDS)], cwd=folder, env=environment, text=True, preexec_fn=prepare,
                            **streams)  # fmt: skip


def until(what: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def left(folder: Path) -> list[str]:
    """What a command left, besides what was there."""
    return sorted(p.name for p in [*folder.iterdir(), *(folder / "tmp").iterdir()] if p.name not in
                  ("m.onnx", "dying.so", "tmp", "reached"))  # fmt: skip


def children(process: subprocess.Popen[str]) -> list[int]:
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


@pytest.mark.parametrize(
    ("death", "code", "said"),
    [
        ("segv", 2, "SIGSEGV"),
        ("noise", 2, "SIGSEGV"),
        ("abort", 2, "SIGABRT"),
        ("bus", 2, "SIGBUS"),
        ("ill", 2, "SIG"),
        ("fpe", 2, "SIGFPE"),
        ("terminate", 2, "SIGABRT"),
        ("exit", 2, "ended with code 0 without a result"),
        ("exit1", 2, "ended with code 1 without a result"),
        ("killed", 3, "SIGKILL"),
        ("rust_memory", 3, "memory allocation of 16384081920 bytes failed"),
        ("cpu", 3, "processor time"),
    ],
)
def test_a_death_is_one_error(folder: Path, death: str, code: int, said: str) -> None:
    out, error = start(folder, death).communicate(timeout=60)
    lines = error.splitlines()
    assert out == "" and said in error and "m.onnx" in error and "Traceback" not in error
    assert lines[-ERROR_LINES].startswith("Error: "), error
    assert all(line.startswith("| ") for line in lines[:-ERROR_LINES]), error
    assert left(folder) == []
    assert start(folder, death).wait(60) == code


def test_memory_that_a_limit_does_not_give_is_exit_code_3(folder: Path) -> None:
    limits = lambda: resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # noqa: E731
    process = start(folder, "memory", limits=limits)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 3, error
    assert "There is not enough memory" in error and "bad_alloc" in error


def test_details_say_where_it_crashed(folder: Path) -> None:
    _, error = start(folder, "segv", *WORDS, "-v").communicate(timeout=60)
    assert "| Fatal Python error: Segmentation fault" in error
    assert "session.py" in error and error.splitlines()[-ERROR_LINES].startswith("Error: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("death", ["hang", "deaf"])
def test_a_request_ends_it_in_time_even_if_native_code_does_not_answer(
    folder: Path, number: signal.Signals, death: str
) -> None:
    process = start(folder, death)
    until((folder / "reached").exists)
    (child,) = children(process)
    asked = time.monotonic()
    process.send_signal(number)
    out, error = process.communicate(timeout=20)
    assert time.monotonic() - asked < GRACE + 4
    assert process.returncode == 128 + number
    assert (out, error) == ("", "Stopped; nothing was written.\n")
    assert left(folder) == [] and not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize("seconds", [0.4, 0.6, 0.8, 1.0, 1.3, 1.6])
def test_a_request_at_any_moment_leaves_nothing(folder: Path, seconds: float) -> None:
    process = start(folder, "deaf")
    until(lambda: children(process))
    time.sleep(seconds - 0.4)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130, error
    assert error in ("Stopped; nothing was written.\n", "") and left(folder) == []


def test_ctrl_c_is_quiet_from_the_first_import_on(folder: Path) -> None:
    """Sent while the package's first module after the answer to it is imported; nothing has begun."""
    script = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'localattn.core': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.argv = ['/usr/bin/localattn', 'run', 'm.onnx']\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from localattn.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_that_python_drops_is_raised_again(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    """Python drops what is raised in the callback of a weak reference, such as those of its import system."""
    held = {1}
    watched = weakref.ref(held, lambda _: signal.raise_signal(number))
    before = [signal.getsignal(each) for each in (number, signal.SIGALRM)], sys.unraisablehook
    with pytest.raises(Stopped) as ended, cli._unwinding():
        del held
        time.sleep(20)
    assert (ended.value.code, watched()) == (128 + number, None)
    assert ([signal.getsignal(each) for each in (number, signal.SIGALRM)], sys.unraisablehook) == before
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (lambda request: ImportError("Importing numpy failed."), 130, "Stopped; nothing was written."),
        (
            lambda request: chained(UsageError("m.onnx cannot be loaded."), request),
            130,
            "Stopped; nothing was written.",
        ),
        (lambda request: UsageError("m.onnx cannot be written."), 2, "Error: m.onnx cannot be written."),
    ],
    ids=["lost", "chained", "another"],
)
def test_what_interrupted_code_makes_of_a_request_is_no_fault(
    error: Callable[[BaseException], Exception],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As numpy does, whose import in C makes another error of it."""

    def command() -> None:
        caught: BaseException | None = None
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as request:
            caught = request
        assert caught is not None
        raise error(caught)

    monkeypatch.setattr(cli, "command_line", lambda _: command)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert cli._run() == code
    assert capfd.readouterr().err.splitlines()[0] == said


def chained(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def test_a_program_that_imports_the_package_keeps_its_answer_to_ctrl_c() -> None:
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import localattn.cli\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_timeout_ends_it_on_time(folder: Path) -> None:
    started = time.monotonic()
    (folder / "tmp").mkdir()
    environment = {**os.environ, "LOCALATTN_TEST_DEATH": "deaf", "LOCALATTN_TEST_FOLDER": str(folder / "reached")}
    done = subprocess.run(["timeout", "4", *COMMAND, *WORDS], cwd=folder, env=environment, capture_output=True)
    assert done.returncode == 124 and time.monotonic() - started < 4 + GRACE + 1
    assert left(folder) == []


def test_its_own_processes_end_with_it(folder: Path) -> None:
    before = _asleep(b"dying.so", b"localattn.cli")
    assert start(folder, "brood").wait(60) == 2
    until(lambda: _asleep(b"dying.so", b"localattn.cli") <= before, 5)


def test_what_a_candidate_left_ends_with_the_command(folder: Path) -> None:
    """A candidate is a process of its own, whose death `bench` reports by itself."""
    before = _asleep(b"localattn.runtime.bench.worker")
    words = ("bench", "m.onnx", "--rounds", "1", "--iterations", "1", "--plugin-library", "dying.so")
    assert start(folder, "brood", *words).wait(60) == 1
    assert (folder / "reached").exists()
    until(lambda: _asleep(b"localattn.runtime.bench.worker") <= before, 5)


def _asleep(*words: bytes) -> set[str]:
    """The processes whose command line has these words."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if all(word in text for word in words):
            found.add(path.parent.name)
    return found


def test_a_killed_parent_takes_the_child_along(folder: Path) -> None:
    process = start(folder, "deaf")
    until((folder / "reached").exists)
    (child,) = children(process)
    process.kill()
    process.communicate(timeout=20)
    until(lambda: not Path(f"/proc/{child}").exists(), 5)


def test_a_library_cannot_print_what_looks_like_a_result(folder: Path) -> None:
    process = start(folder, "prints")
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "m.onnx ran on cpu" in out
    printed = [line for line in error.splitlines() if line.startswith("| ")]
    assert printed == ["| a name", r"|   \u2713 parity  max error 0", r"| \x1b[2J\u202e"]
    assert "\x1b" not in error and "✓" not in error


def test_a_panic_that_was_answered_is_shown_under_v_only(folder: Path) -> None:
    assert start(folder, "panic").communicate(timeout=60)[1].splitlines()[-1] == "| after it"
    assert "panicked" not in start(folder, "panic", *WORDS[:-2]).communicate(timeout=60)[1]
    assert "panicked" in start(folder, "panic", *WORDS[:-2], "-v").communicate(timeout=60)[1]


def test_one_process_on_request(folder: Path) -> None:
    process = start(folder, "hang", environment={"LOCALATTN_ONE_PROCESS": "1"})
    until((folder / "reached").exists)
    assert children(process) == []
    process.kill()
    process.communicate(timeout=20)
    assert [name for name in left(folder) if not name.startswith(".localattn-")] == []
    assert start(folder, "segv", environment={"LOCALATTN_ONE_PROCESS": "1"}).wait(60) == -signal.SIGSEGV


def test_an_ignored_request_stays_ignored(folder: Path) -> None:
    process = start(folder, "", limits=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    until(lambda: children(process))
    process.send_signal(signal.SIGHUP)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "ran on cpu" in out, error


def test_the_result_stays_and_is_told(folder: Path) -> None:
    """What is written when the request comes counts as written."""
    start(folder).communicate(timeout=60)
    assert sorted(np.load(folder / "out.npz").files) == ["y"]


@pytest.fixture
def terminal(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command as a shell's job, on a terminal of its own."""
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = start(folder, "deaf", limits=own_terminal, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    yield process, master
    process.kill()
    process.wait()
    os.close(master)


def test_ctrl_c_on_a_terminal_ends_it(folder: Path, terminal: tuple[subprocess.Popen[str], int]) -> None:
    process, master = terminal
    until((folder / "reached").exists)
    os.write(master, b"\x03")
    assert process.wait(20) == 130
    shown = os.read(master, 65536)
    assert shown.endswith(b"Stopped; nothing was written.\r\n")
    assert left(folder) == []


def test_ctrl_z_stops_both_and_a_signal_goes_on(folder: Path, terminal: tuple[subprocess.Popen[str], int]) -> None:
    process, _ = terminal
    until((folder / "reached").exists)
    (child,) = children(process)
    group = os.getpgid(child)
    assert group == os.getpgid(process.pid)  # one job, which a shell stops and continues
    os.killpg(group, signal.SIGSTOP)
    until(lambda: {_state(process.pid), _state(child)} == {"T"}, 5)
    os.killpg(group, signal.SIGCONT)
    until(lambda: "T" not in (_state(process.pid), _state(child)), 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143


def _state(number: int) -> str:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]


def test_existing_children_are_spared(folder: Path) -> None:
    """A shell that becomes the command leaves it the processes that it had begun."""
    script = f"sleep 30 & echo $!; exec {' '.join([*COMMAND, *WORDS])}"
    environment = {**os.environ, "LOCALATTN_TEST_DEATH": "segv"}
    done = subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment, stdout=subprocess.PIPE)
    assert done.stdout is not None
    sleeper = int(done.stdout.readline())
    try:
        assert done.wait(60) == 2
        assert _state(sleeper) in "SR"
    finally:
        os.kill(sleeper, signal.SIGTERM)
        done.stdout.close()


def test_what_called_it_goes_on_once(folder: Path) -> None:
    """A program that catches the exit of `main` goes on in the parent alone, with the exit code."""
    script = (
        "import sys; from localattn import cli\n"
        "sys.argv = ['localattn', 'run', 'm.onnx', '--plugin-library', 'dying.so']\n"
        "for _ in range(2):\n"
        "    try: cli.main()\n"
        "    except SystemExit as ended: print('code', ended.code, flush=True)\n"
    )
    environment = {**os.environ, "LOCALATTN_TEST_DEATH": "segv"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "code 2\ncode 2\n"
