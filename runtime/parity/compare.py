"""Compare a model with a reference, output by output: the one way in which this package finds two models equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.documents.window_view import WindowView
from ...core.errors import CheckFailed, UsageError
from ...core.tolerance import Tolerance, coarsest, tolerance_for
from ..session import Arrays
from .comparison import Comparison, compare_arrays
from .inputs import InputSets
from .report import ParityReport, ParityRequest, Reference, not_finite
from .runner import FileRunner, Runner, Sample
from .shared_inputs import shared_specs
from .spread import SequenceAxis


class Compared(NamedTuple):
    """What one set of inputs gave.

    Args:
        outputs: the candidate's.
        expected: the reference's, of the part that it computes.
        comparisons: one for each output of the reference.
    """

    outputs: Arrays
    expected: Arrays
    comparisons: list[Comparison]


def compare(
    candidate: Runner,
    reference: Runner,
    inputs: Arrays,
    tolerance: Tolerance,
    *,
    spread: bool = False,
    expected: Arrays | None = None,
) -> Compared:
    """Run a model and its reference on the same inputs, and compare the outputs by name.

    Args:
        candidate: the model in question.
        reference: what it has to equal.
        inputs: for both.
        tolerance: how far apart they may be.
        spread: note how the errors are spread by size and along the sequence.
        expected: the reference's outputs on these inputs, where they are known.

    Raises:
        CheckFailed: the candidate lacks an output, or it has another shape than the reference's.
        UsageError: one of them does not take the inputs.
    """
    outputs = candidate.run(inputs)
    if expected is None:
        expected = reference.run(inputs)
    missing = [name for name in expected if name not in outputs]
    if missing:
        raise CheckFailed(
            f"{candidate.name} has no output {missing[0]!r}.",
            why=f"{candidate.name} returns {', '.join(outputs)}; {reference.name} returns {', '.join(expected)}.",
        )
    sample = reference.sample(inputs)
    comparisons = []
    for name, wanted in expected.items():
        sequence = _sequence(candidate, reference, name, outputs[name].shape, inputs, sample) if spread else None
        sampled = _take(outputs[name], sample)
        comparisons.append(compare_arrays(name, sampled, wanted, tolerance, sequence=sequence))
    return Compared(outputs, expected, comparisons)


def worst_of(comparisons: Sequence[tuple[str, Comparison]], tolerance: Tolerance) -> tuple[str, Comparison]:
    """The comparison, with the name of its inputs, that is furthest beyond a tolerance, or nearest to it."""
    return max(comparisons, key=lambda named: named[1].excess(tolerance))


def _take(output: NDArray[Any], sample: Sample) -> NDArray[Any]:
    """The sampled part of an output; one of another size is returned as it is, and fails for its shape."""
    for axis, chosen in sample.items():
        if not -output.ndim <= axis < output.ndim or output.shape[axis] != len(chosen):
            return output
        output = np.compress(chosen, output, axis)
    return output


def _sequence(
    candidate: Runner, reference: Runner, name: str, shape: tuple[int, ...], inputs: Arrays, sample: Sample
) -> SequenceAxis | None:
    """Where the sequence is in an output: on the axis that one of the two says, if that has an input's size."""
    stated = (runner.sequence_axis(name) for runner in (candidate, reference))
    axis = next((axis for axis in stated if axis is not None), -2)
    if not -len(shape) <= axis < len(shape) or shape[axis] not in {n for x in inputs.values() for n in x.shape}:
        return None
    chosen = {axis % len(shape): chosen for axis, chosen in sample.items()}.get(axis % len(shape))
    return SequenceAxis(axis, None if chosen is None else np.flatnonzero(chosen))


def compare_models(
    request: ParityRequest,
    candidate: FileRunner,
    reference: Runner,
    described: Reference,
    windows: Sequence[WindowView],
    notes: Sequence[str],
    progress: Callable[[str], None],
) -> ParityReport:
    """Compare a file with its reference in all its run modes, on every set of inputs.

    Args:
        request: seeds, lengths, inputs and tolerances.
        candidate: the file.
        reference: what it has to equal.
        described: the reference as reports name it; its element type counts if it is coarser than the candidate's.
        windows: of the model's attention layers.
        notes: what the user should know of the two.
        progress: called with each step as it begins.

    Raises:
        UsageError: the two do not take the same inputs, or not those asked for.
        CheckFailed: an output is missing or has another shape than the reference's.
    """
    specs = shared_specs(candidate.inputs, reference.inputs, (candidate.name, reference.name))
    precision = coarsest([candidate.precision, described.dtype or candidate.precision])
    tolerance = tolerance_for(precision, request.atol, request.rtol)
    geometries = [view.geometry for view in windows if not view.biases]
    sets = InputSets(request, specs, (candidate, reference), geometries)
    report = ParityReport(
        precision,
        candidate.provider,
        request.model,
        request.against,
        tolerance,
        [view if sets.length is None else replace(view, length=sets.length) for view in windows],
        candidate.plugin,
        candidate.sidecar,
        described,
        notes=[*notes, *sets.notes],
    )
    refusal = ""
    for inputs in sets:
        refused = reference.refuses(inputs.arrays)
        if refused is not None:
            refusal = f"not compared at {inputs.sizes}: {refused}"
            report.notes += [refusal] if refusal not in report.notes else []
            continue
        report.notes += not_finite(inputs.arrays)
        expected = None
        for mode in candidate.modes():
            progress(f"Comparing: {inputs.name}{mode.mode}")
            outputs, expected, comparisons = compare(
                mode, reference, inputs.arrays, tolerance, spread=inputs.largest, expected=expected
            )
            report.take(inputs.name + mode.mode, inputs.arrays, outputs, comparisons)
    if not report.comparisons:
        raise UsageError("Nothing could be compared.", why=f"{refusal}.", fix="Give inputs of other lengths.")
    if request.keep_reference:
        whole = reference.unsampled().run(report.inputs)
        report.outputs = report.outputs | {f"{name}.reference": x for name, x in whole.items()}
    return report
