"""Tokenizers from strangers: whatever theirs do to a text ends as one error, at a bounded cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localattn.core.errors import ExitCode, LocalAttnError, MissingDependency, UsageError
from localattn.runtime.generation import tokenizer as module
from localattn.runtime.generation.tokenizer import FolderTokenizer, OpeningTokenizer

from ...support import tokenizer_folder

pytest.importorskip("tokenizers")
Document = dict[str, Any]


def template(pieces: list[Document], special: Document | None = None) -> Document:
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": special or {}}


def replace(pattern: Document, content: str) -> Document:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind: str, steps: list[Document]) -> Document:
    return {"type": "Sequence", kind: steps}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TWICE = replace({"String": "a"}, "aa")
MANY = {"id": "X", "ids": [1] * 20_000, "tokens": ["x"] * 20_000}
PREPEND = {"type": "Prepend", "prepend": "a" * 2_000_000}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
# Entries of a tokenizer.json that a text of 2,000 letters `a` and an end makes cost time or memory, or panics.
HOSTILE: dict[str, Document] = {
    "prepends, then replaces": {"normalizer": sequence("normalizers", [PREPEND, replace({"String": "a"}, "b" * 1000)])},
    "doubles behind a start": {"normalizer": sequence("normalizers", [PREPEND, *[TWICE] * 10, PREPEND, *[TWICE] * 10])},
    "matches the empty text": {"normalizer": sequence("normalizers", [PREPEND, replace({"Regex": ""}, "b" * 1000)])},
    "backtracks": {"normalizer": replace({"Regex": "(a+a+)+y"}, "")},
    "backtracks between words": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a+a+)+y"}}},
    "doubles by templates": {
        "post_processor": sequence("processors", [template([TEXT, TEXT]) for _ in range(40)]),
    },
    "adds a square of tokens": {
        "post_processor": template([{"SpecialToken": {"id": "X", "type_id": 0}}] * 20_000 + [TEXT], {"X": MANY}),
    },
    "has a broken table": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAB6egA="},
    },
}


def written(folder: Path, entries: Document) -> Path:
    tokenizer_folder.write(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


@pytest.mark.parametrize("entries", HOSTILE.values(), ids=HOSTILE)
def test_what_a_text_sets_off_is_one_error(entries: Document, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    found, begin = None, time.monotonic()
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be") as caught:
        found = FolderTokenizer.open(written(tmp_path, entries))
        assert found is not None
        found.encode("a" * 2000 + "!")
    assert caught.value.why and "\n" not in caught.value.why
    assert time.monotonic() - begin < 30
    assert capfd.readouterr() == ("", ""), "neither Rust's word nor Python's"


@pytest.mark.parametrize(("kind", "steps"), [("normalizer", "normalizers"), ("decoder", "decoders")])
def test_replacements_that_say_how_they_grow_are_refused_at_once(kind: str, steps: str, tmp_path: Path) -> None:
    """Forty times twice as long: a text of one letter would take a terabyte."""
    with pytest.raises(UsageError, match="times longer"):
        FolderTokenizer.open(written(tmp_path, {kind: sequence(steps, [TWICE] * 40)}))


def test_a_decoder_is_bounded_too(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 1)
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    steps = [level, {"type": "Fuse"}, *[TWICE] * 10]
    found = FolderTokenizer.open(written(tmp_path, {"decoder": sequence("decoders", steps)}))
    assert found is not None and found.decode([97]) == "a" * 1024
    with pytest.raises(UsageError, match="cannot be used for this text"):
        found.decode([97] * 200_000)
    assert capfd.readouterr() == ("", "")


def test_growth_of_a_real_kind_works(tmp_path: Path) -> None:
    found = FolderTokenizer.open(written(tmp_path, {"normalizer": sequence("normalizers", [TWICE] * 3)}))
    assert found is not None and found.encode("ab", special=False) == [97] * 8 + [98]


def test_time_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 1)
    found = FolderTokenizer.open(written(tmp_path, {"normalizer": sequence("normalizers", [TWICE] * 10)}))
    assert found is not None
    with pytest.raises(UsageError, match="more than 1 seconds"):
        found.encode("a" * 10_000)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limits of this kind")
def test_a_limit_of_this_user_is_a_lack_of_memory(tmp_path: Path) -> None:
    entries = {"normalizer": sequence("normalizers", [PREPEND, replace({"String": "a"}, "b" * 1000)])}
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from localattn.core.errors import MissingDependency\n"
        "from localattn.runtime.generation.tokenizer import FolderTokenizer\n"
        "resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))\n"
        f"found = FolderTokenizer.open(Path({str(written(tmp_path, entries))!r}))\n"
        "try: found.encode('a')\n"
        "except MissingDependency as error: print(error.exit_code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"{ExitCode.MISSING.value} There is not enough memory"), done


def test_a_text_that_is_none_and_names_that_are_none(tmp_path: Path) -> None:
    found = FolderTokenizer.open(written(tmp_path, {}))
    assert found is not None
    with pytest.raises(UsageError, match="no tokens"):
        found.encode("a\ud800")
    with pytest.raises(UsageError, match="cannot be used"):
        found.token("\ud800")
    assert found.name(97) == "a" and found.name(10**6) is None and found.decode([10**6]) == ""
    assert found.encode("still there", special=False) == list(b"still there")


def test_several_threads_take_turns(tmp_path: Path) -> None:
    found = FolderTokenizer.open(written(tmp_path, {}))
    assert found is not None
    wrong: list[str] = []

    def work(number: int) -> None:
        for count in range(40):
            text = f"{number} and {count}"
            if found.decode(found.encode(text)) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="it needs an alarm")
def test_an_interruption_loses_no_reply(tmp_path: Path) -> None:
    """A handler that raises at any moment, as that of Ctrl-C does: the next answer is that to the next question."""
    found = FolderTokenizer.open(written(tmp_path, {}))
    assert found is not None

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for count in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-6 * count)
                found.encode("interrupted")
                time.sleep(1e-3)
            except KeyboardInterrupt:
                interrupted += 1
            assert found.encode(str(count), special=False) == list(str(count).encode())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 20


def test_the_process_ends_with_the_tokenizer(tmp_path: Path) -> None:
    found = FolderTokenizer.open(written(tmp_path, {}))
    assert found is not None
    process = found._process._process
    assert process.poll() is None
    del found
    assert process.poll() is not None
    opening = OpeningTokenizer.start(tmp_path)
    assert opening is not None and opening.wait().size == 260


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it needs fork")
def test_a_copy_of_this_process_is_refused(tmp_path: Path) -> None:
    found = FolderTokenizer.open(written(tmp_path, {}))
    assert found is not None
    child = os.fork()
    if child == 0:
        try:
            found.encode("a")
        except UsageError as error:
            os._exit(7 if "another process" in str(error) else 8)
        except BaseException:
            os._exit(9)
        os._exit(10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert found.encode("a", special=False) == [97]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.replace(b'"BPE"', b'"XPE"'),
        lambda raw: b"[" * 100_000,
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"\xff" + raw,
        lambda raw: raw.replace(b'"id":256', b'"id":99999999999'),
        lambda raw: b"null",
    ],
)
def test_files_that_are_no_tokenizer(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = written(tmp_path, {}) / "tokenizer.json"
    path.write_bytes(change(path.read_bytes().replace(b" ", b"").replace(b"\n", b"")))
    with pytest.raises(LocalAttnError, match=r"tokenizer\.json") as caught:
        FolderTokenizer.open(tmp_path)
    assert not isinstance(caught.value, MissingDependency)
