"""Find likely causes by rules: each has a name, and a function that returns evidence or None.

The first rule that finds evidence names the cause. A rule rests on an experiment or on a property that
other causes do not have, never on the size of an error alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.dtypes import LARGEST_NUMBER
from ...core.geometry import WindowGeometry
from ...core.nodes.attention import LOWEST_BIAS, SELF_SCORE, geometry_of
from .evidence import Evidence, Measured, Recorded, measure
from .reference import Floats

# How far a stored weight may be from the checkpoint's, relative to the largest: a few roundings.
_WEIGHT_EPS = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 1.6e-2}

# Rows for which attention is emulated: dense scores of more rows would be slow.
_ROWS = 64


@dataclass(frozen=True)
class Cause:
    """A likely cause and its evidence, as a rule found it."""

    name: str
    evidence: str


def likely_cause(evidence: Evidence) -> Cause:
    """Return the cause of the first rule that finds evidence; "unknown" if none does."""
    for name, find in RULES.items():
        sentence = find(evidence)
        if sentence is not None:
            return Cause(name, sentence)
    return Cause("unknown", "No known cause: range, weights, mask, padding, rotation, softmax and window were tested.")


def _overflow(evidence: Evidence) -> str | None:
    actual = evidence.fault.actual
    lost = int(actual.size - np.isfinite(actual).sum())
    if not lost:
        return None
    largest = float(np.abs(evidence.fault.expected).max())
    limit = LARGEST_NUMBER["fp16" if evidence.dtype == "fp16" else "fp32"]
    where = "at this value" if largest > limit else "at a value inside the module"
    return (
        f"{lost} of {actual.size} values are NaN or Inf, from finite inputs: the range of {evidence.dtype} ends at "
        f"{limit:.5g} and "
        f"was exceeded {where} (the reference reaches {largest:.4g} here)."
    )


def _weights(evidence: Evidence) -> str | None:
    eps = _WEIGHT_EPS[evidence.dtype]
    for name, in_file, in_checkpoint in evidence.weights:
        difference = float(np.abs(in_file - in_checkpoint).max())
        size = float(np.abs(in_checkpoint).max())
        if not difference <= eps * max(size, 1e-6):
            return (
                f"{name} in the file is off by up to {difference:.3g} (the checkpoint's largest value is {size:.3g})."
            )
    return None


def _mask(evidence: Evidence) -> str | None:
    masks = {name: array for name, array in evidence.inputs.items() if name in ("mask", "full_mask")}
    if evidence.fault.role != "attention" or not masks:
        return None
    dropped = sum(int((~array).sum()) for array in masks.values())
    error = evidence.fault.comparison.max_abs
    kept = evidence.rerun({**evidence.inputs, **{name: np.ones_like(array) for name, array in masks.items()}})
    if _is_that_of(evidence, kept):
        return (
            f"The output equals that of a mask which keeps every key: the mask has no effect ({dropped} keys dropped)."
        )
    inverted = evidence.rerun({**evidence.inputs, **{name: ~array for name, array in masks.items()}})
    if _is_that_of(evidence, inverted):
        return "The output equals that of the inverted mask: kept and dropped keys are exchanged."
    if kept.passed:
        return f"With every key kept the output is right; with {dropped} keys dropped it is off by {error:.2g}."
    return None


def _is_that_of(evidence: Evidence, other: Measured) -> bool:
    """Return whether the file computed what the reference computes from other inputs."""
    candidate = Recorded("the file", {other.value: evidence.fault.actual})
    return measure(candidate, [other], evidence.inputs, evidence.tolerance)[0].passed


def _padding(evidence: Evidence) -> str | None:
    if evidence.geometry is None:
        return None
    wrong = evidence.wrong_positions()
    if not wrong.size:
        return None
    # Positions whose window reaches past an end of the sequence, and positions added by padding.
    length, window = evidence.length, evidence.geometry.window_size
    position = np.arange(evidence.fault.actual.shape[evidence.sequence_axis])
    start = position - position % window
    at_start = start - evidence.geometry.backward_reach < 0
    at_end = start + window + evidence.geometry.forward_reach > length
    for edge, name in ((at_end, "last"), (at_start & (start < window), "first")):
        if edge[wrong].all() and not edge.all():
            return (
                f"Only positions {wrong[0]} to {wrong[-1]} are wrong, all in the {name} window(s), where padding is"
                f"; the {int((~edge).sum())} others are right."
            )
    return None


def _rotary(evidence: Evidence) -> str | None:
    fault = evidence.fault
    if fault.role not in ("query", "key") and not fault.path.endswith("rel_pos"):
        return None
    actual, expected = fault.actual.astype(np.float64), fault.expected
    half = expected.shape[-1] // 2
    found, wanted = (np.sqrt(x[..., :half] ** 2 + x[..., half : 2 * half] ** 2) for x in (actual, expected))
    off = float(np.abs(found - wanted).max())
    error = fault.comparison.max_abs
    if off > 0.1 * error:
        return None
    return f"Pairs of channels have the right length (within {off:.2g}) but a wrong angle (error {error:.2g})."


def _softmax(evidence: Evidence) -> str | None:
    if evidence.fault.role != "attention" or evidence.call is None or evidence.geometry is None:
        return None
    rows = _worst_rows(evidence)
    exact = attend_rows(evidence, rows)
    measured = _rms(_values_at(evidence, rows) - exact)
    emulated = _rms(attend_rows(evidence, rows, half=True) - exact)
    if not 0.25 * measured <= emulated <= 4 * measured:
        return None
    return (
        f"query, key and value are right, and rounding scores and softmax to fp16 alone gives the error seen: "
        f"{emulated:.2g} emulated, {measured:.2g} in the file (rms, {len(rows)} worst positions)."
    )


def _window(evidence: Evidence) -> str | None:
    if evidence.fault.role != "attention" or evidence.call is None or evidence.geometry is None:
        return None
    rows = _worst_rows(evidence)
    actual = _values_at(evidence, rows)
    error = _rms(actual - attend_rows(evidence, rows))
    node = geometry_of(evidence.attributes)
    others = [*([node] if node != evidence.geometry else []), *_other_windows(evidence.geometry)]
    for other in others:
        if _rms(actual - attend_rows(replace(evidence, geometry=other), rows)) < 0.05 * error:
            return f"The output equals that of another window: {other.describe()}, not {evidence.geometry.describe()}."
    return None


def _other_windows(geometry: WindowGeometry) -> list[WindowGeometry]:
    """List the windows that one wrong attribute would give."""
    found = [replace(geometry, exact_windowsize=not geometry.exact_windowsize)]
    found += [replace(geometry, look_backward=b) for b in range(4) if b != geometry.look_backward]
    found += [replace(geometry, window_size=w) for w in (geometry.window_size * 2, geometry.window_size // 2) if w]
    if geometry.causal:
        found.append(replace(geometry, causal=False))
    else:
        found.append(replace(geometry, causal=True, look_forward=0))
        found += [replace(geometry, look_forward=f) for f in range(3) if f != geometry.look_forward]
    return found


def _worst_rows(evidence: Evidence) -> NDArray[np.int64]:
    """Return the positions with the largest errors, in order."""
    return np.sort(np.argsort(-evidence.errors(), kind="stable")[:_ROWS])


def _values_at(evidence: Evidence, rows: NDArray[np.int64]) -> Floats:
    """Return the file's values at some positions."""
    values: Floats = np.take(evidence.fault.actual.astype(np.float64), rows, evidence.sequence_axis)
    return values


def attend_rows(evidence: Evidence, rows: NDArray[np.int64], *, half: bool = False) -> Floats:
    """Compute the attention node's output at some positions, densely, from the reference's query, key and value.

    Args:
        evidence: holds the attention call and its geometry; the mask and the bias come from its inputs.
        rows: positions to compute.
        half: round the scores and the softmax to fp16.

    Returns:
        The output at these positions only, in the node's layout.
    """
    call, geometry = evidence.call, evidence.geometry
    assert call is not None and geometry is not None
    perm = list(evidence.attributes["perm"])
    query, key, value = (np.transpose(x, perm) for x in (call.query, call.key, call.value))
    length, groups = key.shape[2], query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, groups, axis=1) for x in (key, value))
    scores = np.einsum("bhid,bhjd->bhij", query[:, :, rows], key) * float(evidence.attributes["scale"])
    softcap = float(evidence.attributes.get("softcap", 0.0))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    columns = np.arange(length)
    if "attn_bias" in evidence.inputs:
        window = geometry.window_size
        slot = columns[None, :] - (rows[:, None] // window - geometry.look_backward) * window
        slot = slot.clip(0, geometry.keys_per_window - 1)
        bias = evidence.inputs["attn_bias"].astype(np.float64).clip(LOWEST_BIAS)
        scores = scores + bias[:, (rows % window)[:, None], slot]
    if evidence.attributes.get("shared_qk"):
        scores = np.where(columns[None, :] == rows[:, None], SELF_SCORE, scores)
    visible = _visible(evidence.inputs, geometry, rows, length)
    with np.errstate(over="ignore", invalid="ignore"):
        if half:
            scores = scores.astype(np.float16).astype(np.float64)
        scores = np.where(visible, scores, -np.inf)
        if call.sinks is None:
            weights = _softmax_of(scores)
        else:
            column = np.broadcast_to(call.sinks[None, :, None, None], (*scores.shape[:-1], 1))
            weights = _softmax_of(np.concatenate((scores, column), axis=-1))[..., :-1]
        if half:
            weights = weights.astype(np.float16).astype(np.float64)
    return np.transpose(np.einsum("bhij,bhjd->bhid", weights, value), perm)


def _visible(
    inputs: Mapping[str, NDArray[Any]], geometry: WindowGeometry, rows: NDArray[np.int64], length: int
) -> NDArray[np.bool_]:
    """Return which keys these positions see in the window and the mask, `[B or 1, 1, len(rows), length]`."""
    visible = geometry.visibility(rows, np.arange(length), length)[None, None]
    mask = inputs.get("mask", inputs.get("attention_mask"))
    if mask is None:
        return visible
    kept = np.zeros((mask.shape[0], length), np.bool_)  # the file's own padding, behind the mask, is not kept
    kept[:, : mask.shape[1]] = mask != 0
    return visible & kept[:, None, None, :]


def _softmax_of(scores: Floats) -> Floats:
    """Compute the softmax of each row; rows without a finite score give zeros."""
    top = scores.max(axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    powers = np.where(np.isfinite(scores), powers, 0.0)
    total = powers.sum(axis=-1, keepdims=True)
    weights: Floats = powers / np.where(total == 0, 1.0, total)
    return weights


def _rms(x: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


# By cause, what returns the sentence of evidence, or None.
RULES: Mapping[str, Callable[[Evidence], str | None]] = {
    "overflow": _overflow,
    "weights": _weights,
    "mask": _mask,
    "padding": _padding,
    "rotary phase": _rotary,
    "precision of the softmax": _softmax,
    "window": _window,
}
