"""Format the help of every command: options in panels, flags without a type, examples at the end."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from ....core.error_texts import close_match
from ....core.limits import LARGEST_SEED, LARGEST_SIZE
from ....core.spelling import spelled
from .examples import EXAMPLES
from .panels import OPTIONS, PANELS

# Bounds that nobody reaches by accident: they are enforced, but not shown in the help.
_UNSHOWN_BOUNDS = (LARGEST_SIZE, LARGEST_SEED)
_TYPES = {bool: "", Path: "<path>", int: "<int>", float: "<number>", str: "<text>"}
# Typer's text for a value that is none of the choices.
_NO_CHOICE = re.compile(r"(?:Value error, )?(?P<text>'(?P<given>[^']*)' is not one of .*)", re.DOTALL)
# Least likeness of a suggestion: `fp16` for `float16` has a ratio of 0.55.
_ALIKE = 0.5


# The base of errors about arguments. It is click's, which Typer has a copy of in some releases.
_CLICK_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
# Longest list of choices that is shown in the column of types, which at 80 columns leaves the help enough room.
_LONGEST_TYPE = 16
# Options of older releases, which still work but are not shown: by command, the option that replaced each.
FORMER = {
    "demo": {"--length": "--max-tokens"},
    "export": {"--max-length": "--seq-len", "--max-seq-len": "--seq-len"},
    "generate": {"--max-new-tokens": "--max-tokens"},
}
# What users type for a command of a group.
_PARTS_OF = {"verify": "bundle verify"}


class Hint(NamedTuple):
    """Beside an option's type: returns what to write instead of a value that is none of its choices, or ""."""

    instead: Callable[[str], str]


class Command(TyperCommand):
    """A command whose help has panels and examples, and whose errors suggest the value that was probably meant."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        hints = typing.get_type_hints(inspect.unwrap(self.callback)) if self.callback else {}
        for parameter in self.params:
            _in_panel(_shortened(parameter, hints.get(parameter.name or "")))
        self.params.sort(key=_place)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options, with --help in the last panel."""
        return [_in_panel(_shortened(parameter)) for parameter in super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            BadParameter: a value does not belong to its option; of several choices, the nearest one is named.
        """
        former = FORMER.get(_words(ctx), {})
        try:
            return super().parse_args(ctx, [_renamed(word, former) for word in args])
        except typer.BadParameter as error:
            _suggest(error, self.callback)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with the examples of the command at its end."""
        lines = EXAMPLES.get(_words(ctx), ())
        self.epilog = "\n".join(["Examples:", "```sh", *lines, "```"]) if lines else None
        negated = {id(x): x.secondary_opts for x in self.params if getattr(x, "secondary_opts", None)}
        try:
            for parameter in self.params:  # a column of their own would leave too little room for the names
                if id(parameter) in negated:
                    parameter.secondary_opts = []
            super().format_help(ctx, formatter)
        finally:
            for parameter in self.params:
                parameter.secondary_opts = negated.get(id(parameter), parameter.secondary_opts)


class Group(TyperGroup):
    """A group of commands, whose flags have no type in the help either."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Read the arguments; what an error shows of them, such as the names of files, is spelled out."""
        with _spelled_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named; errors as in `make_context`."""
        with _spelled_errors():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was named; of a part of another command, say which."""
        if args and args[0] in _PARTS_OF and args[0] not in self.list_commands(ctx):
            raise _USAGE_ERROR(f"No such command '{args[0]}'. Did you mean: localattn {_PARTS_OF[args[0]]}?", ctx)
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, with those that Typer adds."""
        return [_shortened(parameter) for parameter in super().get_params(ctx)]


@contextmanager
def _spelled_errors() -> Iterator[None]:
    try:
        yield
    except _CLICK_ERROR as error:
        error.message = spelled(error.message)
        raise


def _renamed(word: str, former: Mapping[str, str]) -> str:
    """Return a word of the command line, with today's name of an option: `--length=5` → `--max-tokens=5`."""
    name, equals, value = word.partition("=")
    return f"{former.get(name, name)}{equals}{value}"


def _words(ctx: Any) -> str:
    """Return a command as typed after `localattn`, for any name of the program."""
    return "" if ctx.parent is None else f"{_words(ctx.parent)} {ctx.info_name}".strip()


def _shortened(parameter: Any, hint: Any = None) -> Any:
    """Shorten a parameter's type, and remove a flag's type and bounds that go without saying.

    Args:
        parameter: Typer's parameter.
        hint: its type in Python; None for a flag that Typer adds.
    """
    if parameter.param_type_name == "option" and parameter.metavar is None:
        is_flag = hint is None or getattr(parameter, "is_flag", False) or getattr(parameter, "count", False)
        parameter.metavar = "" if is_flag else _type_name(hint)
        choices = [] if is_flag else [part for part in _parts(hint) if isinstance(part, str)]
        if choices:
            _show_choices(parameter, choices)
    if getattr(parameter, "min", None) is not None or getattr(parameter, "max", None) is not None:
        _say_bounds(parameter)
    return parameter


def _say_bounds(parameter: Any) -> None:
    """Say the bounds of a number in its help, unless they go without saying: the column of types has no room."""
    least, most = parameter.min, None if parameter.max in _UNSHOWN_BOUNDS else parameter.max
    parameter.min = parameter.max = None
    if most is not None:
        _append(parameter, f"{least:,g} to {most:,g}.")


def _append(parameter: Any, sentence: str) -> None:
    """Add a sentence to the help of an option, before its default."""
    text, default, rest = parameter.help.partition("(Default:")
    parameter.help = f"{text.rstrip()} {sentence} {default}{rest}".rstrip()


def _show_choices(parameter: Any, choices: Sequence[str]) -> None:
    """Show the values of an option: few and short ones as its type, others in its help unless that names all."""
    names = "|".join(choices)
    if len(names) <= _LONGEST_TYPE:
        parameter.metavar = names
    elif any(choice not in parameter.help for choice in choices):
        _append(parameter, f"One of {', '.join(choices)}.")


def _in_panel(parameter: Any) -> Any:
    """Put a parameter into the panel of its name, unless its command has chosen another one."""
    if parameter.param_type_name == "option" and not getattr(parameter, "rich_help_panel", None):
        parameter.rich_help_panel = PANELS.get(parameter.name)
    return parameter


def _type_name(hint: Any) -> str | None:
    """Return the help's name for an option's type; None for choices."""
    parts = {hint, *_parts(hint)}
    return next((name for kind, name in _TYPES.items() if kind in parts), None)


def _place(parameter: Any) -> int:
    """Return the position of a parameter's panel; arguments first, unknown options last."""
    if parameter.param_type_name == "argument":
        return -1
    return list(OPTIONS).index(parameter.rich_help_panel) if parameter.rich_help_panel in OPTIONS else len(OPTIONS)


def _suggest(error: typer.BadParameter, callback: Any) -> None:
    """Add the nearest value to an error about an option with choices."""
    said = _NO_CHOICE.fullmatch(error.message)
    if said is None:
        return
    hints = typing.get_type_hints(inspect.unwrap(callback), include_extras=True)
    parts = list(_parts(hints.get(str(getattr(error.param, "name", "")))))
    near = next((part.instead(said["given"]) for part in parts if isinstance(part, Hint)), "")
    choices = [part for part in parts if isinstance(part, str)]
    near = near or close_match(said["given"], choices, cutoff=_ALIKE)
    error.message = said["text"] if near.startswith("Known") else f"{said['text']} {near}"


def _parts(hint: Any) -> Iterator[Any]:
    """Yield what a type is made of: `Annotated[Literal["a"] | None, Hint(…)]` → "a", None, the hint."""
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        yield part
        yield from _parts(part)
