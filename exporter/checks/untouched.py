"""Check: the file's outputs equal those of the user's untouched module.

The reference is the module as the user wrote it, run by PyTorch: in float64 where it can be doubled, so that the
difference is the file's own error, else in fp32. With open axes it runs over a sweep of sizes, at which upstream pads
or does not; sizes that it refuses itself are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import CheckFailed, UsageError
from ...core.sidecar import CheckRecord
from ...core.tolerance import Tolerance
from ...runtime.compare import Comparison
from ...runtime.session import Session
from .parity import compare_outputs

Arrays = dict[str, NDArray[Any]]
_NAME = "parity"


@dataclass(frozen=True)
class Trial:
    """One set of inputs, and what it is called in reports."""

    name: str
    inputs: Arrays


def check_untouched(
    session: Session,
    reference: Callable[[Arrays], Arrays],
    against: str,
    trials: Iterable[Trial],
    tolerance: Tolerance,
) -> CheckRecord:
    """Compare on every trial; the figures are those of the worst.

    Args:
        session: the written file.
        reference: the untouched module, or an oracle.
        against: what that is, for the report.
        trials: inputs for both; the first must be one the module takes.
        tolerance: how far apart they may be.
    """
    worst: Comparison | None = None
    worst_trial, ran, refused, failed = "", 0, [], []
    for trial in trials:
        try:
            expected = reference(trial.inputs)
        except Exception as error:
            if not ran:
                raise
            refused.append(f"{trial.name} ({type(error).__name__})")
            continue
        ran += 1
        for comparison in compare_outputs(_run(session, trial), expected, tolerance):
            if not comparison.passed:
                failed.append(trial.name)
            if worst is None or comparison.excess(tolerance) > worst.excess(tolerance):
                worst, worst_trial = comparison, trial.name
    assert worst is not None
    detail = (
        f"max error {worst.max_abs:.1e} against {against} (tolerance {tolerance.atol:g} + "
        f"{tolerance.rtol:g}·|x|), {ran} sets of inputs, worst at {worst_trial}"
    )
    if refused:
        detail += f"; which itself refuses {len(refused)}: {', '.join(refused[:3])}"
    if failed:
        detail = f"{len(failed)} of {ran} sets of inputs differ ({', '.join(dict.fromkeys(failed[:5]))}); {detail}"
    figures = {**worst.figures(), "trials": ran, "refused": len(refused)}
    return CheckRecord(name=_NAME, status="failed" if failed else "passed", detail=detail, figures=figures)


def _run(session: Session, trial: Trial) -> Arrays:
    """The file on a trial that the module takes: it has to take it too."""
    try:
        return session.run(trial.inputs)
    except UsageError as error:
        raise CheckFailed(f"The file refuses what the module takes: {trial.name}.", why=error.what) from error


def check_repeats(reference: Callable[[Arrays], Arrays], inputs: Arrays) -> None:
    """Refuse a module that answers the same question differently.

    Raises:
        UsageError: it does.
    """
    first, second = reference(inputs), reference(inputs)
    for name, array in first.items():
        if not np.array_equal(array, second[name], equal_nan=True):
            raise UsageError(
                "The module gives two answers to the same inputs.",
                why=f"Its output {name!r} differs from run to run in evaluation mode, so nothing can be compared.",
                fix="Turn off what is random in it.",
            )
