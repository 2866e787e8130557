"""Two processes that write one file, and processes that are asked to end: one wins, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localattn import cli
from localattn.commands.parts.paths import OutputPath

from ..conftest import Finished
from ..robustness.test_outputs import COMMANDS, OUTPUTS, OWN, Parameter, parameters

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="locks and signals of POSIX")

Command = Callable[..., Finished]
HOLD = """
import sys
from pathlib import Path
from localattn.core.storage.files import work_folder
with work_folder(Path(sys.argv[1])) as folder:
    (folder / "half a file").write_bytes(b"half")
    print("ready", flush=True)
    sys.stdin.read()
"""
SAVE = """
import sys
from pathlib import Path
import numpy as np
from localattn.core.errors import UsageError
from localattn.runtime.inputs.arrays import save_arrays
print("ready", flush=True)
sys.stdin.readline()
try:
    save_arrays(Path(sys.argv[1]), {"x": np.full(100_000, int(sys.argv[2]))})
except UsageError as error:
    print(error.what, flush=True)
    sys.exit(2)
"""


def start(*words: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *map(str, words)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Start a process that is writing a file until its input ends."""
    started: list[subprocess.Popen[str]] = []

    def begin(path: Path) -> subprocess.Popen[str]:
        process = start("-c", HOLD, path)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_second_writer_of_any_output_ends_with_an_error(
    hold: Callable[[Path], subprocess.Popen[str]], tmp_path: Path, localattn: Command
) -> None:
    for case in OUTPUTS:
        words, output = case.values
        assert isinstance(words, str) and isinstance(output, Parameter) and isinstance(output.declared, OutputPath)
        suffix = OWN.get(output.declared.kinds[0].name, ("", ".folder"))[1]
        path = tmp_path / f"{words.replace(' ', '-')}{output.name}{suffix}"
        process = hold(path)
        before = names(tmp_path)
        needed = [each for each in parameters(COMMANDS[words]) if each.required and each.name != output.name]
        given = [word for each in needed for word in ([each.flag] if each.flag else []) + ["no-such-file.onnx"]]
        finished = localattn(*words.split(), *given, output.flag, path, "--force")
        assert finished.code == 2 and "is being written by another process" in finished.err, (words, finished)
        assert names(tmp_path) == before
        process.communicate()
        assert names(tmp_path) == [], "no lock is left behind"


@pytest.mark.slow
def test_one_of_two_exports_wins(tiny: Path) -> None:
    output = tiny.with_name("m.onnx")
    racing = [start("-m", "localattn.cli", "export", tiny, "-o", output, "--seq-len", length) for length in (32, 48)]
    ended = [(process, *process.communicate()) for process in racing]
    assert sorted(process.returncode for process, *_ in ended) == [0, 2], ended
    (lost,) = (error for process, _, error in ended if process.returncode == 2)
    assert "is being written by another process" in lost or "exists" in lost
    assert names(tiny.parent) == ["m.onnx", "m.onnx.json", "model.json", "model.pt"]


def test_one_of_many_wins(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    racing = [start("-c", SAVE, path, number) for number in range(6)]
    for process in racing:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in racing:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate() for process in racing]
    assert sorted(process.returncode for process in racing) == [0, 2, 2, 2, 2, 2], said
    import numpy as np

    (winner,) = (number for number, process in enumerate(racing) if process.returncode == 0)
    assert (np.load(path)["x"] == winner).all()
    assert names(tmp_path) == ["x.npz"]


def test_what_a_killed_writer_leaves_is_no_lock(
    hold: Callable[[Path], subprocess.Popen[str]], tiny: Path, localattn: Command
) -> None:
    path = tiny.with_name("report.json")
    for process in [hold(target) for target in (path, tiny.with_name("other.json"))]:
        process.kill()
        process.wait()
    assert len([name for name in names(tiny.parent) if name.startswith(".localattn-")]) == 2
    assert localattn("inspect", tiny, "-o", path).code == 0
    assert names(tiny.parent) == ["model.json", "model.pt", "report.json"]


# The command line, which gets a signal as it begins the first file of its own folder.
ASKED_TO_END = """
import os, signal, sys
from localattn import cli
number = int(sys.argv.pop(1))
signal.signal(number, signal.SIG_DFL)  # pytest may run under nohup
def hook(event, arguments):
    global number
    if number and event == "open" and "/.localattn-" in str(arguments[0]) and arguments[2] & os.O_WRONLY:
        asked, number = number, 0
        os.kill(os.getpid(), asked)
sys.addaudithook(hook)
sys.exit(cli.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_asked_to_end_cleans_up(number: signal.Signals, tiny: Path) -> None:
    before = names(tiny.parent)
    process = start("-c", ASKED_TO_END, int(number), "export", tiny, "-o", tiny.with_name("m.onnx"))
    _, error = process.communicate()
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error
    assert names(tiny.parent) == before


def test_nohup_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "command_line", lambda _: lambda: seen.append(signal.getsignal(signal.SIGHUP)))
    before = signal.getsignal(signal.SIGHUP)
    try:
        for set_before in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, set_before)
            with pytest.raises(SystemExit):
                cli.main()
            assert signal.getsignal(signal.SIGHUP) is set_before
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen[0] is signal.SIG_IGN and seen[1] not in (signal.SIG_IGN, signal.SIG_DFL)
