"""The windowed attention kernel.

    o_t = Σ_s p_s · v_s,   p = softmax over s in [lo(t), hi(t)) of  scale·⟨q_t, k_s⟩ + bias

with `[lo, hi)` of `core.geometry`. One program takes `BLOCK_QUERIES` queries of one head and goes over the keys that
any of them sees, `BLOCK_KEYS` at a time. The ends of the interval never decrease with `t`, so keys between the last
query's `lo` and the first query's `hi` are seen by all: their tiles need no comparison. Two loops, over the tiles
that need one and over those that do not; the softmax runs online (Milakov & Gimelshein, arXiv 1805.02867), so that
their order is free. The arguments are described in `spec`.

Numerics: scores, softmax sums and the output are accumulated in fp32; fp32 inputs are not rounded to TF32 unless that
was asked for (`KernelSpec.fp32_products`). The running maximum starts at a finite value below every score, so that a
row without keys divides zeros by one and nothing is ever `inf - inf`. The exponent `unit·x - unit·max` is one
multiply-add: it rounds the second product and not the first, so the largest score's own exponent is not 0 but up to
2⁻²⁴ of it. Rows beyond `_EXACT_UP_TO`, where this would be no small number, take the power of two below `unit` instead:
then both products are exact, and scores of that size that differ do so by so much that only the largest counts, under
either factor.

What only some kernels have:

- Shared heads: head `h` of the queries reads head `h·kv_heads // heads` of keys and values.
- shared_qk: a token's score with itself is a constant.
- Softcap: scores become `softcap·tanh(score / softcap)`, with `tanh u = 1 - 2 / (1 + e^(2u))`.
- Sinks: a logit of each head joins the row totals after the last tile.
- fp8: weights are rounded to E4M3 for the product with the values, 2⁸ times as large, as in FlashAttention-3: E4M3 ends
  at 448, and weights down to 2⁻¹⁴ of the largest keep all their digits. The sum that the output is divided by has the
  same factor, and its weights are not rounded.
- xpos: channel `c` of a product is scaled by `ζ_c^((t - s + f·w) / base)`. The factor is split at the middle of the
  block of queries: half of it goes into the queries, half into the keys. Each half alone may leave fp16's range, so
  16-bit inputs are multiplied as TF32, which has the digits of fp16 and the range of fp32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (Triton reads annotations as its own.)

from __future__ import annotations

import triton
import triton.language as tl

from ...core.nodes.attention import LOWEST_BIAS, SELF_SCORE
from .spec import CAUSAL_FLAG, EXACT_FLAG, SCALARS, SEQUENCE_FIRST_FLAG
from .tf32 import rounded

_CAUSAL = tl.constexpr(CAUSAL_FLAG)
_EXACT = tl.constexpr(EXACT_FLAG)
_SEQUENCE_FIRST = tl.constexpr(SEQUENCE_FIRST_FLAG)
_SELF_SCORE = tl.constexpr(SELF_SCORE)
_LOWEST_BIAS = tl.constexpr(LOWEST_BIAS)
_LOG2E = tl.constexpr(1.4426950408889634)
# Where the running maximum starts, and the smallest factor of the scores (0 is a legal scale).
_LOWEST_SCORE = tl.constexpr(-3e38)
_LOWEST_RAW_BIAS = tl.constexpr(-1e38)
_SMALLEST_SCALE = tl.constexpr(1e-30)
# Up to this exponent the largest weight is at most 2⁸, which fp16 holds; neighbouring fp32 numbers beyond are 32 apart.
_EXACT_UP_TO = tl.constexpr(2.0**28)
# Of fp8 (E4M3): how many times as large weights are, as an exponent of 2; and the same limit for 448, beyond which
# neighbouring numbers are 2 apart.
_FP8_WEIGHTS = tl.constexpr(8.0)
_FP8_EXACT_UP_TO = tl.constexpr(2.0**24)
# The bits of an fp32 number's exponent.
_POWER_OF_TWO = tl.constexpr(0x7F800000)
# The largest exponent of a sink's weight beside the row's own: with it, everything else vanishes.
_LARGEST_SINK = tl.constexpr(126.0)


@triton.jit
def _visible_interval(t, length, window, back, forward, flags):
    """`core.geometry.visible_interval`, for a position or a vector of them."""
    start = t // window * window
    exact = (flags & _EXACT) != 0
    first = tl.where(exact, t, start) - back * window
    end = tl.where(exact, t + 1, start + window) + forward * window
    end = tl.where((flags & _CAUSAL) != 0, t + 1, end)
    return tl.maximum(first, 0), tl.minimum(end, length)


@triton.jit
def _load_rows(
    tensor,
    s,
    stride,
    key_end,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """Rows `s …` of keys or values, `[BLOCK_KEYS, PADDED]`; zeros past `HEAD_DIM` and, if `COMPARE`, past `key_end`."""
    row = tl.arange(0, BLOCK_KEYS)
    d = tl.arange(0, PADDED)
    address = tensor + s.to(tl.int64) * stride + row[:, None] * stride + d[None, :]
    if COMPARE:
        inside = (s + row < key_end)[:, None]
        if HEAD_DIM != PADDED:
            inside = inside & (d < HEAD_DIM)[None, :]
        return tl.load(address, mask=inside, other=0.0)
    if HEAD_DIM != PADDED:
        return tl.load(address, mask=(d < HEAD_DIM)[None, :], other=0.0)
    return tl.load(address)


@triton.jit
def _decay_rates(xpos_base, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """`log₂ ζ_c / base` of every channel, `[PADDED]`; both halves of a head alike."""
    channel = (tl.arange(0, PADDED) % (HEAD_DIM // 2)).to(tl.float32)
    return tl.math.log2((2.0 * channel + 0.4 * HEAD_DIM) * (1.0 / (1.4 * HEAD_DIM))) / xpos_base


@triton.jit
def _decayed(x, distance, rates, ROUNDED: tl.constexpr):
    """Rows scaled by `2^(rate·distance)` in fp32, rounded to TF32 if their product is one."""
    scaled = x.to(tl.float32) * tl.math.exp2(distance.to(tl.float32)[:, None] * rates[None, :])
    if ROUNDED:
        scaled = rounded(scaled)
    return scaled


@triton.jit
def _attend(
    acc,
    total,
    top,
    query,
    key,
    value,
    key_mask,
    attn_bias,
    s,
    first,
    end,
    itself,
    bias_row,
    key_end,
    stride,
    unit,
    coarse,
    cap,
    middle,
    rates,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_XPOS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SHARED_QK: tl.constexpr,
    FP32_PRODUCTS: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """One tile of keys, from position `s` on: the new sums, row totals and row maxima.

    Without `COMPARE` every row sees the whole tile. Scores and their maxima are raw until the exponential multiplies
    them by `unit`: there the factor costs nothing, being one operation with the subtraction of the maximum. `coarse` is
    the factor of rows with huge scores, `cap` the softcap in the units of raw scores, or 0. With xpos, `middle` is the
    position that the decay is split at, and `rates` are those of the channels.
    """
    position = s + tl.arange(0, BLOCK_KEYS)
    raw = (1.0 / unit) * _LOG2E
    k = _load_rows(key, s, stride, key_end, HEAD_DIM, PADDED, BLOCK_KEYS, COMPARE)
    v = _load_rows(value, s, stride, key_end, HEAD_DIM, PADDED, BLOCK_KEYS, COMPARE)
    OF_VALUES: tl.constexpr = FP32_PRODUCTS if v.dtype == tl.float32 else "ieee"
    PRECISION: tl.constexpr = "tf32" if HAS_XPOS and v.dtype != tl.float32 else OF_VALUES
    if HAS_XPOS:
        k = _decayed(k, middle - position, rates, PRECISION == "tf32")
    if HAS_BIAS:
        address = attn_bias + (bias_row[:, None] + position[None, :])
        if COMPARE:
            visible = (position[None, :] >= first[:, None]) & (position[None, :] < end[:, None])
            bias = tl.load(address, mask=visible, other=0.0)
        else:
            bias = tl.load(address)
        # In the units of raw scores, so that the product with the keys is added to it.
        bias = tl.maximum(bias.to(tl.float32) * raw, tl.maximum(raw * _LOWEST_BIAS, _LOWEST_RAW_BIAS))
        x = tl.dot(query, tl.trans(k), bias, input_precision=PRECISION)
    else:
        x = tl.dot(query, tl.trans(k), input_precision=PRECISION)
    if HAS_SOFTCAP:
        x = cap - 2.0 * cap / (1.0 + tl.math.exp2(x * (2.0 * _LOG2E / cap)))
    if HAS_MASK:
        if COMPARE:
            kept = tl.load(key_mask + position, mask=position < key_end, other=0)
        else:
            kept = tl.load(key_mask + position)
        # Added at once, it can be where the sum over the products starts.
        x += tl.where(kept != 0, 0.0, float("-inf"))[None, :]
    if COMPARE:
        if HAS_SHARED_QK:
            x = tl.where(position[None, :] == itself[:, None], raw * _SELF_SCORE, x)
        x = tl.where((position[None, :] >= first[:, None]) & (position[None, :] < end[:, None]), x, float("-inf"))
    higher = tl.maximum(top, tl.max(x, 1))
    if v.dtype == tl.float8e4nv:
        factor = tl.where(tl.abs(higher) > (1.0 / unit) * _FP8_EXACT_UP_TO, coarse, unit)
        p = tl.math.exp2(x * factor[:, None] - (higher * factor - _FP8_WEIGHTS)[:, None])
    else:
        factor = tl.where(tl.abs(higher) > (1.0 / unit) * _EXACT_UP_TO, coarse, unit)
        p = tl.math.exp2(x * factor[:, None] - (higher * factor)[:, None])
    shrink = tl.math.exp2((top - higher) * unit)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=OF_VALUES)
    return acc, total, higher


# Without specialisation one compilation serves every value, 1 and multiples of 16 included.
@triton.jit(do_not_specialize=SCALARS)
def windowed_attention(
    query,
    key,
    value,
    key_mask,
    attn_bias,
    sinks,
    length,
    heads,
    kv_heads,
    window_size,
    look_backward,
    look_forward,
    flags,
    scale_bits,
    softcap_bits,
    xpos_base_bits,
    output,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_XPOS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SHARED_QK: tl.constexpr,
    FP32_PRODUCTS: tl.constexpr,
):
    """Queries `[x·BLOCK_QUERIES, …)` of batch and head `y`; arguments as in `spec`."""
    HAS_MASK: tl.constexpr = key_mask is not None
    HAS_BIAS: tl.constexpr = attn_bias is not None
    HAS_SINKS: tl.constexpr = sinks is not None
    t0 = tl.program_id(0) * BLOCK_QUERIES
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    sequence_first = (flags & _SEQUENCE_FIRST) != 0
    stride = tl.where(sequence_first, heads * HEAD_DIM, HEAD_DIM)
    size = batch.to(tl.int64) * length * heads
    base = (size + tl.where(sequence_first, head, head.to(tl.int64) * length)) * HEAD_DIM
    kv_head = head * kv_heads // heads
    kv_stride = tl.where(sequence_first, kv_heads * HEAD_DIM, HEAD_DIM)
    kv_size = batch.to(tl.int64) * length * kv_heads
    kv_base = (kv_size + tl.where(sequence_first, kv_head, kv_head.to(tl.int64) * length)) * HEAD_DIM

    # Rows past the end repeat the last query, and are not stored.
    row = t0 + tl.arange(0, BLOCK_QUERIES)
    t = tl.minimum(row, length - 1)
    d = tl.arange(0, PADDED)
    rows = base + t.to(tl.int64)[:, None] * stride + d[None, :]
    if HEAD_DIM == PADDED:  # noqa: SIM108 (a conditional expression would compile both)
        q = tl.load(query + rows)
    else:
        q = tl.load(query + rows, mask=(d < HEAD_DIM)[None, :], other=0.0)
    # The sign of the scale goes into the query, exactly: a positive factor keeps the order of the scores.
    scale = scale_bits.to(tl.float32, bitcast=True)
    q = (q.to(tl.float32) * tl.where(scale < 0.0, -1.0, 1.0)).to(q.dtype)
    factor = tl.maximum(tl.abs(scale) * _LOG2E, _SMALLEST_SCALE)
    cap = softcap_bits.to(tl.float32, bitcast=True) * _LOG2E / factor
    middle = t0 + BLOCK_QUERIES // 2
    rates = d
    if HAS_XPOS:
        rates = _decay_rates(xpos_base_bits.to(tl.float32, bitcast=True), HEAD_DIM, PADDED)
        q = _decayed(q, t - middle, rates, output.dtype.element_ty != tl.float32 or FP32_PRODUCTS == "tf32")
        middle += look_forward * window_size

    first, end = _visible_interval(t, length, window_size, look_backward, look_forward, flags)
    last = tl.minimum(t0 + BLOCK_QUERIES, length) - 1
    low, low_end = _visible_interval(t0, length, window_size, look_backward, look_forward, flags)
    high, high_end = _visible_interval(last, length, window_size, look_backward, look_forward, flags)
    # Tiles are counted from the first visible key. Those of [plain, plain_end) every query sees whole; but shared_qk's
    # scores of tokens with themselves, in [own, own_end) of them, need the comparison too.
    tiles = tl.cdiv(high_end - low, BLOCK_KEYS)
    plain = tl.minimum(tl.cdiv(high - low, BLOCK_KEYS), tiles)
    plain_end = tl.maximum((low_end - low) // BLOCK_KEYS, plain)
    own = plain_end
    own_end = plain_end
    itself = t
    if HAS_SHARED_QK:
        own = tl.maximum((t0 - low) // BLOCK_KEYS, plain)
        own_end = tl.minimum((last - low) // BLOCK_KEYS + 1, plain_end)

    bias_row = t
    if HAS_BIAS:
        width = (look_backward + 1 + look_forward) * window_size
        attn_bias += head.to(tl.int64) * window_size * width
        bias_row = t % window_size * width - (t // window_size - look_backward) * window_size
    if HAS_MASK:
        key_mask += batch.to(tl.int64) * length
        if HAS_SHARED_QK:
            itself = tl.where(tl.load(key_mask + t) != 0, t, -1)  # a hidden token stays hidden from itself

    coarse = (factor.to(tl.int32, bitcast=True) & _POWER_OF_TWO).to(tl.float32, bitcast=True)
    top = tl.full([BLOCK_QUERIES], 0.0, tl.float32) + tl.maximum((1.0 / factor) * _LOWEST_SCORE, _LOWEST_SCORE)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    acc = tl.zeros([BLOCK_QUERIES, PADDED], tl.float32)
    for step in tl.range(0, plain + own_end - own + tiles - plain_end):
        tile = step + tl.where(step < plain, 0, own - plain)
        tile += tl.where(tile < own_end, 0, plain_end - own_end)
        acc, total, top = _attend(
            acc, total, top, q, key + kv_base, value + kv_base, key_mask, attn_bias, low + tile * BLOCK_KEYS, first,
            end, itself, bias_row, high_end, kv_stride, factor, coarse, cap, middle, rates, HEAD_DIM, PADDED,
            BLOCK_KEYS, HAS_MASK, HAS_BIAS, HAS_XPOS, HAS_SOFTCAP, HAS_SHARED_QK, FP32_PRODUCTS, COMPARE=True,
        )  # fmt: skip
    for step in tl.range(plain, plain_end - own_end + own):
        s = low + (step + tl.where(step < own, 0, own_end - own)) * BLOCK_KEYS
        acc, total, top = _attend(
            acc, total, top, q, key + kv_base, value + kv_base, key_mask, attn_bias, s, first, end, itself, bias_row,
            high_end, kv_stride, factor, coarse, cap, middle, rates, HEAD_DIM, PADDED, BLOCK_KEYS, HAS_MASK, HAS_BIAS,
            HAS_XPOS, HAS_SOFTCAP, HAS_SHARED_QK, FP32_PRODUCTS, COMPARE=False,
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        total += tl.math.exp2(tl.minimum(sink - top * factor, _LARGEST_SINK))
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    stored = (row < length)[:, None]
    if HEAD_DIM != PADDED:
        stored = stored & (d < HEAD_DIM)[None, :]
    tl.store(output + rows, out.to(output.dtype.element_ty), mask=stored)
