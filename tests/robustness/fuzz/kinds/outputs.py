"""Cases about what is written: for every output of every command, targets that exist, are inputs, links, FIFOs, …

Each way of drawing a target is a row of `TARGETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import PurePosixPath
from random import Random

from ..case import DISK, DISK_BYTES, Case, Content, Folder, HardLink, Pipe, Socket
from ..command_line import CALLS, NAMED_CODE, Call, Value, parameters, words
from ..groups import GROUPS, Files, gather
from ..seeds import Seeds

_ODD_SUFFIXES = (
    ".json",
    ".onnx.json",
    ".npz.json",
    ".txt",
    "",
    ".",
    ".onnx",
    ".npz",
    ".ONNX",
    ".pt",
    ".engine",
    ".so",
    ".tar",
    ".html",
)
_ODD_NAMES = (
    "", ".", "..", "./", "a b", "-o", "--force", "a\nb", "a\x1b[31mb", "é" * 100, "\udcff", "*", "[a]", "~",
    "$HOME", "..a", ".hidden",    "a/", "CON", "%s%n", "\u202e", "_",
)  # fmt: skip


@dataclass
class Target:
    """The value of an output.

    Args:
        path: what is given, `{}` stands for the folder.
        files: what is added to the folder.
        same: names that hold what the command writes, which `--force` may replace.
        leaves: names that may appear; those that begin like the path if empty.
        modes: permissions.
        free: bytes on the small disk.
    """

    path: str
    files: Files = field(default_factory=dict)
    same: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    modes: dict[str, int] = field(default_factory=dict)
    free: int | None = None


@dataclass(frozen=True)
class _Drawn:
    """A call and one of its outputs."""

    random: Random
    seeds: Seeds
    files: Files
    call: Call
    value: str
    group: str

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.value).suffix

    def earlier(self, name: str) -> tuple[Files, tuple[str, ...]]:
        """What such a command wrote earlier, at another name; nothing where it is no group."""
        if self.group not in GROUPS:
            return {name: b"# An earlier one\n"}, (name,)
        files = GROUPS[self.group](self.seeds)
        main = next(iter(files)).split("/")[0]
        renamed = {(name + key[len(main) :] if key.startswith(main) else key): value for key, value in files.items()}
        return renamed, tuple(renamed)


def _new(drawn: _Drawn) -> Target:
    return Target(drawn.value)


def _same_kind(drawn: _Drawn) -> Target:
    name = "earlier" + drawn.suffix
    files, same = drawn.earlier(name)
    return Target("{}/" + name, files, same)


def _other_kind(drawn: _Drawn) -> Target:
    """A file of another kind, at its own name or at one with the right suffix; nothing of it may change."""
    groups = [name for name in GROUPS if name not in (drawn.group, "text", "compiler", "report", "factory")]
    alike = {"model": ("steps", "other"), "steps": ("model", "other")}.get(drawn.group, ())
    files = GROUPS[drawn.random.choice([name for name in groups if name not in alike])](drawn.seeds)
    # An array or a model of another group is of the same kind, which `--force` may replace.
    names = [name for name in files if PurePosixPath(name).suffix != drawn.suffix or drawn.suffix == ".json"]
    name = drawn.random.choice(sorted(names or files))
    content = files[name]
    placed = "valuable" + (drawn.suffix if drawn.random.random() < 0.5 else PurePosixPath(name).suffix)
    return Target("{}/" + placed, {placed: content})


def _inputs(drawn: _Drawn) -> list[str]:
    return sorted(name for name, content in drawn.files.items() if isinstance(content, bytes) and name != "compiler")


def _input(drawn: _Drawn) -> Target:
    """One of the command's own files, spelled in one of several ways."""
    name = drawn.random.choice(_inputs(drawn))
    return Target(drawn.random.choice(("{}/", "{}/./", "{}/../here/", "")) + name)


def _linked_input(drawn: _Drawn) -> Target:
    name = "linked" + drawn.suffix
    main = drawn.random.choice(_inputs(drawn))
    content: Content = HardLink(main) if drawn.random.random() < 0.5 else "{}/" + main
    return Target("{}/" + name, {name: content})


def _through_folder(drawn: _Drawn) -> Target:
    """An input, reached through a link to its folder."""
    return Target("{}/door/" + drawn.random.choice(_inputs(drawn)), {"door": "."})


def _link(drawn: _Drawn) -> Target:
    """A link to an earlier output, to nothing, to a folder, or to itself."""
    name = "linked" + drawn.suffix
    there, same = drawn.earlier("earlier" + drawn.suffix)
    leads = drawn.random.choice(("earlier" + drawn.suffix, "nothing" + drawn.suffix, "folder", name))
    return Target(
        "{}/" + name, {**there, "folder/a": b"a", name: leads}, (*same, name), (name, "nothing*", name + ".json")
    )


def _no_file(drawn: _Drawn) -> Target:
    name = "odd" + drawn.random.choice((drawn.suffix, ""))
    contents: tuple[Content, ...] = (Pipe(), Socket(), Folder())
    return Target("{}/" + name, {name: drawn.random.choice(contents)})


def _folder_with_files(drawn: _Drawn) -> Target:
    name = "thesis" + drawn.random.choice((drawn.suffix, ""))
    return Target("{}/" + name, {f"{name}/chapter.txt": b"years of work", f"{name}/model/model.onnx": b"trained"})


def _companion(drawn: _Drawn) -> Target:
    """A new name; but a name that is written beside it holds a file of the user's, or is a folder."""
    name = PurePosixPath(drawn.value).name
    beside = drawn.random.choice((name + ".json", PurePosixPath(name).stem + ".prefill.onnx", name + ".data"))
    content: Content = drawn.random.choice((b"my notes", Folder(), "{}/precious", Pipe()))
    return Target(drawn.value, {beside: content, "precious": b"precious"})


def _long(drawn: _Drawn) -> Target:
    length = drawn.random.choice((200, 230, 240, 246, 250, 255, 256, 4096)) - len(drawn.suffix)
    return Target("{}/" + "n" * length + drawn.suffix)


def _odd_name(drawn: _Drawn) -> Target:
    name = drawn.random.choice(_ODD_NAMES) + drawn.random.choice(("", drawn.suffix))
    return Target(drawn.random.choice(("{}/", "")) + name)


def _odd_suffix(drawn: _Drawn) -> Target:
    return Target("{}/out" + drawn.random.choice(_ODD_SUFFIXES))


def _odd_folder(drawn: _Drawn) -> Target:
    """Below a folder that is missing, a file, a FIFO, or not to be written."""
    parent: Content | None = drawn.random.choice((None, b"a file", Pipe(), Folder(), Folder(), "nowhere"))
    files: Files = {} if parent is None else {"there": parent}
    modes = {"there": 0o555} if isinstance(parent, Folder) else {}
    made = ("there*",) if parent is None else ()  # a folder for outputs is made
    return Target("{}/there/out" + drawn.suffix, files, leaves=made, modes=modes)


def _full_disk(drawn: _Drawn) -> Target:
    earlier, same = drawn.earlier(f"{DISK}/out{drawn.suffix}") if drawn.random.random() < 0.5 else ({}, ())
    free = drawn.random.choice((0, 1, 4096, 8192, 20_000, 60_000, 100_000, DISK_BYTES))
    return Target(f"{{}}/{DISK}/out" + drawn.suffix, earlier, same, free=free)


def _planted_batch(drawn: _Drawn) -> Target:
    """A write where someone left what looks like an interrupted one, for this file or for others."""
    name = PurePosixPath(drawn.value).name
    batch = f".localattn.next.{drawn.random.choice((name, name, 'model.onnx', 'x'))}"
    inner = drawn.random.choice(("thesis.txt", *_inputs(drawn)))
    files: Files = {
        "thesis.txt": b"years of work",
        "private/key": b"secret",
        f"{batch}/{PurePosixPath(inner).name}": b"planted",
    }
    if drawn.random.random() < 0.4:
        files = {"private/key": b"secret", batch: "private"}
    return Target(drawn.value, files)


_TARGETS: tuple[Callable[[_Drawn], Target], ...] = (
    _new, _same_kind, _other_kind, _other_kind, _input, _input, _linked_input, _through_folder, _link, _no_file,
    _folder_with_files, _companion, _long, _odd_name, _odd_suffix, _odd_folder, _full_disk, _planted_batch,
)  # fmt: skip
_OF_INPUTS = (_input, _linked_input, _through_folder, _planted_batch)


def draw_output(random: Random, seeds: Seeds) -> Case:
    """A call of a command, one of whose outputs leads somewhere odd, with or without `--force`."""
    command, call, name = _draw_call(random)
    files = gather(seeds, call.files)
    value = call.values.get(name, "{}/out.cache")
    assert isinstance(value, str)
    drawn = _Drawn(random, seeds, files, call, value, call.writes[name])
    makers = _TARGETS if _inputs(drawn) else [make for make in _TARGETS if make not in _OF_INPUTS]
    target = random.choice(makers)(drawn)
    values: dict[str, Value] = {**call.values, name: target.path}
    force = "force" in parameters()[command] and random.random() < 0.5
    if force:
        values["force"] = True
    return case_of(command, replace(call, values=values), {**files, **target.files}, target, force=force)


def case_of(command: str, call: Call, files: Files, target: Target | None = None, *, force: bool = False) -> Case:
    """The case of a call: what it may leave follows from the values of its outputs."""
    outputs = [value for name in call.writes if isinstance(value := call.values.get(name), str)]
    target = target or Target("")
    leaves = [pattern for value in outputs for pattern in _leaves(value)]
    return Case(
        files,
        words(command, call.values),
        (*leaves, *target.leaves, *(("cache", "cache/*") if call.environment else ())),
        tuple(escape(name) for name in target.same) if force else (),
        environment=call.environment,
        modes=target.modes,
        free=target.free,
        names_code=any(call.values.get(name, "none") not in ("none", "auto") for name in NAMED_CODE),
    )


def _leaves(value: str) -> list[str]:
    """Patterns of the files that an output of this value may leave, relative to the folder."""
    path = PurePosixPath(value.removeprefix("{}/"))
    stem = str(path.with_suffix("")) if path.suffix else str(path)
    patterns = [
        escape(str(path)),
        escape(str(path)) + ".*",
        escape(stem) + ".prefill.*",
        escape(stem) + "_*",
        escape(str(path)) + "/*",
    ]
    return patterns if path.name not in ("", "..") else []


def _draw_call(random: Random) -> tuple[str, Call, str]:
    """A command, a call of it, and one of its outputs; slow ones seldom."""
    found = [(command, call, name) for command, calls in CALLS.items() for call in calls for name in call.writes]
    return random.choices(found, [1 / (0.3 + call.seconds) for _, call, _ in found])[0]
