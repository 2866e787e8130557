"""Plain dense attention of a few rows, exact or with rounded scores, to test a suspected cause."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...core.nodes.attention import LOWEST_BIAS, SELF_SCORE
from .evidence import Evidence
from .reference import Floats


def attend_rows(evidence: Evidence, rows: NDArray[np.int64], *, half: bool = False) -> Floats:
    """Compute the attention node's output at some positions from the reference's query, key and value.

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
    visible = geometry.visibility(rows, columns, length)[None, None]
    mask = evidence.inputs.get("mask", evidence.inputs.get("attention_mask"))
    if mask is not None:
        padded = np.zeros((mask.shape[0], length), np.bool_)
        padded[:, : mask.shape[1]] = mask != 0
        visible = visible & padded[:, None, None, :]
    with np.errstate(over="ignore", invalid="ignore"):
        if half:
            scores = scores.astype(np.float16).astype(np.float64)
        scores = np.where(visible, scores, -np.inf)
        if call.sinks is None:
            weights = _softmax(scores)
        else:
            column = np.broadcast_to(call.sinks[None, :, None, None], (*scores.shape[:-1], 1))
            weights = _softmax(np.concatenate((scores, column), axis=-1))[..., :-1]
        if half:
            weights = weights.astype(np.float16).astype(np.float64)
    return np.transpose(np.einsum("bhij,bhjd->bhid", weights, value), perm)


def _softmax(scores: Floats) -> Floats:
    """Compute the softmax of each row; rows without a finite score give zeros."""
    top = scores.max(axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    powers = np.where(np.isfinite(scores), powers, 0.0)
    total = powers.sum(axis=-1, keepdims=True)
    weights: Floats = powers / np.where(total == 0, 1.0, total)
    return weights
