"""Check that the written file reproduces the recorded outputs of the user's own model.

Every other check of a checkpoint's file compares two things that were made from one configuration. This one alone
sees a configuration that is not the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.documents.proof import likely
from ...core.documents.sidecar import CheckRecord
from ...core.errors import CheckFailed
from ...core.tensors import TensorSpec
from ...core.tolerance import Tolerance
from ...runtime.parity.compare import compare_golden, golden_record
from ...runtime.parity.golden import Golden, GoldenSample
from ...runtime.parity.runner import FileRunner
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from .golden_causes import trials_of, what_fits
from .parity import baseline_meter

Limits = Callable[[str, int], tuple[int, int | None]]


def open_golden(
    path: str | Path | None,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[str],
    token_limit: int | None,
    limits: Limits,
) -> Golden | None:
    """Read golden outputs before work begins, and refuse unusable ones.

    Args:
        path: the .npz file; None if there is none.
        inputs: of the file to write, dynamic axes by name.
        outputs: their names.
        token_limit: size of the vocabulary; None for embeddings.
        limits: the smallest and the largest size of a dynamic axis, by input and axis.

    Raises:
        UsageError: it cannot be read, or does not fit.
    """
    if path is None:
        return None
    golden = Golden.read(Path(path))
    for _ in golden.bind(inputs, outputs, token_limit, limits):
        pass
    return golden


def check_golden(
    candidate: FileRunner,
    golden: Golden,
    tolerance_of: Callable[[str], Tolerance],
    precision: str,
    source: SourceModel | None = None,
    causes: Callable[[GoldenSample], str] = lambda sample: "",
) -> CheckRecord:
    """Compare the written file with golden outputs; sequences too short to show the window prove nothing.

    Args:
        candidate: the written file.
        golden: inputs and outputs of the user's own model.
        tolerance_of: the criterion for an entry of `core.tolerance`.
        precision: of the file, an entry of `core.tolerance`.
        source: the checkpoint's model: its window, what its weights do not show, and its unmodified module, whose
            error in half precision is the baseline. None for a user's own module, which is the reference itself.
        causes: says what would explain a sample that differs; of a checkpoint its arguments are tried.

    Raises:
        UsageError: the golden file does not fit the file.
        CheckFailed: they differ; the text names the arguments.
    """
    precision = golden.coarsened(precision)
    tolerance = tolerance_of(precision)
    windows = [] if source is None else source.windows
    meter = None if source is None else baseline_meter(source, precision, tolerance)
    compared = list(compare_golden(candidate, golden, tolerance, skip_masked=bool(windows), meter=meter))
    found = [(sample.name, comparison) for sample, result in compared for comparison in result.comparisons]
    record = golden_record(found, golden, tolerance, windows, meter)
    if record.status == "failed":
        sample = next(
            (sample for sample, result in compared if not all(x.passed for x in result.comparisons)), compared[0][0]
        )
        explained = causes(sample) if source is None else tried(source, sample)
        raise CheckFailed(
            f"The exported file does not compute what your model computed: {golden.path}.",
            why=f"{record.detail[:1].upper()}{record.detail[1:]}.",
            fix=" ".join(filter(None, (explained, likely(() if source is None else source.not_in_weights)))),
        )
    return record


def tried(source: SourceModel, sample: GoldenSample) -> str:
    """Try other arguments of a checkpoint's model on a sample."""
    return what_fits(sample, ReferenceRunner(source).run, trials_of(source, sample))
