"""Cases about what is read: a file of any kind, or what is no file at all, where a command expects another kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath
from random import Random

from ..case import Case, Content, Folder, Pipe, Socket
from ..command_line import CALLS, Call, Value
from ..groups import GROUPS, Files, gather
from ..seeds import Seeds
from .outputs import case_of

_DEPTH = 50_000


def _any_file(random: Random, seeds: Seeds) -> tuple[str, Content]:
    files = GROUPS[random.choice(sorted(GROUPS))](seeds)
    return random.choice(sorted(files.items()))


def _pickle(random: Random, seeds: Seeds) -> tuple[str, Content]:
    return random.choice(sorted(seeds.pickles.items()))


def _no_file(random: Random, seeds: Seeds) -> tuple[str, Content]:
    contents: tuple[Content, ...] = (Pipe(), Socket(), Folder(), b"", "/dev/zero", "/dev/null", "nothing", "wrong")
    return "wrong", random.choice(contents)


def _deep(random: Random, seeds: Seeds) -> tuple[str, Content]:
    """A document of 50,000 levels."""
    documents = {
        "deep.toml": ".".join(["a"] * _DEPTH) + " = 1",
        "deeper.toml": "[" + ".".join(["a"] * _DEPTH) + "]",
        "deep.json": '{"a":' * _DEPTH + "1" + "}" * _DEPTH,
        "deep.yaml": "{a: " * _DEPTH + "1" + "}" * _DEPTH,
        "wide.json": json.dumps({str(i): i for i in range(_DEPTH)}),
    }
    name = random.choice(sorted(documents))
    return name, documents[name].encode()


def _bomb(random: Random, seeds: Seeds) -> tuple[str, Content]:
    return "bomb.npz", seeds.bomb


_KINDS: tuple[Callable[[Random, Seeds], tuple[str, Content]], ...] = (
    _any_file, _any_file, _any_file, _any_file, _pickle, _pickle, _no_file, _no_file, _deep, _bomb,
)  # fmt: skip


def draw_wrong_input(random: Random, seeds: Seeds) -> Case:
    """A call of a command, one of whose inputs is something else, at a name with its own suffix or the right one."""
    found = [(command, call, name) for command, calls in CALLS.items() for call in calls for name in call.inputs]
    command, call, name = random.choices(found, [1 / (0.3 + call.seconds) for _, call, _ in found])[0]
    files = gather(seeds, call.files)
    value = call.values[name]
    right = value if isinstance(value, str) else value[0]  # type: ignore[index]
    natural, content = random.choice(_KINDS)(random, seeds)
    suffix = PurePosixPath(random.choice((right, natural))).suffix
    placed = "wrong" + suffix
    wrong: Value = "{}/" + placed
    if random.random() < 0.05:
        wrong = random.choice(("", "{}", "{}/nothing", "{}/" + "n" * 300, "\udcff", "{}/m.pt/x"))
    added: Files = {placed: content}
    if content == "wrong":  # a link to itself
        added = {placed: placed}
    if random.random() < 0.1 and isinstance(content, bytes):
        return replace(_case(command, call, name, wrong, files | added), modes={placed: 0})
    return _case(command, call, name, wrong, files | added)


def _case(command: str, call: Call, name: str, wrong: Value, files: Files) -> Case:
    values = {**call.values, name: wrong if isinstance(call.values[name], str) else (str(wrong),)}
    return case_of(command, replace(call, values=values), files)
