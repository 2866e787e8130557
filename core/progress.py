"""Report the steps of a long call to the caller, and log them with the seconds that each took."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

Progress = Callable[[str], None]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def timed_steps(log: logging.Logger) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a decorator that logs each step a function reports to its argument `progress`.

    A step is logged at INFO when the next begins or the call ends.

    Args:
        log: logger of the function's module.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            with _timed(log, bound.arguments["progress"]) as bound.arguments["progress"]:
                return function(*bound.args, **bound.kwargs)

        return call

    return decorate


@contextmanager
def _timed(log: logging.Logger, progress: Progress) -> Iterator[Progress]:
    began, current = time.perf_counter(), ""

    def end(how: str) -> None:
        if current:
            log.info("%s: %s %.2f s", current, how, time.perf_counter() - began)

    def step(text: str) -> None:
        nonlocal began, current
        end("took")
        began, current = time.perf_counter(), text
        progress(text)

    try:
        yield step
    except BaseException:
        end("failed after")
        raise
    end("took")
