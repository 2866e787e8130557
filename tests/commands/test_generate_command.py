"""`localattn generate`: what goes in, what comes out, on a terminal and in a pipe."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from localattn.commands.generate import _read_prompt
from localattn.commands.parts.token_output import printable, writer_for
from localattn.core.documents.sidecar import Sidecar
from localattn.core.errors import UsageError
from localattn.runtime.backends.step_file import step_record
from localattn.runtime.generation.generator import Generator

from ..support.generate_terminal import Terminal, hears_ctrl_c
from ..support.models import step_model

COMMAND = [sys.executable, "-m", "localattn.cli", "generate"]


def greedy(path, prompt, count):
    return [int(t[0]) for t in Generator.open(path, "cpu").generate(list(prompt), count, temperature=0)]


@pytest.fixture
def model(tmp_path):
    return step_model.write(tmp_path)


@pytest.fixture
def words(tmp_path):
    """A model of 23 tokens, which are no bytes."""
    return step_model.write(tmp_path, vocabulary=23)


def run(*arguments, stdin=b""):
    return subprocess.run([*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, check=False)


def test_bytes_go_in_and_come_out(model, tmp_path):
    """Raw bytes in a pipe, whatever they are; the prompt comes from any of its places."""
    prompt = bytes(range(250, 256)) + "π\n".encode()
    (tmp_path / "prompt.bin").write_bytes(prompt)
    wanted = bytes(greedy(model, prompt, 30))
    assert len(set(wanted)) > 1
    common = [model, "--max-tokens", 30, "--temperature", 0]
    piped = run(*common, stdin=prompt)
    assert (piped.returncode, piped.stdout) == (0, wanted)
    assert b"30 tokens" in piped.stderr and b"prompt of 9" in piped.stderr
    filed = run(*common, "--prompt-file", tmp_path / "prompt.bin", "-q", "--echo")
    assert (filed.stdout, filed.stderr) == (prompt + wanted, b"")
    numbered = run(*common, "--prompt-ids", ",".join(map(str, prompt)), "-q")
    assert numbered.stdout == wanted
    spoken = run(*common, "--prompt", "π\n")
    assert spoken.stdout == bytes(greedy(model, "π\n".encode(), 30))


def test_numbers_go_in_and_come_out_where_there_are_no_bytes(words, localattn, tmp_path):
    wanted = greedy(words, [1, 2, 3], 9)
    done = localattn("generate", words, "--prompt-ids", "1,2,3", "--max-tokens", 9, "--temperature", 0)
    assert (done.code, done.out) == (0, ",".join(map(str, wanted)) + "\n")
    (tmp_path / "ids.txt").write_text(" 1, 2\n3\n")
    again = localattn("generate", words, "--prompt-file", tmp_path / "ids.txt", "--max-tokens", 9, "--temperature", 0)
    assert again.out == done.out
    # What came out goes in again.
    longer = localattn(
        "generate", words, "--prompt-ids", "1,2,3," + done.out.strip(), "--max-tokens", 4, "--temperature", 0
    )
    assert longer.out == ",".join(map(str, greedy(words, [1, 2, 3, *wanted], 4))) + "\n"


def test_json_and_several_continuations(words, localattn):
    arguments = ["generate", words, "--prompt-ids", "1,2,3", "--max-tokens", 5, "--seed", 7, "--batch", 3]
    document = json.loads(localattn(*arguments, "--format", "json").out)
    assert document["prompt"] == [1, 2, 3] and document["finish"] == "length" and document["seed"] == 7
    assert document["text"] is None and document["tokens_per_second"] > 0 and document["provider"] == "cpu"
    generator = Generator.open(words)
    for row, tokens in enumerate(document["tokens"]):
        assert tokens == [int(t[0]) for t in generator.generate([1, 2, 3], 5, seed=7, first_row=row)]
    shown = localattn(*arguments).out
    lines = [",".join(map(str, tokens)) for tokens in document["tokens"]]
    assert shown == "".join(f"--- {n} of 3\n{line}\n" for n, line in enumerate(lines, start=1))


def test_continuations_do_not_depend_on_the_batch_of_the_file(tmp_path, localattn):
    documents = []
    for batch in (1, 2, 4):
        (tmp_path / str(batch)).mkdir()
        path = step_model.write(tmp_path / str(batch), batch=batch)
        done = localattn(
            "generate", path, "--prompt", "abc", "--batch", 3, "--max-tokens", 6, "--temperature", 3, "--format", "json"
        )
        documents.append(json.loads(done.out))
    assert documents[0]["tokens"] == documents[1]["tokens"] == documents[2]["tokens"]
    assert documents[0]["text"] == [bytes(row).decode("utf-8", "replace") for row in documents[0]["tokens"]]
    assert len({tuple(row) for row in documents[0]["tokens"]}) == 3


def test_positions_end_by_themselves_or_with_an_error(tmp_path, localattn):
    path = step_model.write(tmp_path, max_positions=12)
    for asked in ([], ["--max-tokens", -1]):
        done = localattn("generate", path, "--prompt", "abcd", "--format", "json", *asked)
        document = json.loads(done.out)
        assert done.code == 0 and len(document["tokens"][0]) == 9 and document["finish"] == "positions"
    done = localattn("generate", path, "--prompt", "abcd", "--max-tokens", 10)
    assert done.code == 2 and done.out == "" and "Generate at most 9" in done.err
    done = localattn("generate", path, "--prompt", "abcdefghijklmnop")
    assert done.code == 2 and "after a prompt of 16" in done.err and "12 positions" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt and --prompt-ids were given"),
        (["--prompt", "a"], "does not read bytes"),
        (["--prompt-ids", "1,x"], "'x' is not a token"),
        (["--prompt-ids", "1,-2"], "'-2' is not a token"),
        (["--prompt-ids", ""], "cannot be consumed"),
        (["--prompt-ids", "99"], "outside the vocabulary"),
        (["--prompt-file", "no/such/file"], "Cannot read no/such/file"),
        (["--prompt-ids", "1", "--top-p", "0"], "--top-p is 0"),
        (["--prompt-ids", "1", "--provider", "abacus"], "no provider 'abacus'"),
    ],
)
def test_wrong_input_is_said_and_ends_with_2(words, localattn, arguments, says):
    done = localattn("generate", words, *arguments)
    assert done.code == 2 and done.out == "" and says in done.err


def test_a_prefill_file_left_behind_is_told(words, localattn):
    (words.parent / "model_step.prefill.onnx").unlink()
    done = localattn("generate", words, "--prompt-ids", "1", "--max-tokens", 1)
    assert done.code == 0 and "model_step.prefill.onnx is missing in the folder of model_step.onnx" in done.err


@pytest.fixture
def terminal():
    opened = []

    def open_terminal(*arguments):
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_a_terminal_gets_text_and_no_control_characters(model, terminal):
    bytes_ = bytes(greedy(model, b"abc", 60))
    wanted = printable(bytes_.decode("utf-8", "replace"))
    shown = terminal(model, "--prompt", "abc", "--max-tokens", 60, "--temperature", 0, "-q").read_until(lambda s: False)
    assert shown.decode().replace("\r\n", "\n") == wanted + "\n"


def test_on_a_terminal_a_prompt_is_needed(model, terminal):
    opened = terminal(model)
    assert opened.process.wait(60) == 2
    assert b"The prompt is missing" in opened.process.stderr.read()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_ends_cleanly(model, terminal):
    """What came stays, one line says how much, no traceback, exit code 130."""
    opened = terminal(model, "--prompt", "abc", "--max-tokens", -1)
    opened.read_until(lambda shown: len(shown) > 200)
    opened.process.send_signal(signal.SIGINT)
    shown = opened.read_until(lambda s: False)
    assert opened.process.wait(60) == 130
    assert shown.endswith(b"\r\n")
    error = opened.process.stderr.read().decode()
    assert "interrupted" in error and len(error.splitlines()) == 1


def test_ctrl_c_with_json_still_gives_json(model):
    process = subprocess.Popen(
        [*COMMAND, str(model), "--prompt", "abc", "--max-tokens", "-1", "--format", "json", "-v"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears_ctrl_c,
    )  # fmt: skip
    while (line := process.stderr.readline()) and b"runs on cpu" not in line:
        pass
    opened = _seconds_worked(process.pid)
    while process.poll() is None and _seconds_worked(process.pid) < opened + 1:  # it has begun to write
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["finish"] == "interrupted"
    wanted = [int(t[0]) for t in Generator.open(model, "cpu").generate(list(b"abc"), len(document["tokens"][0]))]
    assert document["tokens"] == [wanted]


def _seconds_worked(pid):
    """Of processor time, which another process does not lengthen."""
    ticks = 0
    for number in (pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):  # the command works in a child
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_reader_that_leaves_ends_it(model):
    script = f"{' '.join(COMMAND)} {model} --prompt abc --max-tokens -1 -q | head -c 50 | wc -c"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "50" and done.stderr == ""


def test_printable_keeps_text_and_its_lines():
    assert printable("a\tb\nπ\x1b[31m\r\x07\x7f\x9b") == "a\tb\nπ�[31m����"
    assert np.array_equal(printable("é𝄞"), "é𝄞")
    marks = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    assert all(printable(f"a{chr(mark)}b") == "a�b" for mark in marks), "they turn what follows around"
    assert printable("👩\u200d💻 नि\u200cक") == "👩\u200d💻 नि\u200cक", "joiners are part of the text"


def test_a_stdout_or_stdin_of_text_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program captures it, as `contextlib.redirect_stdout` does."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    writer = writer_for(bytes_model=True)
    for token in "dé\n".encode():
        writer.write(token)
    writer.end()
    assert sys.stdout.getvalue() == "dé\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("dé"))
    assert _read_prompt(256, None, None, None) == list("dé".encode())


def test_no_step_file_is_advised_where_none_can_be_made() -> None:
    window = {"name": "a", "op_type": "WindowedAttention", "window_size": 4, "look_backward": 1, "look_forward": 1}
    entries = {"class": "transformers.X", "kwargs": {}, "inputs": [], "outputs": [], "seq_len": 8, "batch": 1}
    entries |= {"dtype": "fp32", "opset": 20, "function_body": True, "checkpoint_sha256": "", "checkpoint_name": "m"}
    entries |= {"model_sha256": "", "created": ""}
    for causal, said in ((True, "export m --mode step"), (False, "is not causal")):
        windows = [{**window, "causal": causal, "exact_windowsize": True}]
        with pytest.raises(UsageError) as refused:
            step_record(Sidecar(**entries, windows=windows))
        assert said in refused.value.fix
