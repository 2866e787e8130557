"""Declare the paths on the command line: inputs to read, outputs to write, and their kinds.

Every path that a command takes is declared with one of these, `Annotated[Path, typer.Option(...), INPUT]`. Before a
command begins, `checked` refuses outputs that would lose something, and reserves the others until it has ended.
"""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core import at_work
from ...core.storage.file_kinds import ONNX, kind_named, name_error

if TYPE_CHECKING:
    from ...core.storage.file_kinds import Kind
    from ...core.storage.outputs import Output


@dataclass(frozen=True)
class InputPath:
    """A path, or a list of them, that the command reads."""


class OutputPath:
    """A path that the command writes, as one of these kinds; its suffix says which."""

    def __init__(self, *kinds: Kind) -> None:
        self.kinds = kinds


INPUT = InputPath()
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing files, if they are of the same kind.")]


def declared_paths(command: Callable[..., Any]) -> dict[str, InputPath | OutputPath]:
    """Return the declaration of each path of a command, by the name of its parameter."""
    hints = typing.get_type_hints(command, include_extras=True)
    found = {}
    for name, hint in hints.items():
        # Python 3.10 turns a parameter that is None by default into Optional[Annotated[…]].
        for part in (hint, *typing.get_args(hint)):
            for extra in getattr(part, "__metadata__", ()):
                if isinstance(extra, InputPath | OutputPath):
                    found[name] = extra
    return found


def checked(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command so that its outputs are checked and reserved before it runs.

    The command then raises UsageError where an output has the name of another kind, is one of the inputs, is no regular
    file, exists and there is no --force, is a file of another kind, or is being written by another process.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        given = declared_paths(command)
        inputs = [path for name in given if isinstance(given[name], InputPath) for path in _listed(options, name)]
        at_work.reads(inputs)
        for name, path in given.items():
            if isinstance(path, OutputPath) and path.kinds == (ONNX,) and options.get(name) is not None:
                options[name] = file_of_folder(options[name])
        outputs = [
            output_of(options[name], path.kinds)
            for name, path in given.items()
            if isinstance(path, OutputPath) and options.get(name) is not None
        ]
        if not outputs:
            return command(*arguments, **options)
        from ...core.storage.outputs import reserved

        with reserved(outputs, inputs=inputs, overwrite=bool(options.get("force"))):
            return command(*arguments, **options)

    return run


def file_of_folder(path: Path) -> Path:
    """Return the model's file in a folder: a name without a suffix, as `encoder`, means `encoder/model.onnx`."""
    if path.name in ("", "..") or path.suffix == ONNX.suffixes[0]:
        return path
    names_folder = not path.suffix or os.path.isdir(path)  # noqa: PTH112 (`Path.is_dir` raises where a name is too long)
    return path / "model.onnx" if names_folder else path


def _listed(options: Mapping[str, Any], name: str) -> list[Path]:
    value = options.get(name)
    return [] if value is None else [value] if isinstance(value, Path) else list(value)


def output_of(path: Path, kinds: tuple[Kind, ...]) -> Output:
    """Return the output, with the kind of its suffix.

    Raises:
        UsageError: the suffix belongs to no kind.
    """
    from ...core.storage.outputs import Output

    kind = kind_named(path, kinds)
    if kind is None:
        raise name_error(path, kinds)
    return Output(path, kind)
