"""Run a tokenizer in a separate process: each request is a JSON document on stdin, each reply one on stdout.

Run as a script by `tokenizer.py`, and on no other way: it limits this process. It imports nothing of this package.
A tokenizer.json is a small program from outside. Its regular expressions, replacements and templates can take any time
and memory, and the Rust code that runs it answers some of them by a panic or by ending the process.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

# The most characters and tokens of an answer.
MOST_CHARACTERS = 64 << 20
MOST_TOKENS = 16 << 20
# How many times longer replacements may make a text, by their own sizes; other limits would take seconds to act.
MOST_GROWTH = 1024
_FRAME = struct.Struct("<Q")
# A token before the one whose text is wanted, because decoders treat a first token differently.
_BEFORE = "abcdef"


def read(stream: BinaryIO) -> Any:
    """Read a document; None at the end of the stream."""
    head = stream.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    (length,) = _FRAME.unpack(head)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def write(stream: BinaryIO, document: Any) -> None:
    """Write a document."""
    body = json.dumps(document).encode()
    stream.write(_FRAME.pack(len(body)))
    stream.write(body)
    stream.flush()


class Service:
    """Answers requests about one tokenizer."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._mode: str | None = None

    def open(self, text: str) -> dict[str, Any]:
        """Open a tokenizer.json, without its settings for training batches, as transformers does."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        steps = (self._tokenizer.normalizer, self._tokenizer.decoder)
        normalizer, decoder = ({} if step is None else json.loads(step.__getstate__()) for step in steps)
        if max(growth(normalizer), growth(decoder)) > MOST_GROWTH:
            raise ValueError(f"its replacements may make a text more than {MOST_GROWTH} times longer")
        kinds = set(_types(decoder))
        self._mode = next((kind for kind in ("ByteFallback", "ByteLevel") if kind in kinds), None)
        return {"size": int(self._tokenizer.get_vocab_size(with_added_tokens=True))}

    def encode(self, text: str, special: bool) -> dict[str, Any]:
        """Return the tokens of a text."""
        found = self._tokenizer.encode(text, add_special_tokens=special).ids
        if len(found) > MOST_TOKENS:
            raise ValueError(f"a text of {len(text)} characters becomes {len(found)} tokens")
        return {"tokens": found}

    def decode(self, parts: list[list[int]]) -> dict[str, Any]:
        """Return the texts of tokens, without special ones."""
        texts = [str(self._tokenizer.decode(part, skip_special_tokens=True)) for part in parts]
        if sum(map(len, texts)) > MOST_CHARACTERS:
            raise ValueError(f"its tokens read as more than {MOST_CHARACTERS} characters")
        return {"texts": texts}

    def token(self, text: str) -> dict[str, Any]:
        """Return the number of a token by its name."""
        return {"token": self._tokenizer.token_to_id(text)}

    def name(self, token: int) -> dict[str, Any]:
        """Return the name of a token."""
        return {"name": self._tokenizer.id_to_token(token)}

    def special(self) -> dict[str, Any]:
        """Return the names of the tokens that were added as special ones."""
        return {
            "names": [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        }

    def text(self, token: int) -> dict[str, Any]:
        """Return what a token adds to a text, as numbers of bytes, special tokens too.

        Source: `StopStringCriteria` of transformers 5.24.
        """
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return {"bytes": []}
        if self._mode == "ByteLevel" and all(letter in _BYTES for letter in name):
            return {"bytes": [_BYTES[letter] for letter in name]}
        if self._mode == "ByteFallback" and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return {"bytes": [int(name[3:5], 16)]}
            except ValueError:
                pass
        before = self._tokenizer.encode(_BEFORE, add_special_tokens=False).ids
        whole = str(self._tokenizer.decode([*before, token], skip_special_tokens=False))
        _, found, rest = whole.partition(_BEFORE)
        rest = rest if found else str(self._tokenizer.decode([token], skip_special_tokens=False))
        return {"bytes": list(rest[:MOST_CHARACTERS].encode("utf-8", "surrogatepass"))}


def growth(step: dict[str, Any]) -> int:
    """Return how many times longer a normalizer or decoder may make a text, by its replacements one after the other."""
    found = 1
    for inner in (*step.get("normalizers", ()), *step.get("decoders", ())):
        found = min(found * growth(inner), MOST_GROWTH + 1)
    if step.get("type") == "Replace":
        content, pattern = step.get("content", ""), step.get("pattern", {}).get("String")
        # A regular expression may match the place between two characters.
        found = len(content) + 1 if pattern is None else max(1, -(-len(content) // max(1, len(pattern))))
    return found


def _types(step: Any) -> list[str]:
    """Return the types in a decoder's state, at any depth."""
    found, left = [], [step]
    while left:
        inner = left.pop()
        if isinstance(inner, dict):
            found += [inner["type"]] if isinstance(inner.get("type"), str) else []
            left += inner.values()
        elif isinstance(inner, list):
            left += inner
    return found


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each printable letter of a byte-level tokenizer stands for (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(byte) if byte in shown else chr(next(others)): byte for byte in range(256)}


_BYTES = _bytes_of_letters()


def limit_memory(most: int) -> None:
    """Limit the address space of this process, if the system supports it; keep a lower existing limit."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def set_alarm(seconds: float) -> None:
    """End this process after this many seconds of its own work; 0 removes the limit.

    Rust code does not return to Python before it is done: the system ends it, or where it has no such timer, a thread
    of C, which counts all seconds.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Answer requests until the stream ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    first = read(requests)
    sys.path[:] = first["path"]
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        write(replies, {"missing": True, "number": first["number"]})
        return
    write(replies, {"number": first["number"]})
    service = Service()
    while (request := read(requests)) is not None:
        limit_memory(request.pop("memory"))
        asked, number, seconds = request.pop("ask"), request.pop("number"), request.pop("seconds")
        answer: Callable[..., dict[str, Any]] = getattr(service, asked)
        set_alarm(seconds)
        try:
            reply = answer(**request)
        except MemoryError:
            reply = {"memory": True}
        except BaseException as error:  # a panic of the Rust code is not an Exception
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reply = {"error": f"{name}{error}"[:500]}
        set_alarm(0)
        write(replies, {**reply, "number": number})


if __name__ == "__main__":
    main()
