"""The request for a bisection and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .causes import Cause
from .evidence import Measured


@dataclass(frozen=True)
class BisectRequest:
    """A request to compare a file with its model at every module boundary.

    Args:
        model: an exported file (.onnx), or an engine in the folder of the file it was built from.
        checkpoint: its weights; None for those that the function makes.
        config: configuration file; by default the sidecar's, else the one in the checkpoint's folder.
        seed: seed of the random inputs.
        inputs: an .npz of inputs to use instead of random ones.
        atol: absolute tolerance instead of the dtype's, in units of each value's root mean square.
        rtol: relative tolerance instead of the dtype's.
        provider: where to run the file.
        plugin: the plugin library that an engine was built with, as `runtime.session.load` takes it.
        factory: the function that makes the user's own module; by default the one of the export.
        factory_args: its arguments, JSON; by default those of the export.
        entry: the set of weights to compare with, where the checkpoint holds several; by default the sidecar's.
    """

    model: Path
    checkpoint: Path | None
    config: Path | None = None
    seed: int = 0
    inputs: Path | None = None
    atol: float | None = None
    rtol: float | None = None
    provider: str = "auto"
    plugin: str = "auto"
    entry: str | None = None
    factory: str | None = None
    factory_args: str | None = None


@dataclass(frozen=True)
class Fault:
    """The first module whose output leaves the tolerance.

    Args:
        module: its path in the PyTorch model; "" is the model itself.
        boundary: the boundary that is wrong.
        before: the boundaries it is computed from, all within tolerance.
        cause: the likely cause.
    """

    module: str
    boundary: Measured
    before: list[Measured]
    cause: Cause

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {
            "module": self.module,
            "boundary": self.boundary.to_dict(),
            "before": [row.to_dict() for row in self.before],
            "cause": self.cause.name,
            "evidence": self.cause.evidence,
        }


@dataclass(repr=False)
class BisectReport:
    """The result of a bisection.

    Args:
        dtype: the file's element type.
        provider: the provider that ran it.
        rows: every boundary, in the order the file computes them.
        fault: the first boundary out of tolerance, explained; None if there is none.
        notes: what the user should know.
    """

    dtype: str
    provider: str
    rows: list[Measured]
    fault: Fault | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every boundary is within the tolerance; False if none was compared."""
        return self.fault is None and bool(self.rows)

    def __bool__(self) -> bool:
        """Return `passed`."""
        return self.passed

    def __repr__(self) -> str:
        """Return the verdict in one line."""
        verdict = "all agree" if self.fault is None else f"{self.fault.module or 'the model'} differs"
        return f"<BisectReport: {len(self.rows)} module boundaries, {verdict}>"

    @property
    def largest(self) -> Measured:
        """The boundary with the largest error relative to its own size."""
        return max(self.rows, key=lambda row: row.comparison.relative_rms)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {
            "passed": self.passed,
            "dtype": self.dtype,
            "provider": self.provider,
            "fault": None if self.fault is None else self.fault.to_dict(),
            "largest": self.largest.to_dict(),
            "boundaries": [row.to_dict() for row in self.rows],
            "notes": self.notes,
        }
