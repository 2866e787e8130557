"""Use the tokenizer in the folder of a step file: text to tokens, and tokens to text one by one.

It is Hugging Face's `tokenizer.json`, read by the package `tokenizers`, in a process of its own with limits of time
and memory (`tokenizer_process.py`): the file is from outside, and says what that package does to a text.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ...core.errors import LocalAttnError, MissingDependency, UsageError
from ...core.storage.reading import read_plain

TOKENIZER = "tokenizer.json"
# The largest known ones, with 262,144 tokens, have 33 MB.
_MOST_BYTES = 128 << 20
# Memory limit of the process: several times the need of a file and a text. A file with 262,144 tokens and 12 MB took
# 230 MB to open, and each further character of a text 90 bytes.
_MEMORY, _FOR_A_BYTE_OF_FILE, _FOR_A_BYTE_OF_TEXT, _MOST_MEMORY = 1 << 30, 24, 256, 8 << 30
# Time limit in seconds, for any request and for the bytes in it. There 12 MB took 2.3 s to open, a text of 1 MB 2.7 s.
_SECONDS, _BYTES_A_SECOND = 10, 100_000
# Bytes that a pipe writes whole or not at all (POSIX says 512, Linux and macOS have more).
_WHOLE = 512
# What a decoder writes for bytes that are not a whole character.
_UNFINISHED = "�"
# A character of UTF-8 has four bytes at most; more tokens without a whole one are no text, and are shown as they are.
_MOST_HELD = 8
_SCRIPT = Path(__file__).with_name("tokenizer_process.py")
_FRAME = struct.Struct("<Q")
_AT_ONCE = 1 << 20
_COPY = "Copy the original again."


class _Process:
    """The process that runs a tokenizer.

    Args:
        path: of the file, for errors.
        raw: its content.

    Raises:
        MissingDependency: no process can be started.
    """

    def __init__(self, path: Path, raw: bytes) -> None:
        self.path, self._lock, self._owner = path, threading.Lock(), os.getpid()
        self._memory = _MEMORY + _FOR_A_BYTE_OF_FILE * len(raw)
        # A file for Rust's message at a crash; a pipe would have to be read.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
        try:
            self._process = subprocess.Popen(
                [sys.executable or "python3", "-I", "-S", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=environment,
            )
        except OSError as error:
            raise MissingDependency(
                f"The process for {path} cannot be started.", why=f"{error.strerror or error}."
            ) from error
        assert self._process.stdout is not None
        self._descriptor = self._process.stdout.fileno()
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            self._poll.register(self._descriptor, select.POLLIN | select.POLLHUP)
        self._unread, self._number, self._interrupted = bytearray(), 0, False
        self._closer = weakref.finalize(self, _end, self._process, self._errors)

    def ask(self, request: str, length: int = 0, **arguments: Any) -> Any:
        """Return the reply to a request.

        Args:
            request: its name.
            length: bytes of the text or file in it.
            arguments: its arguments.

        Raises:
            UsageError: the tokenizer failed, or went beyond its limits.
            MissingDependency: this machine or user has not enough memory, or not the package.
        """
        extra = 0 if request == "open" else _FOR_A_BYTE_OF_TEXT * length  # the file's bytes are counted already
        memory = min(self._memory + extra, max(_MOST_MEMORY, self._memory))
        seconds = _SECONDS + length / _BYTES_A_SECOND
        document = {"ask": request, "memory": memory, "seconds": seconds, **arguments}
        with self._lock:
            self._check_owner()
            reply = self._exchange(document)
        if reply is None:
            raise self._ended(request, memory, seconds)
        if "error" in reply or "memory" in reply:
            raise self._failed(request, reply.get("error") or f"It needs more than {memory >> 20} MiB.")
        return reply

    def begin(self) -> None:
        """Send the paths of packages, and wait until the package `tokenizers` is imported.

        Raises:
            MissingDependency: it is not installed.
        """
        # A module that is set to None here counts as not installed, as in this process.
        hidden = sys.modules.get("tokenizers", True) is None
        with self._lock:
            reply = self._exchange({"path": [] if hidden else [entry for entry in sys.path if entry]})
        if reply is None:
            raise self._ended("open", self._memory, _SECONDS)
        if reply.get("missing"):
            raise MissingDependency(
                f"{self.path} needs the package tokenizers.",
                why="The package turns text into the model's tokens.",
                fix="pip install 'localattn[transformers]', or give numbers with --prompt-ids",
            )

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise UsageError(
                f"{self.path} was opened in another process.",
                why="This process is a fork of that one, and both would read each other's answers.",
                fix="Open the tokenizer again in this process.",
            )

    def _exchange(self, document: Any) -> Any:
        """Send a document and return the reply; None if the process has ended.

        Ctrl-C may come at any moment, and the next request must not get this one's reply: replies have numbers, and a
        request that was sent in part ends the process.
        """
        self._number += 1
        body = json.dumps({**document, "number": self._number}).encode()
        assert self._process.stdin is not None
        try:
            left = memoryview(_FRAME.pack(len(body)) + body)
            while left:
                left = left[self._process.stdin.write(left) :]
        except (OSError, ValueError):  # one end of the pipe is closed
            return None
        except BaseException:
            if len(body) + _FRAME.size > _WHOLE:
                self._interrupted = True
                self._process.kill()
            raise
        while (reply := self._read()) is not None:
            if reply.pop("number") == self._number:
                return reply
        return None

    def _read(self) -> Any:
        """Read a reply; None at the end of the stream."""
        while True:
            (length,) = _FRAME.unpack_from(self._unread) if len(self._unread) >= _FRAME.size else (None,)
            if length is not None and len(self._unread) >= _FRAME.size + length:
                body = bytes(self._unread[_FRAME.size : _FRAME.size + length])
                del self._unread[: _FRAME.size + length]
                return json.loads(body)
            if self._poll is not None:
                self._poll.poll()  # Ctrl-C is harmless here
            try:
                new = os.read(self._descriptor, _AT_ONCE)
            except OSError:
                return None
            if not new:
                return None
            self._unread += new

    def _ended(self, request: str, memory: int, seconds: float) -> LocalAttnError:
        """Return the error for a process that ended: out of memory, out of time, or by a crash."""
        code = self._process.wait()
        if self._interrupted:
            return UsageError(
                f"{self.path} was interrupted.", why="A text was sent only in part.", fix="Open the tokenizer again."
            )
        self._errors.seek(0)
        said = self._errors.read(1 << 16).decode("utf-8", "replace")
        if "memory allocation of" in said or "MemoryError" in said or code == -9:
            if code == -9 or _less_allowed(memory):
                return MissingDependency(
                    f"There is not enough memory for {self.path}.",
                    why="The process that runs the tokenizer could not get it.",
                    fix="Free memory, or raise the limits of this user; else copy the original file again.",
                )
            return self._failed(request, f"It needs more than {memory >> 20} MiB.")
        if code == -getattr(signal, "SIGPROF", 0) or "Timeout" in said:
            return self._failed(request, f"It takes more than {seconds:.0f} seconds.")
        return self._failed(request, f"The process that runs it ended with {code}.")

    def _failed(self, request: str, why: str) -> UsageError:
        what = "cannot be read" if request == "open" else "cannot be used for this text"
        reason = " ".join(why.split())[:300].rstrip(".")
        fix = _COPY if request == "open" else "Give another text, or copy the original file again."
        return UsageError(f"{self.path} {what}.", why=f"{reason}.", fix=fix)


def _less_allowed(memory: int) -> bool:
    """Return whether the memory limit of this process, and so of its children, is lower."""
    try:
        import resource
    except ImportError:
        return False
    allowed = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    return min(allowed, default=memory) < memory


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """End the process of an unused tokenizer."""
    process.kill()
    for stream in (process.stdin, process.stdout, errors):
        try:
            if stream is not None:
                stream.close()
        except OSError:  # unsent data is not needed any more
            pass
    process.wait()


class FolderTokenizer:
    """Convert text to tokens and back; threads take turns.

    Args:
        process: runs the tokenizer, and has opened it.
        size: number of tokens.
    """

    def __init__(self, process: _Process, size: int) -> None:
        self._process = process
        self.size = size
        self._texts: dict[int, bytes] = {}

    @classmethod
    def open(cls, folder: Path) -> FolderTokenizer | None:
        """Open the tokenizer of a folder; None if there is none.

        Raises:
            UsageError: the file is broken, too large, or takes too long or too much memory.
            MissingDependency: the package `tokenizers` is not installed.
        """
        opening = OpeningTokenizer.start(folder)
        return None if opening is None else opening.wait()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: any text.
            special: add the tokens that begin and end a text, as far as the tokenizer has such; a chat has its own.

        Raises:
            UsageError: the text has halves of characters (surrogates), or the tokenizer fails or takes too much.
        """
        try:
            length = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise UsageError(
                "The text has no tokens.",
                why=f"Character {error.start} is a lone surrogate, which has no UTF-8 form.",
                fix="Remove it.",
            ) from error
        tokens: list[int] = self._process.ask("encode", length, text=text, special=special)["tokens"]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens.

        Raises:
            UsageError: the tokenizer fails or takes too much.
        """
        return self.decode_all(tokens)[0]

    def decode_all(self, *parts: Sequence[int]) -> list[str]:
        """Return the text of each of several lists of tokens, as `decode` does."""
        lists = [[int(token) for token in part] for part in parts]
        texts: list[str] = self._process.ask("decode", sum(map(len, lists)), parts=lists)["texts"]
        return texts

    def token(self, text: str) -> int | None:
        """Return the number of a token by its name, `<eos>` for example."""
        found: int | None = self._process.ask("token", text=text)["token"]
        return found

    def name(self, token: int) -> str | None:
        """Return the name of a token by its number."""
        found: str | None = self._process.ask("name", token=token)["name"]
        return found

    def special_tokens(self) -> list[str]:
        """List the names of the tokens that were added as special ones."""
        found: list[str] = self._process.ask("special")["names"]
        return found

    def text_of(self, token: int) -> bytes:
        """Return what a token adds to a text, in UTF-8; special tokens are their names."""
        if token not in self._texts:
            self._texts[token] = bytes(self._process.ask("text", token=token)["bytes"])
        return self._texts[token]


class OpeningTokenizer:
    """A tokenizer that is opened in the background.

    Args:
        process: runs it.
        text: content of the file.
    """

    def __init__(self, process: _Process, text: str) -> None:
        self._process, self._text = process, text
        self._size = 0
        self._error: LocalAttnError | None = None
        self._thread = threading.Thread(target=self._open, name="tokenizer", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, folder: Path) -> OpeningTokenizer | None:
        """Start to open the tokenizer of a folder; None if there is none. Raises as `FolderTokenizer.open`."""
        path = folder / TOKENIZER
        if not path.is_file():
            return None
        try:
            raw = read_plain(path, _MOST_BYTES)
            if len(raw) > _MOST_BYTES:
                raise UsageError(f"{path} is not a tokenizer.", why=f"It has more than {_MOST_BYTES >> 20} MiB.")
            text = raw.decode("utf-8")
        except OSError as error:
            raise UsageError(f"Cannot read {path}.", why=error.strerror or str(error)) from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} cannot be read.", why=f"It is not UTF-8: {error.reason}.", fix=_COPY) from error
        return cls(_Process(path, raw), text)

    def _open(self) -> None:
        try:
            self._process.begin()
            self._size = int(self._process.ask("open", len(self._text), text=self._text)["size"])
        except LocalAttnError as error:
            self._error = error

    def wait(self) -> FolderTokenizer:
        """Wait for the tokenizer and return it. Raises as `FolderTokenizer.open`."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return FolderTokenizer(self._process, self._size)


class TextStream:
    """Text that grows token by token: each call returns what the new token adds.

    A character whose bytes are spread over tokens is held back until the last of them. What a token reads as depends
    on its neighbours (a space before a word, for example), so new tokens are decoded together with the last ones that
    were shown.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = self._before = 0  # tokens that were shown, and tokens that no longer influence new ones

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty while a character is unfinished."""
        self._tokens.append(token)
        return self._new(final=len(self._tokens) - self._shown >= _MOST_HELD)

    def end(self) -> str:
        """Return the rest of the text, with U+FFFD for incomplete characters."""
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        whole, known = self._tokenizer.decode_all(
            self._tokens[self._before :], self._tokens[self._before : self._shown]
        )
        if whole.endswith(_UNFINISHED) and not final:
            return ""
        if len(whole) <= len(known) and not final:
            return ""  # a special token, or one that shows with the next
        self._before, self._shown = self._shown, len(self._tokens)
        # Older tokens are dropped, so that this list stays short in an endless text.
        del self._tokens[: self._before]
        self._shown, self._before = self._shown - self._before, 0
        return whole[len(known) :]
