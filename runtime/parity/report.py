"""The request and the report of a comparison with a reference: the float64 one, or another exported file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...core.documents.error_spread import ErrorSpread
from ...core.documents.proof import likely, not_proven
from ...core.documents.report import Report
from ...core.documents.sidecar import PARITY, CheckRecord, Sidecar
from ...core.documents.window_view import WindowView
from ...core.error_texts import argument
from ...core.errors import CheckFailed
from ...core.tolerance import Tolerance
from ...onnx_graph.onnx_file import OnnxFile
from ..inputs.arrays import save_arrays
from ..session import check_file
from .baseline import both_errors
from .comparison import Comparison, largest_error, merged, outcome_of, unproven_outputs

Arrays = dict[str, NDArray[Any]]
# Comparisons, each with the name of its inputs.
Named = Sequence[tuple[str, Comparison]]


@dataclass(frozen=True)
class ParityRequest:
    """A request for a comparison.

    Args:
        model: the exported file.
        against: the weights it was exported from, or another exported file; the golden outputs if there is no other
            reference.
        config: a checkpoint's configuration; by default the sidecar's, else the one in the checkpoint's folder.
        seeds: one set of inputs at the largest size each.
        inputs: an .npz of inputs instead of text, or random ones.
        lengths: of the sequences, for a file that takes several; by default some around the window's multiples.
        atol: absolute tolerance instead of the dtype's.
        rtol: relative tolerance instead of the dtype's.
        provider: where to run the file.
        plugin: compiled kernels, as `runtime.session.load` takes them.
        runtime: what runs the file, as `runtime.session.load` takes it.
        causal: of a checkpoint of AFTLocal, whether it was exported as causal; by default as the sidecar states.
        keep_reference: keep the reference's outputs on the worst inputs too.
        golden: an .npz of inputs and of the outputs that the user's own model computed from them.
        entry: of a checkpoint with several sets of weights, the one to compare with; by default the sidecar's.
        folder: the folder of the model's tokenizer; by default that of the model, or of the reference.
        rounds: round fp16 on the CPU as a GPU does.
        factory: the function that makes the user's own module; by default the one of the export, where the user's own
            cache remembers it.
        factory_args: its arguments, JSON; by default those of the export.
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
    runtime: str = "auto"
    causal: bool | None = None
    keep_reference: bool = False
    golden: Path | None = None
    entry: str | None = None
    folder: Path | None = None
    rounds: bool = True
    factory: str | None = None
    factory_args: str | None = None

    @property
    def folders(self) -> list[Path]:
        """Folders that may contain a tokenizer, best first."""
        places = [path if path.is_dir() else path.parent for path in (self.model, self.against)]
        return list(dict.fromkeys([*([] if self.folder is None else [self.folder]), *places]))


@dataclass(frozen=True)
class Reference:
    """The reference in reports.

    Args:
        kind: "float64": float64 mathematics on the checkpoint's weights; "file": another exported file, as it ran;
            "golden": what the user's own model computed.
        dtype: of such a file: it chooses the tolerance if it is the coarser of the two.
        backend: what ran it.
        provider: where.
        checked: the result of its own export's comparison with a reference; None if there is no proof.
    """

    kind: Literal["float64", "file", "golden"]
    dtype: str | None = None
    backend: str | None = None
    provider: str | None = None
    checked: str | None = None


FLOAT64 = Reference("float64")


@dataclass(repr=False)
class ParityReport(Report):
    """The result of a comparison.

    Args:
        dtype: the key of the tolerance: the file's element type, "int8" if its linear layers are; of two files the
            coarser.
        provider: the provider that really ran.
        model: the file.
        against: the reference.
        tolerance: the criterion; in half precision with the unmodified module's error, where that is known.
        windows: the windows of its attention layers, at the length of the file.
        compared_windows: after a failed comparison, the windows of the file and of its reference in words.
        plugin: path of the library whose compiled kernels computed the attention nodes; None if their ONNX functions
            did.
        sidecar: the export's sidecar; None if there is none.
        reference: what the file was compared with.
        comparisons: by description of the inputs, one comparison an output.
        notes: what the user should know.
        inputs: the inputs of the worst comparison.
        outputs: the file's outputs on them, and the reference's as `NAME.reference`.
        golden: what the check against golden outputs found; None without any.
        golden_count: how many comparisons, the first ones, are with golden outputs.
        golden_tolerance: the criterion of these; None without any.
        unproven: arguments that the weights do not determine, and that no golden outputs proved.
        fits: which other values would give golden outputs that differ, or that none of those tried does.
        saved: files of arrays that were written.
        range: whether values of fp16 stayed within its range; None where that was not watched.
        alone: names of the inputs that are also judged separately.
        judged_on: what the two were compared on, in words.
    """

    dtype: str
    provider: str
    model: Path
    against: Path
    tolerance: Tolerance
    windows: list[WindowView]
    plugin: str | None = None
    sidecar: Sidecar | None = None
    reference: Reference = FLOAT64
    comparisons: list[tuple[str, Comparison]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inputs: Arrays = field(default_factory=dict)
    outputs: Arrays = field(default_factory=dict)
    golden: CheckRecord | None = None
    golden_count: int = 0
    golden_tolerance: Tolerance | None = None
    unproven: list[str] = field(default_factory=list)
    fits: str = ""
    saved: list[Path] = field(default_factory=list)
    compared_windows: list[dict[str, Any]] = field(default_factory=list)
    range: CheckRecord | None = None
    alone: set[str] = field(default_factory=set)
    judged_on: str = ""

    @property
    def passed(self) -> bool:
        """Whether every output, over all sets of inputs, is within its tolerance, and so are the golden outputs.

        False where nothing was compared.
        """
        others = [record for record in (self.golden, self.range) if record is not None]
        outputs = self.overall().values()
        equal = bool(outputs) and all(comparison.passed for comparison in outputs) and not self.failed_alone
        return equal and all(record.status != "failed" for record in others)

    @property
    def failed_alone(self) -> Named:
        """The comparisons that are judged separately and fail."""
        return [
            (name, part) for name, part in self.with_reference if name in self.alone and not part.judge(self.tolerance)
        ]

    @property
    def verdict(self) -> str:
        """The result in words: equal, NOT equal, or equal without proof."""
        if not self.passed:
            return "NOT equal"
        proven = any(check.status == "passed" for check in self.checks if check is not self.range)
        return "equal" if proven else "equal, but this proves nothing,"

    @property
    def with_golden(self) -> Named:
        """The comparisons with golden outputs, which have another criterion."""
        return self.comparisons[: self.golden_count]

    @property
    def with_reference(self) -> Named:
        """The comparisons with the reference; none if only golden outputs were compared."""
        return self.comparisons[self.golden_count :]

    def overall(self) -> dict[str, Comparison]:
        """Return the comparison of each output over all sets of inputs.

        Golden outputs are skipped if there is another reference, because they have a separate check.
        """
        return overall(self.with_reference or self.with_golden, self.tolerance)

    @property
    def files(self) -> list[Path]:
        """The files of arrays that were written."""
        return self.saved

    @property
    def checks(self) -> list[CheckRecord]:
        """The check against golden outputs, if any, then the one against the reference."""
        golden = [record for record in (self.golden, self.range) if record is not None]
        if not self.with_reference:
            return golden
        found = list(self.overall().values())
        worst = max(found, key=lambda comparison: comparison.severity(self.tolerance))
        alone = self.failed_alone
        passed = all(comparison.passed for comparison in found) and not alone
        if alone and all(comparison.passed for comparison in found):
            worst = alone[0][1]
        nothing, why = unproven_outputs(found, self.tolerance)
        detail = f"{largest_error([worst])} against {self.against} ({self.tolerance.describe()})"
        detail += f", on '{alone[0][0]}' alone" if alone else ""
        detail += f", {self.judged_on}" if self.judged_on else ""
        detail += f"; {why}" if passed and why else ""
        status = outcome_of(passed, nothing)
        return [*golden, CheckRecord(name=PARITY, status=status, detail=detail, figures=worst.figures())]

    def headline(self) -> str:
        """Return the result as one line: equal, or not equal."""
        return f"{self.model} and {self.against} are {self.verdict.rstrip(',')}"

    @property
    def warnings(self) -> list[str]:
        """What these comparisons do not prove, or the likely cause if golden outputs differ."""
        if self.golden is not None and self.golden.status == "failed":
            more = self.fits
            if self.reference.kind == "golden" and self.unproven:
                more = f"With {argument('against')} and the checkpoint, other values of them are tried."
            return [" ".join(filter(None, ("golden outputs differ.", more, likely(self.unproven))))]
        _, why = unproven_outputs(self.overall().values(), self.tolerance)
        doubts = [f"{self.model}: {why}"] if why and self.passed else []
        return [*doubts, *not_proven(self.unproven, str(self.model))]

    def take(self, name: str, inputs: Arrays, outputs: Arrays, comparisons: Sequence[Comparison]) -> None:
        """Add the result of one set of inputs; the file's inputs and outputs are kept if it is the worst so far."""
        before = [known.severity(known.tolerance) for _, known in self.comparisons]
        self.comparisons += [(name, comparison) for comparison in comparisons]
        worst = max(comparison.severity(comparison.tolerance) for comparison in comparisons)
        if not before or worst > max(before):
            self.inputs, self.outputs = inputs, outputs

    def against_baseline(self) -> list[str]:
        """Describe each output's error and the unmodified module's; nothing if no baseline applies."""
        baseline = self.tolerance.baseline
        if baseline is None:
            return []
        return [f"{name}: {both_errors(whole, baseline)}" for name, whole in self.overall().items()]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each output and set of inputs."""
        passed = verdicts(self.with_golden, self.golden_tolerance or self.tolerance)
        passed += verdicts(self.with_reference, self.tolerance)
        alone = {id(part) for _, part in self.failed_alone}
        passed = [good and id(part) not in alone for good, (_, part) in zip(passed, self.comparisons, strict=True)]
        return [
            {"output": c.name, "inputs": source, "passed": verdict, **c.figures()}
            for (source, c), verdict in zip(self.comparisons, passed, strict=True)
        ]

    def spreads(self) -> dict[str, ErrorSpread]:
        """Return how the errors of each output are distributed, over all sets of inputs of the longest sequence."""
        found: dict[str, ErrorSpread] = {}
        for _, comparison in self.comparisons:
            spread, known = comparison.spread, found.get(comparison.name)
            if spread is None:
                continue
            if known is None or spread.positions > known.positions:
                found[comparison.name] = spread
            elif spread.positions == known.positions:
                found[comparison.name] = known.merge(spread)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "model": str(self.model),
            "against": str(self.against),
            "reference": asdict(self.reference),
            "passed": self.passed,
            "outcomes": self.outcomes,
            "checks": [check.model_dump(mode="json") for check in self.checks],
            "dtype": self.dtype,
            "provider": self.provider,
            "plugin": self.plugin,
            "tolerance": asdict(self.tolerance),
            "comparisons": self.rows(),
            "against_baseline": self.against_baseline(),
            "beside_baseline": self.against_baseline(),  # the name of older releases, kept for one more
            "overall": [{"output": name, "passed": c.passed, **c.figures()} for name, c in self.overall().items()],
            "notes": self.notes,
            "warnings": self.warnings,
            "golden": None if self.golden is None else self.golden.model_dump(mode="json"),
            "range": None if self.range is None else self.range.model_dump(mode="json"),
            "judged_on": self.judged_on,
            "errors": {name: spread.to_dict() for name, spread in self.spreads().items()},
            "windows": [view.to_dict() for view in self.windows],
            "compared_windows": self.compared_windows,
            "sidecar": None if self.sidecar is None else self.sidecar.to_dict(),
        }

    def save(self, inputs: Path | None, outputs: Path | None, *, overwrite: bool = False) -> None:
        """Write the arrays of the worst comparison as .npz."""
        for path, arrays in ((inputs, self.inputs), (outputs, self.outputs)):
            if path is not None:
                save_arrays(path, arrays, overwrite=overwrite)
                self.saved.append(path)


def overall(found: Named, tolerance: Tolerance) -> dict[str, Comparison]:
    """Merge comparisons on several sets of inputs into one for each output, with this tolerance."""
    by_output: dict[str, list[Comparison]] = {}
    for _, comparison in found:
        by_output.setdefault(comparison.name, []).append(comparison)
    return {name: merged(parts, tolerance) for name, parts in by_output.items()}


def verdicts(found: Named, tolerance: Tolerance) -> list[bool]:
    """Return whether each comparison passes.

    If an output fails over all sets of inputs, each set is judged separately; if each would pass, all fail.
    """
    passed = [True] * len(found)
    for name, whole in overall(found, tolerance).items():
        if not whole.passed:
            places = [place for place, (_, part) in enumerate(found) if part.name == name]
            alone = {place: found[place][1].judge(tolerance) for place in places}
            for place in places:
                passed[place] = alone[place] and not all(alone.values())
    return passed


def altered(model: Path | OnnxFile) -> list[str]:
    """Note that a sidecar was not written for this file, which is compared anyway."""
    try:
        check_file(model)
    except CheckFailed as error:
        return [f"{error.what} {error.why}"]
    return []


def not_finite(inputs: Arrays) -> list[str]:
    """Note each input with NaN or Inf, for which no outputs can be equal."""
    return [
        f"input {name!r} contains NaN or Inf, so outputs cannot be compared"
        for name, array in inputs.items()
        if not np.isfinite(array).all()
    ]
