"""Try what would explain golden outputs that differ: other values of arguments that no weights show, one at a time.

Each trial runs the reference on the recorded inputs. What brings its outputs to the recorded ones, far closer than the
values that were given, is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import LocalAttnError
from ...runtime.parity.golden import GoldenSample
from ...runtime.session import Arrays
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel

# The trials may take this many seconds in all.
_SECONDS = 30.0
# A value fits if it leaves less than this share of the error.
_SHARE = 0.02
# At most this many values that fit are named.
_NAMED = 3
_WINDOWS = ("window_size", "local_attn_window_size", "local_window_size")
# After the likeliest windows every one up to this size is tried, while there is time.
_EVERY = 257
_USUAL = (4, 8, 16, 32, 64, 100, 128, 256, 512, 1024)


class Trial(NamedTuple):
    """One other value: what it is called, the value that was given, and the reference with it."""

    name: str
    value: object
    given: object
    run: Callable[[Arrays], Arrays]


def other_values(name: str, given: object, length: int) -> list[Any]:
    """List other values of an argument, the likeliest first.

    Args:
        name: the argument.
        given: its value.
        length: of the recorded sequences: a longer window changes nothing.
    """
    if isinstance(given, bool) or given is None:
        return [not given] if isinstance(given, bool) else [True, False]
    if not isinstance(given, int):
        return []
    if name in _WINDOWS:
        near = (given + 1, given - 1, 2 * given, given // 2, 3 * given, 4 * given, given // 4)
        return [n for n in dict.fromkeys((*near, *_USUAL, *range(1, _EVERY))) if 0 < n <= 2 * length and n != given]
    others = dict.fromkeys((given + 1, given - 1, 0, 1, 2, 3))
    return [n for n in others if n >= 0 and n != given] if name.startswith("look") else []


def trials_of(source: SourceModel, sample: GoldenSample) -> Iterator[Trial]:
    """Yield trials for a checkpoint: other values of what its weights do not show."""
    length = max((x.shape[1] for x in sample.inputs.values() if x.ndim > 1), default=1)
    values = source.args.model_dump()
    names = [name for name in source.not_in_weights if name in values or name in ("causal", "hyper_connections")]

    def runner(other: Callable[[], SourceModel]) -> Callable[[Arrays], Arrays]:
        return lambda inputs: ReferenceRunner(other()).run(inputs)

    for name in sorted(names, key=lambda name: name not in _WINDOWS):
        if name == "hyper_connections":
            mixed = not source.mixes_residuals
            yield Trial(name, "those of another release", "", runner(lambda mixed=mixed: _mixing(source, mixed)))  # type: ignore[misc]
            continue
        if name not in values:
            shapes = replace(source.shapes, causal=not source.shapes.causal)
            yield Trial(name, shapes.causal, source.shapes.causal, runner(lambda shapes=shapes: source.at(shapes)))  # type: ignore[misc]
            continue
        for value in other_values(name, values[name], length):
            changed = {**values, name: value}
            yield Trial(name, value, values[name], runner(lambda changed=changed: _with(source, changed)))  # type: ignore[misc]


def _with(source: SourceModel, values: Mapping[str, Any]) -> SourceModel:
    return source.at(source.shapes, type(source.args)(**values))


def _mixing(source: SourceModel, mixes_residuals: bool) -> SourceModel:
    return SourceModel(source.class_name, source.args, source.state, mixes_residuals, source.shapes)


def what_fits(sample: GoldenSample, as_given: Callable[[Arrays], Arrays], trials: Iterable[Trial]) -> str:
    """Say which other value fits a recorded sample, or that none of those tried does; "" if nothing can be tried.

    Args:
        sample: recorded inputs and outputs.
        as_given: the reference as it was configured.
        trials: other values.
    """
    end = time.monotonic() + _SECONDS
    before = _error(sample, as_given)
    found: list[tuple[float, Trial]] = []
    tried: dict[str, int] = {}
    for trial in trials:
        if time.monotonic() > end:
            break
        tried[trial.name] = tried.get(trial.name, 0) + 1
        error = _error(sample, trial.run)
        if error < _SHARE * before:
            found.append((error, trial))
    if not tried:
        return ""
    if not found:
        return f"Tried {sum(tried.values())} other values of {', '.join(tried)}, one at a time: none fits."
    best = min(error for error, _ in found)
    fitting = [trial for error, trial in found if error <= 10 * best][:_NAMED]
    said = " or ".join(_worded(trial) for trial in fitting)
    return f"Tried: {said} would give the recorded outputs."


def _worded(trial: Trial) -> str:
    return f"{trial.name} {trial.value}" + ("" if trial.given == "" else f" (not {trial.given})")


def _error(sample: GoldenSample, run: Callable[[Arrays], Arrays]) -> float:
    """Return the root mean square of the difference to the recorded outputs; infinite where the reference fails."""
    try:
        outputs = run(sample.inputs)
    except (LocalAttnError, RuntimeError, ValueError, IndexError):  # a value that the class does not accept
        return float("inf")
    squares: list[NDArray[np.float64]] = []
    for name, wanted in sample.outputs.items():
        actual = outputs.get(name)
        if actual is None or actual.shape != wanted.shape:
            return float("inf")
        squares.append(np.square(actual.astype(np.float64) - wanted.astype(np.float64)).ravel())
    error = float(np.sqrt(np.mean(np.concatenate(squares))))
    return error if np.isfinite(error) else float("inf")
