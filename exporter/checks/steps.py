"""Check: a step file, called again and again from an empty cache, equals the float64 reference at every position.

The reference reads the whole sequence at once and has no cache. The sequence is several windows longer than the ring,
so that every slot is overwritten and a lost or stale key would change the output. Chunk files are compared in the same
way, followed by single tokens through the step file, which needs the same caches as after its own steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...core.documents.sidecar import CheckRecord
from ...core.tolerance import Tolerance
from ...runtime.generation.array_step import ArrayStep
from ...runtime.inputs.arrays import random_inputs
from ...runtime.parity.compare import compare
from ...runtime.parity.inputs import WINDOWS_BEYOND
from ...runtime.parity.runner import StepRunner
from ...runtime.session import Session
from ..models.family import ShapeRequest
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from ..source.step_source import StepSource
from .parity import baseline_meter, parity_record

# Number of single tokens after the chunks.
_AFTER_CHUNKS = 32


def check_step_parity(
    session: Session,
    source: StepSource,
    dtype: str,
    tolerance: Tolerance,
    then: Session | None = None,
    *,
    quick: bool = False,
) -> CheckRecord:
    """Run a whole sequence through a step or chunk file and compare each position with the float64 reference.

    Args:
        session: the written file.
        source: the model it was exported from.
        dtype: "fp32" or "fp16".
        tolerance: the criterion.
        then: the step file that continues after the chunks; without it the chunks take the whole sequence.
        quick: compare one window beyond the ring instead of several.
    """
    whole = whole_sequence(source, then is not None, 1 if quick else WINDOWS_BEYOND)
    length = whole.shapes.seq_len
    singles = None if then is None else min(_AFTER_CHUNKS, length - source.chunk)
    candidate = step_runner(session, source, dtype, then, singles)
    reference = ReferenceRunner(whole, dtype, few_sequences=True)
    inputs = random_inputs(whole.inputs(dtype), 0, token_limit=whole.token_limit)
    if whole.family.key_mask in inputs:
        inputs[whole.family.key_mask] = _padded(inputs[whole.family.key_mask].shape)
    compared = compare(candidate, reference, inputs, tolerance)
    meter = baseline_meter(whole, dtype, tolerance)
    if meter is not None:
        meter.take(reference, inputs, compared.expected)
    found = [("", comparison) for comparison in compared.comparisons]
    ring = source.slots
    wrapped = (length - ring) / whole.window_size
    detail = f"{length} positions, {wrapped:.3g} windows beyond the ring's {ring} slots"
    if wrapped <= 0:
        detail = f"{length} positions, all that the model has; the ring of {ring} slots is never full, "
        detail += "which proves nothing about it"
    record = parity_record(found, reference, tolerance, detail, meter)
    unproven = wrapped <= 0 and record.status == "passed"
    return record.model_copy(update={"status": "not proven"}) if unproven else record


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
    return StepRunner(ArrayStep(own.facts(dtype, mode="step", prefill=None), sessions), singles=singles)


def _padded(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return a mask `[B, N]` of padding on the left: more with each sequence, up to half, and none in the first."""
    batch, length = shape
    first = np.arange(batch) * (length // 2) // max(1, batch - 1)
    return (np.arange(length) >= first[:, None]).astype(np.int64)


def whole_sequence(source: StepSource, goes_on: bool = False, beyond: int = WINDOWS_BEYOND) -> SourceModel:
    """Return the model at the length to check: some windows beyond a full ring, or as many positions as it has.

    Args:
        source: the step or chunk file.
        goes_on: single tokens follow the chunks; else the length is a multiple of the chunk.
        beyond: so many windows beyond the ring.
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
    shapes = {name: getattr(own.shapes, name) for name in ("batch", "heads", "dim_head", "attn_bias", "causal")}
    # Padding after the last token does not change a causal model's outputs, and allows every length.
    padded = own.args.model_copy(update={"autopad": True}) if hasattr(own.args, "autopad") else own.args
    return own.at(ShapeRequest(length, **shapes), padded)
