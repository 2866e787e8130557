"""The AFT-local kernel: a gated mean over the sequence, with biases near the query (`core.nodes.aft`).

    o_i = σ(gate_i) · Σ_j e^(w_ij + k_j)·v_j / Σ_j e^(w_ij + k_j)   per channel; w_ij = 0 beyond the reach

One program takes `BLOCK_QUERIES` positions and `BLOCK_CHANNELS` channels of one sequence. Keys beyond the reach of all
its queries have no bias: their sums are the same for all of them, and are computed once, `BLOCK_QUERIES` keys abreast.
Then come the keys near the queries, one by one for all queries. Both keep an exact running maximum, so the largest
weight is 1 whatever keys and biases are.

Work is `T·s·D` exponentials for `s` keys in reach, and `T²·D / BLOCK_QUERIES` for those beyond.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (Triton reads annotations as its own.)

from __future__ import annotations

import triton
import triton.language as tl

from .aft import SCALARS

_LOG2E = tl.constexpr(1.4426950408889634)
# Where a running maximum starts: below every logit, and finite, so that no difference is NaN.
_LOWEST = tl.constexpr(-3e38)


@triton.jit
def _weight(logit, top):
    """Subtracted before it is scaled: the largest logit's weight is exactly 1."""
    return tl.math.exp2((logit - top) * _LOG2E)


@triton.jit
def _kept(key_mask, j, inside, HAS_MASK: tl.constexpr):
    """Which of the keys `j` count."""
    if HAS_MASK:
        return inside & (tl.load(key_mask + j, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _absorb(top, num, den, a, b, c, d, va, vb, vc, vd):
    """Four more keys into the state: their logits, -inf where a key is not seen, and their values."""
    higher = tl.maximum(tl.maximum(top, tl.maximum(a, b)), tl.maximum(c, d))
    shrink = _weight(top, higher)
    wa, wb, wc, wd = _weight(a, higher), _weight(b, higher), _weight(c, higher), _weight(d, higher)
    den = den * shrink + ((wa + wb) + (wc + wd))
    # A key that is not seen may have any value, infinity too.
    hidden = float("-inf")
    num = num * shrink + tl.where(a == hidden, 0.0, wa * va) + tl.where(b == hidden, 0.0, wb * vb)
    num += tl.where(c == hidden, 0.0, wc * vc) + tl.where(d == hidden, 0.0, wd * vd)
    return higher, num, den


@triton.jit
def _far(key, value, key_mask, n, far, left, right, row_stride, channel, inside, HAS_MASK: tl.constexpr):
    """Logits and values of far keys, `[BLOCK_QUERIES, BLOCK_CHANNELS]`; the `n`-th of them, left ones first."""
    j = tl.where(n < left, n, n - left + right)
    seen = _kept(key_mask, j, n < far, HAS_MASK)[:, None] & inside[None, :]
    address = j.to(tl.int64)[:, None] * row_stride + channel[None, :]
    logit = tl.load(key + address, mask=seen, other=0.0)
    return tl.where(seen, logit, float("-inf")), tl.load(value + address, mask=seen, other=0.0)


@triton.jit
def _near(
    key,
    value,
    key_mask,
    biases,
    j,
    t,
    end,
    reach,
    row_stride,
    channel,
    inside,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Logits of one key for all queries, `[BLOCK_QUERIES, BLOCK_CHANNELS]`, and its value, `[1, BLOCK_CHANNELS]`."""
    there = _kept(key_mask, j, j < end, HAS_MASK)
    address = row_stride * j + channel
    k = tl.load(key + address, mask=inside & there, other=0.0)
    v = tl.load(value + address, mask=inside & there, other=0.0)
    seen = (j <= t) & there if CAUSAL else (t >= 0) & there
    biased = seen & (j - t <= reach) & (t - j <= reach)
    bias = tl.load(biases + j, mask=biased, other=0.0)
    return tl.where(seen[:, None], bias[:, None] + k[None, :], float("-inf")), v[None, :]


# Without specialisation one compilation serves every value, 1 and multiples of 16 included.
@triton.jit(do_not_specialize=SCALARS)
def aft_local(
    gate,
    key,
    value,
    position_bias,
    key_mask,
    length,
    batch,
    dim,
    reach,
    output,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Positions `[x·BLOCK_QUERIES, …)` of channels and sequence `y`, sequences outermost; arguments as in `aft`."""
    HAS_MASK: tl.constexpr = key_mask is not None
    t0 = tl.program_id(0) * BLOCK_QUERIES
    tiles = tl.cdiv(dim, BLOCK_CHANNELS)
    sequence = tl.program_id(1) // tiles
    c = tl.program_id(1) % tiles * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = c < dim
    channel = sequence.to(tl.int64) * dim + c
    row_stride = batch.to(tl.int64) * dim
    if HAS_MASK:
        key_mask += sequence.to(tl.int64) * length

    # Keys [begin, end) are in reach of some query; those before, and unless causal behind, of none.
    row = tl.arange(0, BLOCK_QUERIES)
    last = tl.minimum(t0 + BLOCK_QUERIES, length)
    begin = tl.maximum(t0 - reach, 0)
    end = last if CAUSAL else tl.minimum(last + reach, length)
    far = begin if CAUSAL else begin + length - end

    top = tl.full([BLOCK_QUERIES, BLOCK_CHANNELS], _LOWEST, tl.float32)
    num = tl.zeros([BLOCK_QUERIES, BLOCK_CHANNELS], tl.float32)
    den = tl.zeros([BLOCK_QUERIES, BLOCK_CHANNELS], tl.float32)
    for n in tl.range(0, far, 4 * BLOCK_QUERIES):
        at = n + row
        a, va = _far(key, value, key_mask, at, far, begin, end, row_stride, channel, inside, HAS_MASK)
        at += BLOCK_QUERIES
        b, vb = _far(key, value, key_mask, at, far, begin, end, row_stride, channel, inside, HAS_MASK)
        at += BLOCK_QUERIES
        c4, vc = _far(key, value, key_mask, at, far, begin, end, row_stride, channel, inside, HAS_MASK)
        at += BLOCK_QUERIES
        d, vd = _far(key, value, key_mask, at, far, begin, end, row_stride, channel, inside, HAS_MASK)
        top, num, den = _absorb(top, num, den, a, b, c4, d, va, vb, vc, vd)
    # Of all rows together, for every query.
    highest = tl.max(top, 0)[None, :]
    shrink = _weight(top, highest)
    num = tl.sum(num * shrink, 0)[None, :] + tl.zeros([BLOCK_QUERIES, BLOCK_CHANNELS], tl.float32)
    den = tl.sum(den * shrink, 0)[None, :] + tl.zeros([BLOCK_QUERIES, BLOCK_CHANNELS], tl.float32)
    top = highest + tl.zeros([BLOCK_QUERIES, BLOCK_CHANNELS], tl.float32)

    # Rows past the end repeat the last query, and are not stored.
    t = tl.minimum(t0 + row, length - 1)
    columns = reach + 1 if CAUSAL else 2 * reach + 1
    biases = position_bias + t.to(tl.int64) * columns + (reach - t)
    for j in tl.range(begin, end, 4):
        a, va = _near(
            key, value, key_mask, biases, j, t, end, reach, row_stride, channel, inside, CAUSAL, HAS_MASK
        )  # fmt: skip
        b, vb = _near(
            key, value, key_mask, biases, j + 1, t, end, reach, row_stride, channel, inside, CAUSAL, HAS_MASK
        )  # fmt: skip
        c4, vc = _near(
            key, value, key_mask, biases, j + 2, t, end, reach, row_stride, channel, inside, CAUSAL, HAS_MASK
        )  # fmt: skip
        d, vd = _near(
            key, value, key_mask, biases, j + 3, t, end, reach, row_stride, channel, inside, CAUSAL, HAS_MASK
        )  # fmt: skip
        top, num, den = _absorb(top, num, den, a, b, c4, d, va, vb, vc, vd)

    stored = (t0 + row < length)[:, None] & inside[None, :]
    address = t.to(tl.int64)[:, None] * row_stride + channel[None, :]
    opened = 1.0 + tl.math.exp2(tl.load(gate + address, mask=stored, other=0.0) * -_LOG2E)
    out = num / (tl.where(den == 0.0, 1.0, den) * opened)
    tl.store(output + address, out, mask=stored)
