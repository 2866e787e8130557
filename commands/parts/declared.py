"""Make the options of a command from dataclasses.

A command takes a parameter of such a dataclass, and `from_fields` gives Typer one option for each field instead. A
field is declared with `exporter.options.option`, if the Python API has it too, or in Typer's words, as `Annotated`.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...core.errors import UsageError
from ...exporter.options import Option, options_of
from .flags import in_flags
from .options import number_option, size_option
from .paths import INPUT
from .terminal.help import Hint


def from_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters that are dataclasses are replaced by their options."""
    hints = typing.get_type_hints(command, include_extras=True)
    kinds = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    typers = {name: tuple(_in_typers_words(kind)) for name, kind in kinds.items()}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = kinds.get(name)
        parameters += [parameter.replace(annotation=hints[name])] if kind is None else _parameters(kind)

    def run(**values: Any) -> None:
        made = {name: _made(kind, values, typers[name]) for name, kind in kinds.items()}
        command(**made, **{name: value for name, value in values.items() if name in hints})

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {x.name: x.annotation for x in parameters}
    return run


def flag_names(kind: type) -> dict[str, str]:
    """Return the name that each option of a dataclass has on the command line, by the field's name."""
    return {name: option.flag or name for name, option in options_of(kind).items() if option.panel}


def refuse_flags(given: Collection[str], kind: type, accepted: Collection[str], what: str) -> None:
    """Refuse options of a dataclass that do not apply here, rather than ignore them.

    Args:
        given: parameters that were typed.
        kind: the dataclass.
        accepted: fields of options that do apply.
        what: what is exported.

    Raises:
        UsageError: one of them is given.
    """
    for name in sorted(flag for field, flag in flag_names(kind).items() if flag in given and field not in accepted):
        option = f"--{name.replace('_', '-')}"
        raise UsageError(f"{option} does not apply to {what}.", fix=f"Leave {option} out.")


def _made(kind: Any, values: Mapping[str, Any], typers: Collection[str]) -> Any:
    """Return the dataclass with the values that were typed; `typers` are its fields in Typer's words."""
    chosen = {}
    for name, option in options_of(kind).items():
        if option.panel:
            value = values[option.flag or name]
            negated = option.flag.startswith("no_")
            chosen[name] = not value if negated else parse_axes(value) if option.typed == "axes" else value
    return kind(**chosen, **{name: values[name] for name in typers})


def _parameters(kind: Any) -> list[inspect.Parameter]:
    hints, typers = typing.get_type_hints(kind), _in_typers_words(kind)
    parameters = []
    for field in dataclasses.fields(kind):
        if field.name in typers:
            keyword, hint = inspect.Parameter.KEYWORD_ONLY, typers[field.name]
            parameters.append(inspect.Parameter(field.name, keyword, default=field.default, annotation=hint))
        elif "option" in field.metadata and field.metadata["option"].panel:
            parameters.append(_parameter(field, hints[field.name], field.metadata["option"]))
    return parameters


def _in_typers_words(kind: Any) -> dict[str, Any]:
    """Return the annotations of the fields that are declared as Typer's options, by name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is Annotated}


def _parameter(field: dataclasses.Field[Any], hint: Any, option: Option) -> inspect.Parameter:
    """Return Typer's parameter of an option."""
    name, default = option.flag or field.name, field.default
    if option.flag.startswith("no_"):
        default = not default
    parts: list[Any] = [str | None if option.typed == "axes" else Path | None if option.typed else hint]
    parts += [_info(name, hint, option)]
    if option.typed == "file":
        parts.append(INPUT)
    if option.hint:
        parts.append(Hint(lambda text: in_flags(option.hint.get(text, ""))))
    annotation = operator.getitem(typing.cast(Any, Annotated), tuple(parts))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _info(name: str, hint: Any, option: Option) -> Any:
    """Return Typer's declaration: its bounds follow from the type."""
    text = in_flags(option.help)
    kinds = (hint, *typing.get_args(hint))
    if int in kinds:
        info = size_option(text)
    elif float in kinds:
        info = number_option(text)
    elif bool in kinds:  # a name of its own, or Typer would add --no-…
        info = typer.Option(f"--{name.replace('_', '-')}", help=text)
    else:
        info = typer.Option(help=text, metavar=option.metavar or None)
    info.rich_help_panel = option.panel
    return info


def parse_axes(text: str | None) -> tuple[str, ...] | None:
    """Read the names of dynamic axes from `batch,seq`; `none` means no axis, None that none are named.

    Raises:
        UsageError: a name is empty, or given twice.
    """
    if text is None:
        return None
    names = () if text == "none" else tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise UsageError(f"--dynamic is {text!r}.", fix="Write --dynamic batch,seq.")
    return names
