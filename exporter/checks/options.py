"""Define the options of a file's checks."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.tolerance import Tolerance, tolerance_for


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How thoroughly a file is checked, and what is accepted.

    Args:
        seeds: seeds of the parity check; by default a few.
        atol: absolute tolerance of the parity check instead of the precision's.
        rtol: relative tolerance instead of the precision's.
        quick: compare on one set of inputs, and leave out the checks that the table of checks calls long.
        allow_quadratic: accept tensors that are square in the sequence length.
        allow_wide_integers: accept integers beyond 32 bits, which some runtimes compute wrongly without an error.
    """

    seeds: tuple[int, ...] | None = None
    atol: float | None = None
    rtol: float | None = None
    quick: bool = False
    allow_quadratic: bool = False
    allow_wide_integers: bool = False

    def tolerance(self, precision: str) -> Tolerance:
        """Return the tolerance for a file of this precision, an entry of `core.tolerance`."""
        return tolerance_for(precision, self.atol, self.rtol)
