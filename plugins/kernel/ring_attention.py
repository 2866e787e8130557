"""Define the kernel of the step and chunk nodes: attention that continues from a ring (`core.nodes.step`).

    out_r = Σ_s p_rs · v_s,   p = softmax over s of  scale·⟨q_r, k_s⟩ + bias_rs

The rows `r` of a program are heads that share a head of keys, and tokens of the call: a step's keys are read once for
all of them. Its keys `s` are a split of those that are attended to, slots first, then a chunk's own. A step attends to
the ring it writes: the new key stands in the slot of the one that it replaces, and the ring is written tile by tile
with the same numbers that were read, unless it is written in place. Keys that no row of the program sees are not read.

Numerics are those of `windowed_attention`: sums in fp32, an online softmax in powers of two, and weights of at most 1.
A split leaves sums, total and maximum, which `join` adds up in the order of splits.

xpos multiplies keys by a table of scales, which may leave fp16's range: 16-bit keys are then multiplied as TF32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (Triton reads annotations as its own.)

from __future__ import annotations

import triton
import triton.language as tl

from .ring import SCALARS, JoinSpec
from .tf32 import rounded

_LOG2E = tl.constexpr(1.4426950408889634)
# Where a running maximum starts: below every biased score.
_LOWEST = tl.constexpr(-3e38)
# Biases of hidden keys lie below, all others above: OUTSIDE_SCORE is -2e30, LOWEST_BIAS -1e30.
_SEEN = tl.constexpr(-1.5e30)


@triton.jit
def _rows_of(ring, new, s, slots, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, CHUNKED: tl.constexpr):
    """Addresses of the rows `s` of slots, and behind them of a chunk's own; `[keys, PADDED]`."""
    d = tl.arange(0, PADDED)
    rows = ring + s.to(tl.int64)[:, None] * HEAD_DIM
    if CHUNKED:
        rows = tl.where((s < slots)[:, None], rows, new + (s - slots).to(tl.int64)[:, None] * HEAD_DIM)
    return rows + d[None, :]


@triton.jit
def _own_row(new, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """The one row of a step, `[1, PADDED]`."""
    d = tl.arange(0, PADDED)
    return tl.load(new + d, mask=d < HEAD_DIM, other=0.0)[None, :]


# Without specialisation one compilation serves every value, 1 and multiples of 16 included.
@triton.jit(do_not_specialize=SCALARS)
def ring_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    score_bias,
    write_index,
    query_scale,
    key_scale,
    sinks,
    tokens,
    slots,
    kv_heads,
    group,
    biases,
    span,
    splits,
    scale_bits,
    softcap_bits,
    parts,
    output,
    next_key,
    next_value,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Some rows against one split of the keys of a sequence and a head of keys; arguments as in `ring`."""
    HAS_XPOS: tl.constexpr = key_scale is not None
    HAS_SINKS: tl.constexpr = sinks is not None
    ELEMENT: tl.constexpr = output.dtype.element_ty
    # Scaled keys of 16 bits are multiplied as TF32, all others as what they are.
    AS_TF32: tl.constexpr = HAS_XPOS and tl.float32 != ELEMENT
    FACTOR: tl.constexpr = tl.float32 if HAS_XPOS else ELEMENT
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    at = tl.program_id(1)
    head = at % kv_heads
    rows = group * tokens
    keys = slots + tokens if CHUNKED else slots
    ring_at = at.to(tl.int64) * slots * HEAD_DIM
    key += at.to(tl.int64) * tokens * HEAD_DIM
    value += at.to(tl.int64) * tokens * HEAD_DIM
    key_cache += ring_at
    value_cache += ring_at
    next_key += ring_at
    next_value += ring_at
    table = tl.where(biases == 1, head, tl.where(biases == 2, at // kv_heads, 0))
    score_bias += table.to(tl.int64) * tokens * keys

    # Rows past the end repeat the last one, and are not stored.
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    r = tl.minimum(row, rows - 1)
    d = tl.arange(0, PADDED)
    inside = (d < HEAD_DIM)[None, :]
    place = at.to(tl.int64) * rows + r.to(tl.int64)
    q = tl.load(query + place[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    token = r % tokens
    if HAS_XPOS:
        q = q.to(tl.float32)
        if CHUNKED:
            q *= tl.load(query_scale + token[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
        if AS_TF32:
            q = rounded(q)
    scale = scale_bits.to(tl.float32, bitcast=True)
    cap = softcap_bits.to(tl.float32, bitcast=True)
    factor = scale * _LOG2E
    if HAS_SOFTCAP:
        factor = 2.0 * factor / cap
        cap *= _LOG2E

    slot = slots
    copies = False
    own_key = d
    own_value = d
    if CHUNKED:
        # Where each row's own key is not hidden, no row needs a key that is; else a row may see none, and then has the
        # mean of all.
        own = tl.load(score_bias + token * keys + slots + token)
        blind = tl.min(own, 0) < _SEEN
    else:
        slot = tl.load(write_index + at.to(tl.int64) * 3 + 2).to(tl.int32)
        blind = tl.load(score_bias + slot) < _SEEN
        # Of the programs with the same keys one writes them.
        copies = (block == 0) & (key_cache.to(tl.int64) != next_key.to(tl.int64))
        own_key = _own_row(key, HEAD_DIM, PADDED)
        own_value = _own_row(value, HEAD_DIM, PADDED)

    top = tl.full([BLOCK_ROWS], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if HAS_SINKS:
        # A sink is a key without a value; it comes before the first one.
        sink = tl.load(sinks + head * group + r // tokens).to(tl.float32) * _LOG2E
        top = tl.where(split == 0, tl.maximum(sink, _LOWEST), top)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([BLOCK_ROWS, PADDED], tl.float32)
    begin = split * span
    end = tl.minimum(begin + span, keys)
    for first in tl.range(begin, end, BLOCK_KEYS):
        s = first + tl.arange(0, BLOCK_KEYS)
        there = s < end
        if CHUNKED:
            bias = tl.load(score_bias + token[:, None] * keys + s[None, :], mask=there[None, :], other=float("-inf"))
        else:
            bias = tl.load(score_bias + s, mask=there, other=float("-inf"))[None, :]
        seen = tl.max(bias) > _SEEN
        wanted = (s < tl.where(seen | copies | blind, end, first))[:, None]
        if HEAD_DIM != PADDED:
            wanted = wanted & inside
        k = tl.load(_rows_of(key_cache, key, s, slots, HEAD_DIM, PADDED, CHUNKED), mask=wanted, other=0.0)
        v = tl.load(_rows_of(value_cache, value, s, slots, HEAD_DIM, PADDED, CHUNKED), mask=wanted, other=0.0)
        if not CHUNKED:
            is_new = (s == slot)[:, None]
            k = tl.where(is_new, own_key, k)
            v = tl.where(is_new, own_value, v)
            written = (copies | ((block == 0) & is_new)) & there[:, None]
            if HEAD_DIM != PADDED:
                written = written & inside
            place_of = s.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
            tl.store(next_key + place_of, k, mask=written)
            tl.store(next_value + place_of, v, mask=written)
        if HAS_XPOS:
            scales = key_scale + s.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
            k = k.to(tl.float32) * tl.load(scales, mask=wanted, other=0.0)
            if AS_TF32:
                k = rounded(k)
        x = tl.dot(q, tl.trans(k.to(FACTOR)), input_precision="tf32" if AS_TF32 else "ieee") * factor
        if HAS_SOFTCAP:
            x = cap - 2.0 * cap / (1.0 + tl.math.exp2(x))
        x += bias * _LOG2E
        higher = tl.maximum(top, tl.max(x, 1))
        p = tl.math.exp2(x - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(ELEMENT), v.to(ELEMENT), acc * shrink[:, None], input_precision="ieee")
        top = higher

    stored = (row < rows)[:, None] & inside
    if splits == 1:
        out = acc / total[:, None]
        tl.store(output + place[:, None] * HEAD_DIM + d[None, :], out.to(ELEMENT), mask=stored)
    else:
        part = parts + ((at.to(tl.int64) * splits + split) * rows + r) * (HEAD_DIM + 2)
        tl.store(part[:, None] + d[None, :], acc, mask=stored)
        tl.store(part + HEAD_DIM, total, mask=row < rows)
        tl.store(part + (HEAD_DIM + 1), top, mask=row < rows)
    if CHUNKED:
        # The ring that is left, a share of the slots a program.
        share = tl.cdiv(slots, tl.cdiv(rows, BLOCK_ROWS) * splits)
        to = tl.program_id(0) * share
        last = tl.minimum(to + share, slots)
        for first in tl.range(to, last, BLOCK_KEYS):
            n = first + tl.arange(0, BLOCK_KEYS)
            there = n < last
            s = tl.load(write_index + n, mask=there, other=0).to(tl.int32)
            written = there[:, None] & inside
            place_of = n.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
            k = tl.load(_rows_of(key_cache, key, s, slots, HEAD_DIM, PADDED, CHUNKED), mask=written)
            v = tl.load(_rows_of(value_cache, value, s, slots, HEAD_DIM, PADDED, CHUNKED), mask=written)
            tl.store(next_key + place_of, k, mask=written)
            tl.store(next_value + place_of, v, mask=written)


@triton.jit(do_not_specialize=JoinSpec.scalars)
def join(parts, rows, splits, dim, output, BLOCK_SPLITS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """The mean of one row from the parts that splits left; arguments as in `ring`."""
    row = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_CHANNELS)
    inside = (d < dim)[None, :]
    parts += (at * splits * rows + row) * (dim + 2)
    stride = rows.to(tl.int64) * (dim + 2)
    top = tl.full([], _LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_CHANNELS], tl.float32)
    for first in tl.range(0, splits, BLOCK_SPLITS):
        n = first + tl.arange(0, BLOCK_SPLITS)
        there = n < splits
        part = parts + n * stride
        tops = tl.load(part + (dim + 1), mask=there, other=_LOWEST)
        totals = tl.load(part + dim, mask=there, other=0.0)
        sums = tl.load(part[:, None] + d[None, :], mask=there[:, None] & inside, other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        shrink = tl.math.exp2(top - higher)
        weights = tl.math.exp2(tops - higher)
        total = total * shrink + tl.sum(totals * weights, 0)
        acc = acc * shrink + tl.sum(sums * weights[:, None], 0)
        top = higher
    out = acc / total
    tl.store(output + (at * rows + row) * dim + d, out.to(output.dtype.element_ty), mask=d < dim)
