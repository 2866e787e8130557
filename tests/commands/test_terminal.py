"""On a terminal: the stage of the work, its time and share, and the command to type next; elsewhere a line a stage."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localattn.commands.parts.console import quoted
from localattn.commands.parts.terminal.progress import as_lines, share

from ..conftest import TINY, Finished, save_upstream
from ..support.terminal import Terminal, following

Command = Callable[..., Finished]
QUICK = "--duration 0 --iterations 1 --rounds 2 --warmup 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint whose name a shell would take apart."""
    path = tmp_path_factory.mktemp("models")
    save_upstream(path, "local_attention.LocalTransformer", TINY, "my model [v1].pt")
    return path


@pytest.fixture(scope="module")
def terminal(folder: Path) -> Iterator[Terminal]:
    opened = Terminal(folder)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def exported(terminal: Terminal, folder: Path) -> str:
    """What the terminal showed of an export with quick checks, which wrote m.onnx."""
    code, shown = terminal.run(
        f"localattn export '{folder / 'my model [v1].pt'}' -o {folder / 'm.onnx'} --checks quick"
    )
    assert code == 0, shown
    return shown


def test_each_command_leads_to_the_next(terminal: Terminal, folder: Path) -> None:
    """From a checkpoint to a bundle by pasting; every line works as it was printed."""
    ran = ["localattn inspect 'my model [v1].pt'"]
    while len(ran) < 6:
        code, shown = terminal.run(ran[-1])
        assert code == 0, shown
        ran.append(following(shown))
        if ran[-1].startswith("localattn bench"):
            ran[-1] += f" {QUICK}"
    assert [line.split()[1] for line in ran] == ["inspect", "export", "run", "bench", "bundle", "bundle"]
    assert ran[4] == "localattn bundle 'my model [v1].onnx' -o 'my model [v1].tar'"
    code, shown = terminal.run(ran[-1])
    assert code == 0 and "tar xf 'my model [v1].tar' && python3 " in shown
    assert (folder / "my model [v1].tar").is_file()


def test_what_follows_depends_on_the_outcome(terminal: Terminal, folder: Path, exported: str) -> None:
    checkpoint, model = folder / "my model [v1].pt", folder / "m.onnx"
    assert following(exported) == f"localattn parity {model} --against '{checkpoint}'"
    code, shown = terminal.run(f"{following(exported)} --atol 0 --rtol 0 --seeds 1")
    assert code == 1 and following(shown) == f"localattn bisect {model} --against '{checkpoint}'"
    tried = terminal.run(f"localattn export '{checkpoint}' -o {model} --force --dtype fp16 --dry-run")[1]
    assert following(tried) == f"localattn export '{checkpoint}' -o {model} --force --dtype fp16"
    steps = terminal.run(f"localattn export '{checkpoint}' --mode step -o {folder / 's.onnx'}")[1]
    code, shown = terminal.run(f"{following(steps)} --max-tokens 3")
    assert code == 0 and following(shown) == f"localattn bench {folder / 's.onnx'}"


def test_a_terminal_shows_stage_time_and_share(terminal: Terminal, folder: Path, exported: str) -> None:
    assert re.search(r"0:\d\d:\d\d Tracing the model …", exported)
    measured = terminal.run(f"localattn bench {folder / 'm.onnx'} {QUICK}")[1]
    assert re.search(r"0:\d\d:\d\d Round 2 of 2: .* … 50%", measured)
    silent = terminal.run(f"localattn bench {folder / 'm.onnx'} {QUICK} -q")[1]
    assert "Round" not in silent and "Next:" not in silent


def test_json_and_pipes_have_the_result_alone(terminal: Terminal, folder: Path, exported: str) -> None:
    line = f"localattn run {folder / 'm.onnx'}"
    assert "Next:" in terminal.run(line)[1] and "Next:" not in terminal.run(f"{line} --format json")[1]
    piped = Terminal(folder, piped=True)
    code, out = piped.run(f"localattn parity {folder / 'm.onnx'} --against {folder / 'm.onnx'} --seeds 1")
    assert code == 0 and "Next:" not in out and "Comparing" not in out and "Comparing" in piped.remarks()
    piped.close()


def test_without_a_terminal_there_is_a_line_a_stage(tiny: Path, localattn: Command) -> None:
    ended = localattn("export", tiny, "-o", tiny.with_name("m.onnx"), "--format", "json")
    assert json.loads(ended.out)["checks"]
    assert ended.stages[:3] == ("Loading PyTorch", "Reading the checkpoint", "Tracing the model")
    assert [stage for stage in ended.stages if stage.startswith("Checking: parity")] and ended.stages[-1] == "Writing"
    assert len(set(ended.stages)) == len(ended.stages)
    model = tiny.with_name("m.onnx")
    assert "Next:" not in localattn("inspect", model).out
    assert localattn("parity", model, "--against", model).stages[0] == "Loading m.onnx"
    quiet = localattn("parity", model, "--against", model, "-q")
    assert quiet.code == 0 and quiet.stages == () and quiet.err.startswith("Warning: not proven")


def test_a_counted_stage_has_a_share_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert [share(text) for text in ("Round 1 of 4: a", "Round 3 of 4: a", "Tactics 3/12", "12/12", "Reading")] == [
        *(0, 0.5, 0.25, 1, None)
    ]
    assert share("5/0") is None and share("9/4") is None
    with as_lines() as step:
        for stage in ("Reading", "Round 1 of 3: a.onnx", "Round 2 of 3: a.onnx", "Round 3 of 3: a.onnx", "Writing"):
            step(stage)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("s  ")[1] for line in lines] == ["Reading", "Round 1 of 3: a.onnx", "Writing"]


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh"])
def test_words_are_quoted_for_every_shell(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    words = ["a b.onnx", "tokens:int64:[1,128]", "x=1,128", "=ls.onnx", "it's", "~/m.pt", "m*.pt", "$HOME", "plain.pt"]
    pasted = f"printf '%s\\n' {' '.join(map(quoted, words))}"
    answer = subprocess.run([shell, "-c", pasted], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == words
