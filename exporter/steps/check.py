"""Check: a step file, called again and again from an empty cache, equals the float64 oracle at every position.

The oracle reads the whole sequence at once and knows no cache. The sequence is several windows longer than the
ring, so that every slot has been overwritten, and a lost or a stale key would show. Chunks are judged so too, and then
followed by single tokens, which must find in their caches what the step file itself would have left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.sidecar import CheckRecord
from ...core.step_node import ring_slots
from ...core.tolerance import Tolerance
from ...runtime.arrays import random_inputs
from ...runtime.compare import Comparison
from ...runtime.error_spread import SequenceAxis
from ...runtime.session import Session
from ..checks.parity import compare_outputs
from ..models.aft_local.step_module import ring_keys
from ..models.family import ShapeRequest
from ..source import SourceModel
from .source import POSITION, StepSource

Arrays = Mapping[str, NDArray[Any]]
# Single tokens after the chunks.
_AFTER_CHUNKS = 32
_WINDOWS = 3


def check_step_parity(
    session: Session, source: StepSource, dtype: str, tolerance: Tolerance, then: Session | None = None
) -> CheckRecord:
    """Run a whole sequence through a step or chunk file and compare each position with the oracle.

    Args:
        session: the written file.
        source: what it was exported from.
        dtype: "fp32" or "fp16".
        tolerance: the criterion.
        then: the step file that goes on after the chunks; without it the chunks take the whole sequence.
    """
    whole = _whole(source, then is not None)
    length = whole.shapes.seq_len
    inputs = random_inputs(whole.inputs(dtype), 0, token_limit=whole.token_limit)
    chunks = max(1, (length - (_AFTER_CHUNKS if then is not None else 0)) // source.chunk)
    data = _on_full_batch(inputs, source, whole)
    outputs, caches = run_steps(session, source, dtype, data, 0, chunks, None)
    if then is not None:
        single, done = StepSource(source.source, 1), chunks * source.chunk
        more, _ = run_steps(then, single, dtype, data, done, length - done, caches)
        outputs += more
    output = np.concatenate(outputs, axis=source.kind.length_axis)
    comparisons = _of_few(output, source, whole, inputs, tolerance)
    worst = max(comparisons, key=lambda comparison: comparison.excess(tolerance))
    ring = slots(source.source)
    wrapped = (length - ring) / whole.window_size
    proven = all(comparison.passed for comparison in comparisons)
    detail = (
        f"max error {worst.max_abs:.1e} against the float64 oracle (tolerance {tolerance.atol:g} + "
        f"{tolerance.rtol:g}·|x|) over {length} positions, "
    )
    if proven and wrapped <= 0:
        detail += f"all that the model has; the ring of {ring} slots is never full, which proves nothing about it"
        return CheckRecord(name="parity", status="not proven", detail=detail, figures=worst.figures())
    return CheckRecord(
        name="parity",
        status="passed" if proven else "failed",
        detail=detail + f"{wrapped:.3g} windows beyond the ring's {ring} slots",
        figures=worst.figures(),
    )


def check_length(source: StepSource) -> SourceModel:
    """The model at the sequence that one file alone is checked with, and the sequences of its batch that are."""
    return _whole(source, goes_on=False)


def compare_steps(
    session: Session, source: StepSource, dtype: str, inputs: Arrays, tolerance: Tolerance
) -> tuple[dict[str, NDArray[Any]], list[Comparison]]:
    """Run whole sequences through a step or chunk file, and compare each position with the oracle.

    Args:
        session: the file.
        source: what it was exported from.
        dtype: its element type.
        inputs: of the sequences at `check_length`.
        tolerance: the criterion.

    Returns:
        The output over the sequence, and the comparison with how its errors are spread.
    """
    whole = check_length(source)
    data = _on_full_batch(inputs, source, whole)
    outputs, _ = run_steps(session, source, dtype, data, 0, whole.shapes.seq_len // source.chunk, None)
    output = np.concatenate(outputs, axis=source.kind.length_axis)
    spread = SequenceAxis(-2 if whole.kind.batch_axis == 0 else 0)
    return {whole.output_name: output}, _of_few(output, source, whole, inputs, tolerance, spread)


def _of_few(
    output: NDArray[Any],
    source: StepSource,
    whole: SourceModel,
    inputs: Arrays,
    tolerance: Tolerance,
    spread: SequenceAxis | None = None,
) -> list[Comparison]:
    few = np.take(output, _few(source.source.shapes.batch), axis=whole.kind.batch_axis)
    return compare_outputs({whole.output_name: few}, whole.reference(inputs), tolerance, spread)


def run_steps(
    session: Session,
    source: StepSource,
    dtype: str,
    data: Arrays,
    first: int,
    calls: int,
    caches: Arrays | None,
) -> tuple[list[NDArray[Any]], Arrays]:
    """The outputs of `calls` calls from position `first` on, and the caches they leave.

    Args:
        session: the file.
        source: what it was exported from.
        dtype: "fp32" or "fp16".
        data: the data inputs of the whole sequence.
        first: tokens consumed before.
        calls: how often to call.
        caches: by input name; None before the first token.
    """
    facts = source.caches(dtype)
    if caches is None:
        caches = {x.input: np.full(x.shape, x.fill, x.dtype) for x in facts}
    outputs = []
    for start in range(first, first + calls * source.chunk, source.chunk):
        fed = {name: _part(name, x, start, source) for name, x in data.items()}
        result = session.run({**fed, POSITION: np.array([start], np.int64), **caches})
        outputs.append(result[source.source.output_name])
        caches = {x.input: result[x.output] for x in facts}
    return outputs, caches


def slots(source: SourceModel) -> int:
    """Keys a layer's ring holds."""
    return ring_keys(source.args) if source.geometry is None else ring_slots(source.geometry)  # type: ignore[arg-type]


def _whole(source: StepSource, goes_on: bool) -> SourceModel:
    """The model at the length to check: some windows beyond a full ring, or as many positions as it has."""
    shapes = source.source.shapes
    length = max(slots(source.source) + _WINDOWS * source.source.window_size, 2 * source.chunk)
    length += _AFTER_CHUNKS if goes_on else source.chunk - 1
    if source.max_positions is not None:
        length = min(length, source.max_positions)
    if not goes_on:
        length = max(source.chunk, length // source.chunk * source.chunk)
    request = ShapeRequest(
        length,
        len(_few(shapes.batch)),
        shapes.heads,
        shapes.dim_head,
        attn_bias=shapes.attn_bias,
        causal=shapes.causal,
    )
    own = source.source
    # Padding after the last token changes nothing for a causal model, and allows every length.
    padded = own.args.model_copy(update={"autopad": True}) if hasattr(own.args, "autopad") else own.args
    return SourceModel(own.class_name, padded, own.state, own.mixes_residuals, request)


def _few(batch: int) -> list[int]:
    """A reference in float64 is slow, and every sequence is computed alike: the first and the last do."""
    return sorted({0, batch - 1})


def _on_full_batch(inputs: Arrays, source: StepSource, whole: SourceModel) -> Arrays:
    """The inputs of the reference's sequences, laid out for the file's batch."""
    batch = source.source.shapes.batch
    rows = [0] * (batch - 1) + [whole.shapes.batch - 1]
    axis = whole.kind.batch_axis
    return {name: x if name == "attn_bias" else np.take(x, rows, axis=axis) for name, x in inputs.items()}


def _part(name: str, x: NDArray[Any], start: int, source: StepSource) -> NDArray[Any]:
    """One call's tokens of an input."""
    if name == "attn_bias":
        return x
    axis = source.kind.length_axis
    return np.ascontiguousarray(np.take(x, range(start, start + source.chunk), axis=axis))
