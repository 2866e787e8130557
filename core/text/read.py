"""Read the text that ships with the package, in three parts without common sentences.

All of it was written for this package, or is its own documentation and code, and has its license. Figures of one
release can be compared with those of another, because the parts are fixed: a test holds their SHA-256.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Literal

# calibration: inputs on which rounding may be tuned. judgement: inputs on which files are compared, never tuned on.
# ranking: short sentences, whose embeddings have neighbours.
Part = Literal["calibration", "judgement", "ranking"]
PARTS: tuple[Part, ...] = ("calibration", "judgement", "ranking")

_HEADING = "=== "
# Characters of a passage of any other text.
_LONGEST = 4000


@dataclass(frozen=True)
class Passage:
    """A piece of text.

    Args:
        name: its kind, or its language.
        text: without the heading.
    """

    name: str
    text: str


@lru_cache(maxsize=len(PARTS))
def passages(part: Part) -> tuple[Passage, ...]:
    """Return the passages of a part, in the order of its file; in "ranking" each sentence is a passage."""
    lines = raw(part).decode("utf-8").splitlines()
    if part == "ranking":
        return tuple(Passage("sentence", line) for line in lines)
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(_HEADING):
            found.append((line.removeprefix(_HEADING), []))
        else:
            found[-1][1].append(line)
    return tuple(Passage(name, "\n".join(inside).strip("\n")) for name, inside in found)


def passages_of(text: str) -> tuple[Passage, ...]:
    """Cut any text into passages of some hundred words, at empty lines where it has some."""
    found: list[str] = [""]
    for piece in text.split("\n\n"):
        for start in range(0, max(1, len(piece)), _LONGEST):
            if len(found[-1]) >= _LONGEST // 2:
                found.append("")
            found[-1] += ("\n\n" if found[-1] else "") + piece[start : start + _LONGEST]
    return tuple(Passage(f"passage {place}", kept) for place, kept in enumerate(found) if kept.strip())


def raw(part: Part) -> bytes:
    """Return the bytes of a part's file, UTF-8."""
    return (resources.files(__package__) / f"{part}.txt").read_bytes()
