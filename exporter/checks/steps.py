"""Check that a step file, called repeatedly from an empty cache, equals the float64 reference at every position.

The reference reads the whole sequence at once and has no cache. The sequence is several windows longer than the ring,
so that every slot is overwritten and a lost or stale key would change the output. Chunk files are compared in the same
way, followed by single tokens through the step file, which needs the same caches as after its own steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...core.documents.sidecar import CheckRecord
from ...core.tolerance import Tolerance
from ...runtime.generation.array_step import ArrayStep
from ...runtime.inputs.arrays import random_inputs
from ...runtime.parity.compare import compare
from ...runtime.parity.comparison import Comparison
from ...runtime.parity.inputs import WINDOWS_BEYOND, InputSet
from ...runtime.parity.runner import StepRunner
from ...runtime.session import Arrays, Session
from ...runtime.text_inputs.rows import token_names
from ..options import ShapeRequest
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from ..source.step_source import StepSource
from .judged import HEAVY, Judged
from .parity import baseline_meter, in_windows, parity_record

# Number of single tokens after the chunks.
_AFTER_CHUNKS = 32
# Tokens of a short sequence, of one that continues after a chunk, and the number of sequences of that length.
_SHORT, _FEW, _ROWS = 48, 16, 16
# Tokens of the longest sequence of a heavy model's step file, where its chunk file is compared too.
_ALONE = 64


def check_step_parity(
    judged: Judged,
    source: StepSource,
    dtype: str,
    tolerance: Tolerance,
    then: Session | None = None,
    *,
    quick: bool = False,
    wraps_later: bool = False,
) -> CheckRecord:
    """Run whole sequences through a step or chunk file and compare each position with the float64 reference.

    Args:
        judged: the written file.
        source: the model it was exported from.
        dtype: "fp32", "fp16" or "bf16".
        tolerance: the criterion.
        then: the step file that continues after the chunks; without it the chunks take the whole sequence.
        quick: compare one window beyond the ring instead of several.
        wraps_later: a chunk file is compared next, and its sequences go on through this file beyond a full ring: of a
            heavy model this file alone is then fed short sequences.

    Raises:
        CheckFailed: fp16 overflows.
    """
    whole = whole_sequence(source, then is not None, 1 if quick else WINDOWS_BEYOND)
    short = wraps_later and whole.work > HEAVY and whole.shapes.seq_len > _ALONE
    whole = whole.resized(seq_len=_ALONE) if short else whole
    length = whole.shapes.seq_len
    meter = baseline_meter(whole, dtype, tolerance)
    found: list[tuple[str, Comparison]] = []
    alone: set[str] = set()
    for inputs in _sequences(judged, source, whole, dtype, goes_on=then is not None):
        size = next(iter(inputs.arrays.values())).shape[source.family.length_axis]
        singles = None if then is None else min(_AFTER_CHUNKS, size - source.chunk)
        candidate = step_runner(judged.session, source, dtype, then, singles)
        at = whole if size == length else whole.resized(seq_len=size)
        reference = ReferenceRunner(at, dtype, few_sequences=True)
        if reference.hardly_decided(inputs.arrays) and found:
            continue
        compared = compare(candidate, reference, inputs.arrays, tolerance)
        judged.refuse_overflow(inputs.name)
        judged.count(inputs, at.inputs(dtype))
        if meter is not None:
            missed = not all(comparison.passed for comparison in compared.comparisons)
            meter.take(reference, inputs.arrays, compared.expected, missed=missed)
        if judged.graph is not None:
            graph = judged.graph
            then_graph = None if graph.then is None else graph.then.session
            feeds = partial(step_runner, source=source, dtype=dtype, then=then_graph, singles=singles)
            graph.take(inputs.name, inputs.arrays, at, reference, compared.expected, feeds)
        found += [(inputs.name, comparison) for comparison in compared.comparisons]
        alone |= {inputs.name} if inputs.alone else set()
        del compared  # before the next ones are made: logits of a large vocabulary are large
    ring = source.slots
    wrapped = (length - ring) / whole.window_size
    detail = f"{judged.describe()}, {length} positions, {in_windows(wrapped)} past the ring's {ring} slots"
    if short:
        detail = (
            f"{judged.describe()}, {length} positions from empty caches; the ring is overwritten in the check of the "
        )
        detail += "file for prompts, whose sequences go on through this file"
    elif wrapped <= 0:
        detail = f"{judged.describe()}, {length} positions, the model's maximum; the ring of {ring} slots never gets "
        detail += "full, so its wrap-around was not tested"
    record = parity_record(found, ReferenceRunner(whole, dtype), tolerance, detail, meter, alone)
    unproven = wrapped <= 0 and not short and record.status == "passed"
    return record.model_copy(update={"status": "not proven"}) if unproven else record


def _sequences(
    judged: Judged, source: StepSource, whole: SourceModel, dtype: str, *, goes_on: bool
) -> Iterator[InputSet]:
    """Yield the sequences to feed: one that wraps around the ring several times, then short realistic ones."""
    specs, limit, mask = whole.inputs(dtype), whole.token_limit, whole.family.key_mask
    length, chunk = whole.shapes.seq_len, source.chunk

    def drawn(at: int) -> Arrays:
        inputs = random_inputs(source.data(dtype, at), 0, token_limit=limit)
        if mask in inputs:
            inputs[mask] = _padded(inputs[mask].shape)
        return inputs

    long = drawn(length)
    if judged.tokens is None or not token_names(specs):
        yield InputSet("", long)
        return
    yield InputSet("the longest row", judged.filled(long, specs, 0), alone=judged.judges_alone)
    if whole.family.sequence_axis not in (-2, 1) or source.family.length_axis != 1:
        return
    multiple = 1 if goes_on or chunk == 1 else chunk
    heavy = whole.work > HEAVY
    most = min(length, max(chunk + _FEW, _SHORT) if chunk > 1 else _SHORT // 2 if heavy else _SHORT)
    if goes_on and most <= chunk:
        return
    if judged.takes_random:
        size = max(multiple, most // multiple * multiple)
        yield InputSet("random tokens", drawn(size), random=True)
    rows = judged.rows(most, most, most * _ROWS, specs, multiple=multiple)[1:]
    if heavy:  # rows that begin in another way may show other faults
        rows = [*[row for row in rows if not row.opened][:2], *[row for row in rows if row.opened]]
    for row in rows:
        if row.length <= chunk and goes_on:
            row = replace(row, ids=np.concatenate([row.ids, judged.tokens.row(1, chunk + _FEW - row.length)]))
        if row.length <= length:
            sizes = source.data(dtype, row.length)
            yield judged.set_of([row], sizes, {})


def step_runner(
    session: Session, source: StepSource, dtype: str, then: Session | None, singles: int | None
) -> StepRunner:
    """Return a runner that feeds a file call by call.

    Args:
        session: the written file.
        source: the model it was exported from.
        dtype: element type of the file.
        then: the step file that takes the tokens left after whole chunks.
        singles: how many tokens are left for it, as `StepRunner` takes them.
    """
    sessions, own = {source.chunk: session}, source
    if then is not None:
        sessions[1], own = then, StepSource(source.source, 1)
    return StepRunner(ArrayStep(own.record(dtype, mode="step", prefill=None), sessions), singles=singles)


def _padded(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return a mask `[B, N]` of padding on the left: more with each sequence, up to half, and none in the first."""
    batch, length = shape
    first = np.arange(batch) * (length // 2) // max(1, batch - 1)
    return (np.arange(length) >= first[:, None]).astype(np.int64)


def whole_sequence(source: StepSource, goes_on: bool = False, beyond: int = WINDOWS_BEYOND) -> SourceModel:
    """Return the model at the length to check: some windows beyond a full ring, or as many positions as it has.

    Args:
        source: the step or chunk file.
        goes_on: single tokens follow the chunks; otherwise the length is a multiple of the chunk.
        beyond: number of windows beyond the ring.
    """
    own = source.source
    length = max(source.slots + beyond * own.window_size, 2 * source.chunk)
    most = own.family.longest_compared(own.args)
    if most is not None:  # the reference's time and memory grow with the square of the length
        length = min(length, max(most, source.slots + 2 * source.chunk))
    length += _AFTER_CHUNKS if goes_on else source.chunk - 1
    length = min(length, source.max_positions)
    if not goes_on:
        length = max(source.chunk, length // source.chunk * source.chunk)
    return at_length(source, length)


def at_length(source: StepSource, length: int) -> SourceModel:
    """Return the model of a step file for whole sequences of a length."""
    own = source.source
    shapes = {name: getattr(own.shapes, name) for name in ("batch", "heads", "dim_head", "attn_bias", "causal")}
    # Padding after the last token does not change a causal model's outputs, and allows every length.
    padded = own.args.model_copy(update={"autopad": True}) if hasattr(own.args, "autopad") else own.args
    return own.at(ShapeRequest(length, **shapes), padded)
