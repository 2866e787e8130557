"""The request and the report of a comparison with a reference: the float64 one, or another exported file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...core.documents.error_spread import ErrorSpread
from ...core.documents.window_view import WindowView
from ...core.errors import CheckFailed
from ...core.tolerance import Tolerance
from ...onnx_graph.onnx_file import OnnxFile
from ..inputs.arrays import save_arrays
from ..session import check_file
from .comparison import Comparison

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ParityRequest:
    """What to compare.

    Args:
        model: the exported file.
        against: the weights it was exported from, or another exported file.
        config: of a checkpoint, its configuration; by default the sidecar's, else the one beside the checkpoint.
        seeds: one set of random inputs each.
        inputs: an .npz of inputs instead.
        lengths: of the sequences, for a file that leaves them open; by default some around the window's multiples.
        atol: absolute tolerance instead of the dtype's.
        rtol: relative tolerance instead of the dtype's.
        provider: where to run the file.
        plugin: compiled kernels, as `runtime.session.load` takes them.
        causal: of a checkpoint of AFTLocal, whether it was exported as causal; by default the sidecar's word.
        keep_reference: keep the reference's outputs on the worst inputs too.
    """

    model: Path
    against: Path
    config: Path | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    inputs: Path | None = None
    lengths: tuple[int, ...] = ()
    atol: float | None = None
    rtol: float | None = None
    provider: str = "auto"
    plugin: str = "auto"
    causal: bool | None = None
    keep_reference: bool = False


@dataclass(frozen=True)
class Reference:
    """The reference as reports name it.

    Args:
        kind: "oracle": float64 mathematics on the checkpoint's weights; "file": another exported file, as it ran.
        dtype: of such a file: what chose its part of the tolerance.
        backend: what ran it.
        provider: where.
        checked: what its own export found when it was compared with a reference; None where nothing proves that.
    """

    kind: Literal["oracle", "file"]
    dtype: str | None = None
    backend: str | None = None
    provider: str | None = None
    checked: str | None = None


ORACLE = Reference("oracle")


@dataclass
class ParityReport:
    """What came out.

    Args:
        dtype: what chose the tolerance: the file's element type, "int8" if its linear layers are; of two files the
            coarser.
        provider: what really ran.
        model: the file.
        against: what it was compared with.
        tolerance: the criterion.
        windows: those of its attention layers, at the length of the file.
        plugin: path of the library whose compiled kernels computed the attention nodes; None if their body did.
        sidecar: the facts of the export; None where there are none.
        reference: what the file was compared with.
        comparisons: by description of the inputs, one comparison an output.
        notes: what the user should know.
        inputs: those of the worst comparison.
        outputs: the file's outputs on them, and the reference's as `NAME.reference`.
    """

    dtype: str
    provider: str
    model: Path
    against: Path
    tolerance: Tolerance
    windows: list[WindowView]
    plugin: str | None = None
    sidecar: Sidecar | None = None
    reference: Reference = ORACLE
    comparisons: list[tuple[str, Comparison]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inputs: Arrays = field(default_factory=dict)
    outputs: Arrays = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every output of every set of inputs is within its tolerance."""
        return all(comparison.passed for _, comparison in self.comparisons)

    def take(self, name: str, inputs: Arrays, outputs: Arrays, comparisons: Sequence[Comparison]) -> bool:
        """Add what one set of inputs gave.

        Args:
            name: of the inputs.
            inputs: of the file.
            outputs: of the file.
            comparisons: one an output.

        Returns:
            Whether these are the worst so far, whose arrays are kept.
        """
        before = [known.excess(self.tolerance) for _, known in self.comparisons]
        self.comparisons += [(name, comparison) for comparison in comparisons]
        worst = max(comparison.excess(self.tolerance) for comparison in comparisons)
        if before and worst <= max(before):
            return False
        self.inputs, self.outputs = inputs, outputs
        return True

    def rows(self) -> list[dict[str, Any]]:
        """One row an output and set of inputs."""
        return [
            {"output": c.name, "inputs": source, "passed": c.passed, **c.figures()} for source, c in self.comparisons
        ]

    def spreads(self) -> dict[str, ErrorSpread]:
        """How the errors of each output are spread, over all sets of inputs."""
        found: dict[str, ErrorSpread] = {}
        for _, comparison in self.comparisons:
            if comparison.spread is not None:
                known = found.get(comparison.name)
                found[comparison.name] = comparison.spread if known is None else known.merge(comparison.spread)
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "model": str(self.model),
            "against": str(self.against),
            "reference": asdict(self.reference),
            "passed": self.passed,
            "dtype": self.dtype,
            "provider": self.provider,
            "plugin": self.plugin,
            "tolerance": asdict(self.tolerance),
            "comparisons": self.rows(),
            "notes": self.notes,
            "errors": {name: spread.to_dict() for name, spread in self.spreads().items()},
            "windows": [view.to_dict() for view in self.windows],
            "sidecar": None if self.sidecar is None else self.sidecar.to_dict(),
        }

    def save(self, inputs: Path | None, outputs: Path | None, *, overwrite: bool = False) -> None:
        """Write the arrays of the worst comparison as .npz."""
        if inputs is not None:
            save_arrays(inputs, self.inputs, overwrite=overwrite)
        if outputs is not None:
            save_arrays(outputs, self.outputs, overwrite=overwrite)


def altered(model: Path | OnnxFile) -> list[str]:
    """A note where a file is not the one that the facts beside it were written for: it is compared all the same."""
    try:
        check_file(model)
    except CheckFailed as error:
        return [f"{error.what} {error.why}"]
    return []


def not_finite(inputs: Arrays) -> list[str]:
    """A note for each input with which nothing can be equal."""
    return [
        f"input {name!r} holds NaN or Inf: what comes out of it cannot be equal"
        for name, array in inputs.items()
        if not np.isfinite(array).all()
    ]
