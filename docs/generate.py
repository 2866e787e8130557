"""Write `docs/commands.md` from the declarations of the command line: `python docs/generate.py`.

Read are the functions of `commands/` themselves, their signatures and docstrings. Typer's own `utils docs` escapes
apostrophes, drops what stands in brackets, and writes other text with each of its releases.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.models import ArgumentInfo, OptionInfo

from localattn.cli import command_line
from localattn.commands.parts.terminal.examples import EXAMPLES
from localattn.commands.parts.terminal.panels import OPTIONS, PANELS

PAGE = Path(__file__).with_name("commands.md")
HEAD = """# Commands

<!-- Written by `python docs/generate.py` from the code. Do not edit. -->

Every command also takes `-h`, `--help`; `-v`, `--verbose` for tracebacks and what is decided, `-vv`
for details; `-q`, `--quiet` for no progress. `localattn --version` prints the version.
`localattn --install-completion` teaches your shell the commands and options.

"""
# Columns of the page's text.
WIDTH = 100
# What every command has, said once at the top.
SHARED = {"verbose", "quiet"}
# What a value is called where its type says no more.
VALUES = {Path: "PATH", str: "TEXT", int: "INTEGER", float: "NUMBER"}


class Parameter(NamedTuple):
    """One argument or option of a command.

    Args:
        names: `--output`, `-o`; of an argument its name in capitals.
        value: what follows, or "" for a switch.
        required: whether the command refuses to run without.
        default: as a reader would type it, or said in words; "" for none.
        help: the sentence that `--help` shows.
        is_option: or else an argument.
        panel: where `--help` shows it; "" for an argument.
    """

    names: tuple[str, ...]
    value: str
    required: bool
    default: str
    help: str
    is_option: bool
    panel: str


class Command(NamedTuple):
    """One command, or a group of them: its words after `localattn`, its paragraphs, parameters and examples."""

    words: str
    paragraphs: list[str]
    parameters: list[Parameter]
    examples: Sequence[str] = ()


def commands() -> list[Command]:
    """Every command, in the order of `localattn --help`."""
    app = command_line()
    found = [_command("", info) for info in app.registered_commands]
    for group in app.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        found.append(Command(str(inner.info.name), [str(inner.info.help)], []))
        found += [_command(f"{inner.info.name} ", info) for info in inner.registered_commands]
    return found


def _command(prefix: str, info: Any) -> Command:
    callback = info.callback
    name = info.name or callback.__name__.replace("_", "-")
    text = inspect.cleandoc(callback.__doc__)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return Command(prefix + name, paragraphs, _parameters(callback), EXAMPLES.get(prefix + name, ()))


def _parameters(callback: Callable[..., None]) -> list[Parameter]:
    hints = typing.get_type_hints(callback, include_extras=True)
    found = []
    for name, parameter in inspect.signature(callback).parameters.items():
        hint = hints[name]
        if hint is typer.Context or name in SHARED:
            continue
        # Python 3.10 makes Optional[Annotated[…]] of what is None by default.
        annotated = next(part for part in (hint, *typing.get_args(hint)) if hasattr(part, "__metadata__"))
        annotation, *extras = typing.get_args(annotated)
        (info,) = (extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo))
        found.append(_parameter(name, annotation, info, parameter.default))
    return found


def _parameter(name: str, annotation: Any, info: ArgumentInfo | OptionInfo, default: Any) -> Parameter:
    kind, many = _inner_type(annotation)
    is_option = isinstance(info, OptionInfo)
    names: tuple[str, ...] = (name.upper() + ("..." if many else ""),)
    if isinstance(info, OptionInfo):
        names = _flags(name, info)
    value = "" if kind is bool else _value(kind, info)
    said = re.fullmatch(r"(.*?)\s*\(Default: (.*?)\.?\)", info.help or "")
    words, stated = (said[1], said[2]) if said else (info.help or "", "")
    if not stated and not any(default is nothing for nothing in (None, False, "", inspect.Parameter.empty)):
        stated = _typed(default)
    required = default is inspect.Parameter.empty
    panel = (info.rich_help_panel or PANELS[name]) if isinstance(info, OptionInfo) else ""
    return Parameter(names, f"{value} …" if many and is_option else value, required, stated, words, is_option, panel)


def _flags(name: str, info: OptionInfo) -> tuple[str, ...]:
    """`-o`, `--output`: short ones first. In `Annotated`, Typer's first positional argument is a name too."""
    declared = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
    flags = [part for flag in declared or [f"--{name.replace('_', '-')}"] for part in flag.split("/")]
    return tuple(sorted(flags, key=len))


def _typed(default: Any) -> str:
    """A default as one would type it."""
    text = f"{default:g}" if isinstance(default, float) else str(default)
    return f"`{text}`".replace("\n", "\\n")


def _inner_type(annotation: Any) -> tuple[Any, bool]:
    """`list[Path] | None` → Path, and that there may be several."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    return annotation, False


def _value(kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    if info.min is None:
        return VALUES[kind]
    return f"{VALUES[kind]} {f'≥ {info.min:g}' if info.max is None else f'{info.min:g} to {info.max:g}'}"


def _items(parameters: list[Parameter]) -> list[str]:
    """Return the items of a list of options, or of arguments."""
    items = []
    for parameter in parameters:
        names = ", ".join(f"`{name}`" for name in parameter.names)
        value = f" {parameter.value}" if parameter.value and parameter.is_option else ""
        default = "*Required.*" if parameter.required else f"Default: {parameter.default}." if parameter.default else ""
        items.append(_wrapped(f"- {names}{value}: {parameter.help} {default}", "  "))
    return items


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text.strip(), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """The whole reference as Markdown."""
    every = commands()
    lines = [HEAD + _wrapped(str(command_line().info.epilog)), ""]
    lines += [
        _wrapped(f"- [{c.words}](#localattn-{c.words.replace(' ', '-')}): {c.paragraphs[0]}", "  ") for c in every
    ]
    for command in every:
        arguments = [parameter for parameter in command.parameters if not parameter.is_option]
        options = [parameter for parameter in command.parameters if parameter.is_option]
        usage = ["localattn", command.words, "[OPTIONS]" if options else "COMMAND"]
        usage += [a.names[0] if a.required else f"[{a.names[0]}]" for a in arguments]
        lines += ["", f"## localattn {command.words}", "", "```", " ".join(usage), "```", ""]
        lines += ["\n\n".join(map(_wrapped, command.paragraphs)), ""]
        if arguments:
            lines += [*_items(arguments), ""]
        for panel in OPTIONS:
            shown = [option for option in options if option.panel == panel]
            if shown:
                lines += [f"**{panel}**", "", *_items(shown), ""]
        if command.examples:
            lines += ["```sh", *command.examples, "```", ""]
        lines.pop()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"Wrote {PAGE}")
