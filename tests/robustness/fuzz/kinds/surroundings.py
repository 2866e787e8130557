"""Cases about what is around a command: its home, its variables, its locale, its streams."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from ..case import Case, Folder, Pipe, Streams
from ..command_line import CALLS
from ..groups import Files, gather
from ..seeds import Seeds
from .outputs import case_of

_PLACES: Files = {
    "writable": Folder(), "shared": Folder(), "locked": Folder(), "a-file": b"text", "a-pipe": Pipe(),
    "dangling": "nothing",
}  # fmt: skip
_MODES = {"shared": 0o777, "locked": 0o555}
# The paths that a variable may lead to; None removes the variable.
_PATHS = (
    None,
    "",
    "relative",
    "{}/missing",
    *("{}/" + name for name in _PLACES),
    "{}/locked/below",
    "/proc/nowhere",
    "~",
    "é" * 300,
)
_VARIABLES: dict[str, tuple[str | None, ...]] = {
    "HOME": tuple(path for path in _PATHS if path is not None),
    "XDG_CACHE_HOME": tuple(path for path in _PATHS if path is not None),
    "TMPDIR": _PATHS,
    "CXX": ("missing-compiler", "'"),  # with others the system's compiler is asked next, which takes a minute
    "PATH": ("", "{}/writable", "relative"),
    "COLUMNS": ("0", "-1", "1", "abc", "99999999999", ""),
    "TERM": ("", "dumb", "nonsense"),
    "NO_COLOR": ("1",),
    "FORCE_COLOR": ("1",),
}
_LOCALES: tuple[dict[str, str | None], ...] = (
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX", "LANG": "C"},
    {"LC_ALL": "xx_XX.nothing"},
    {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "ascii:strict"},
    {"PYTHONIOENCODING": "utf-16"},
    {"PYTHONIOENCODING": "cp437"},
    {"PYTHONUTF8": "1"},
    *({"OMP_NUM_THREADS": number} for number in ("0", "-1", "abc", "", "1", "2000", "99999999999", "1,2")),
    {},
    {},
    {},
)
_HOMELESS: dict[str, str | None] = {"HOME": None, "XDG_CACHE_HOME": None, "TMPDIR": "{}/tmp"}
_STREAMS = ("pipe", "pipe", "closed", "full", "early")


def draw_environment(random: Random, seeds: Seeds) -> Case:
    """Any command, where one to three variables lead somewhere odd."""
    found = [(command, call) for command, calls in CALLS.items() for call in calls]
    command, call = random.choices(found, [1 / (0.3 + call.seconds) for _, call in found])[0]
    case = case_of(command, call, {**gather(seeds, call.files), **_PLACES})
    names = random.sample(sorted(_VARIABLES), random.choice((1, 1, 2, 3)))
    variables = {name: random.choice(_VARIABLES[name]) for name in names}
    # A cache may be made where the user says that it lies.
    caches = [f"{name}*" for name in (".cache", "relative", "missing", "writable/", "shared/", "~", "é")]
    return replace(
        case,
        environment={**case.environment, **variables},
        modes=_MODES,
        outputs=(*case.outputs, *(caches if command == "plugin build" else ())),
    )


def draw_streams(random: Random, seeds: Seeds) -> Case:
    """Any command as a process of its own, in odd locales, with streams that are closed, full, or read by nobody."""
    found = [(command, call) for command, calls in CALLS.items() for call in calls if call.seconds < 3]
    command, call = random.choice(found)
    case = case_of(command, call, gather(seeds, call.files))
    arguments = case.arguments
    kind = random.random()
    if kind < 0.2:
        arguments = (*command.split(), "--help")
    elif kind < 0.25:
        arguments = ("--version",)
    elif kind < 0.4:
        arguments = (*arguments, "--format", "json")
    elif kind < 0.5:
        arguments = (*arguments, "--verbose")
    elif kind < 0.6:
        arguments = (*arguments[:-1], "--no-such-option-é✗")
    streams = Streams(random.choice(_STREAMS), random.choice(_STREAMS), random.random() < 0.15)
    variables = {**random.choice(_LOCALES), **(_HOMELESS if streams.nobody else {}), **case.environment}
    files = {**case.files, "tmp": Folder()}
    return replace(case, files=files, arguments=arguments, environment=variables, streams=streams)
