"""Give a function the arguments of a dataclass, so that each argument is declared once: as a field."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from ...exporter.options import Option, options_of

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
# Name of an older release → today's name, and today's value for each value; None where the values are the same.
OldNames = Mapping[str, tuple[str, Mapping[Any, Any] | None]]


def called_with(arguments: Callable[P, A], old: OldNames) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Let a function that takes an object of a dataclass be called with the arguments of that dataclass instead.

    Editors and type checkers see the parameters of the dataclass. The docstring gets a list of them from its options'
    help, and from the part `Args` of its own docstring.

    Args:
        arguments: the dataclass.
        old: arguments of older releases, which are taken with a warning.
    """

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        signature = inspect.signature(arguments)

        @functools.wraps(function)
        def call(*given: P.args, **named: P.kwargs) -> R:
            bound = signature.bind(*given, **_renamed(function.__name__, named, old))
            return function(arguments(*bound.args, **bound.kwargs))

        del call.__wrapped__  # type: ignore[attr-defined]  # what it is called with differs
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _documented(function.__doc__ or "", arguments, list(signature.parameters))
        return call

    return decorate


def _renamed(function: str, named: Mapping[str, Any], old: OldNames) -> dict[str, Any]:
    """Replace arguments of older releases by today's, with a warning."""
    renamed = dict(named)
    for name in old.keys() & named.keys():
        today, values = old[name]
        given = renamed.pop(name)
        value = given if values is None else values.get(given)
        warnings.warn(
            f"{function}({name}=…) is called {today}={value!r} now; the old name goes with the next release.",
            FutureWarning,
            stacklevel=3,
        )
        renamed.setdefault(today, value)
    return renamed


def _documented(text: str, arguments: Any, names: list[str]) -> str:
    """Return a docstring with a part `Args` before its part `Raises`."""
    own = inspect.cleandoc(arguments.__doc__ or "").partition("Args:\n")[2]
    said = {name: _help(option) for name, option in options_of(arguments).items()}
    said |= {name: " ".join(told.split()) for name, told in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", own, re.M)}
    lines = [_wrapped(f"{name}: {said[name]}") for name in names if name in said]
    before, raises, after = inspect.cleandoc(text).partition("Raises:")
    return "\n".join([before.rstrip(), "", "Args:", *lines, "", raises + after])


def _help(option: Option) -> str:
    """Return the help of an option as an argument; that of a flag `--no-…` says what False does."""
    return f"False: {option.help[:1].lower()}{option.help[1:]}" if option.flag.startswith("no_") else option.help


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 100, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
