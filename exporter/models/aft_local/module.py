"""`labml_nn.transformers.aft.AFTLocal` with static shapes, O(T·s) in time and O(T) in memory.

    w_ij = pos_bias_ij if |i - j| < s else 0, -inf where i may not see j
    y_i = Σ_j e^{w_ij + k_j}·v_j / Σ_j e^{w_ij + k_j}   per channel;   out = W·(σ(q_i)·y_i) + b

Outside the window the bias is 0, not -inf, so the sums go over the whole sequence. In a file they are one node
(`core.nodes.aft`). Its function takes biases at most 60 apart. With wider ones, with a mask `[T, T]` of any pattern,
and outside of an export, this module computes the sums by Scans over running softmax states (Milakov and Gimelshein,
arXiv 1805.02867), per channel

    (m, num, den):   m = max_j a_j,   num = Σ_j e^{a_j - m}·v_j,   den = Σ_j e^{a_j - m},   a_j = w_ij + k_j
    (m, num, den) ⊕ (m', num', den') = (M, num·e^{m-M} + num'·e^{m'-M}, den·e^{m-M} + den'·e^{m'-M}),   M = max(m, m')

and a row's state is: keys up to i - s ⊕ (unless causal) keys from i + s on ⊕ the keys of the band, one by one.

- The stabiliser of every row and channel is the exact maximum of what it sees, so `den ≥ 1` whatever the keys and
  biases. Upstream subtracts the maxima of k and of w separately: rising keys in a causal model, or biases far below 0
  on the keys that matter, give 0/0. One matrix product per tile costs less and has the same flaw.
- Only exponents are subtracted: "sum of all + (e^w - 1) in the band" loses every digit at w = -20.
- The sums up to i - s, for all i: the sequence is cut in ~√T chunks, one Scan runs through all chunks side by
  side, a second one over their totals.
- The band is a Scan over the offsets j - i, a few per step. Unrolled, s = 32 was 2000 nodes instead of 170 and
  20 s of export instead of 4, and onnxruntime kept all shifted copies of k and v alive (3.2 GB instead of
  0.8 GB at T = 8192, D = 512).

With a mask `[T, T]` of any pattern, rows have no sums in common: then a Scan goes over all keys, in O(T²) time.

Source: `labml_nn.transformers.aft.AFTLocal.forward`, labml-nn 0.5.1; Zhai et al., arXiv 2105.14103.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Not `torch._higher_order_ops.scan.scan`, which compiles its function first, and under the ONNX exporter fails at the
# second function with other shapes.
from torch._higher_order_ops.scan import scan_op

from ....core.errors import UsageError
from ....core.nodes.aft import HIDDEN_KEY, WIDEST_BIASES, AftVariant
from ....core.nodes.attention import PLUGIN_ATTRIBUTES
from ..parts.attention_op import attention_node
from .arguments import AFTLocalArgs

# Offsets (or keys, with a full mask) per step of a Scan: they share one rescaling of the sums, but each needs buffers
# of its own. Of 1, 2, 4 and 8, 4 was the fastest in onnxruntime at D = 64 and D = 512.
_GROUP = 4

# m, num, den: per row and channel, or per channel.
State = Sequence[Tensor]
Body = Callable[[State, tuple[Tensor, ...], tuple[Tensor, ...]], State]


def _merge(first: State, second: State) -> State:
    """Merge the states of two sets of keys."""
    peak = torch.maximum(first[0], second[0])
    scale, other = torch.exp(first[0] - peak), torch.exp(second[0] - peak)
    return peak, first[1] * scale + second[1] * other, first[2] * scale + second[2] * other


def _absorb(state: State, logits: Sequence[Tensor], values: Sequence[Tensor]) -> State:
    """Add a few single keys to a state."""
    peak, num, den = state
    for logit in logits:
        peak = torch.maximum(peak, logit)
    scale = torch.exp(state[0] - peak)
    num, den = num * scale, den * scale
    for logit, value in zip(logits, values, strict=True):
        weight = torch.exp(logit - peak)
        num, den = num + weight * value, den + weight
    return peak, num, den


def _nothing(like: Tensor) -> State:
    """Return the state of no keys, in the shape of `like`."""
    return torch.full_like(like, HIDDEN_KEY), torch.zeros_like(like), torch.zeros_like(like)


def _scan(
    body: Body, state: State, steps: Sequence[Tensor], fixed: Sequence[Tensor] = (), *, trail: bool = False
) -> tuple[State, State]:
    """Run ONNX's Scan: `state = body(state, slices of steps, fixed)` along the first axis of `steps`.

    Returns:
        The last state, and with `trail` the stacked states after each step (else the last state again).
    """
    last = 3 + len(steps)

    def flat(*parts: Tensor) -> list[Tensor]:
        after = body(parts[:3], parts[3:last], parts[last:])
        # Outputs may not share memory, so stacked ones are copied.
        return [*after, *(x.clone() for x in after if trail)]

    outputs = scan_op(flat, list(state), list(steps), tuple(fixed))
    return outputs[:3], outputs[-3:]


def _padded(state: State, before: int) -> State:
    """Return the state `[N, F]` with `before` empty rows in front."""
    peak, num, den = state
    front = (0, 0, before, 0)
    return F.pad(peak, front, value=HIDDEN_KEY), F.pad(num, front), F.pad(den, front)


def _running(keys: Tensor, values: Tensor) -> State:
    """Compute for every row i the state of keys 0 … i; all `[N, F]`."""
    length, width = keys.shape
    chunk = math.isqrt(length - 1) + 1
    chunks = -(-length // chunk)
    padding = (0, 0, 0, chunks * chunk - length)
    by_step = [
        x.reshape(chunks, chunk, width).transpose(0, 1)
        for x in (F.pad(keys, padding, value=HIDDEN_KEY), F.pad(values, padding))
    ]
    nothing = _nothing(by_step[0][0])
    chunk_totals, inside = _scan(
        lambda state, step, _: _absorb(state, step[:1], step[1:]), nothing, by_step, trail=True
    )
    if chunks == 1:
        return [x[:, 0] for x in inside]
    nothing = _nothing(chunk_totals[0][0])
    _, through = _scan(lambda state, step, _: _merge(state, step), nothing, chunk_totals, trail=True)
    through = _padded([x[:-1] for x in through], 1)  # before each chunk
    parts = _merge(through, inside)  # [chunk, chunks, F]
    return [x.transpose(0, 1).reshape(chunks * chunk, width)[:length] for x in parts]


class AFTLocal(nn.Module):
    """Attention free transformer with local biases: query, key, value `[T, B, D]` → `[T, B, D]`.

    Args:
        args: upstream's arguments.
        length: sequence length `T`, at most `args.seq_len`.
        causal: the model was run with a causal mask.
        full_mask: `forward` takes a mask `[T, T]`; O(T²) time.

    Raises:
        UsageError: the sequence is longer than the table of biases.
    """

    position_bias: Tensor
    pos_bias: Tensor
    local_mask: Tensor
    band: Tensor
    offset: Tensor
    row: Tensor

    def __init__(self, args: AFTLocalArgs, length: int, *, causal: bool = False, full_mask: bool = False) -> None:
        super().__init__()
        if length > args.seq_len:
            raise UsageError(
                f"A sequence of {length} is beyond the model's seq_len {args.seq_len}.",
                why="There are no learned biases past it.",
                fix=f"Use {args.seq_len} or less.",
            )
        self.length, self.window, self.causal, self.full_mask = length, args.local_window_size, causal, full_mask
        self.is_node = False  # until the biases are known
        # How far the band reaches; positions beyond the sequence need no bias.
        self.back = min(args.local_window_size, length) - 1
        self.ahead = 0 if causal else self.back
        self.query, self.key, self.value = (nn.Linear(args.d_model, args.d_model, bias=args.bias) for _ in range(3))
        self.output = nn.Linear(args.d_model, args.d_model)
        self.pos_bias = nn.Parameter(torch.zeros(args.seq_len, args.seq_len))
        self.register_buffer("local_mask", torch.ones(args.seq_len, args.seq_len, dtype=torch.bool))

    @torch.no_grad()
    def prepare(self) -> None:
        """Keep only the band of biases, `band[j - i + back, i] = pos_bias[i, j]`, and drop the table.

        A shorter sequence takes the table's first rows and columns, as upstream does.

        Raises:
            UsageError: the checkpoint's `local_mask` belongs to another window.
        """
        self._check_window()
        table = self.pos_bias[: self.length, : self.length]
        band = torch.zeros(self.back + 1 + self.ahead, self.length)
        for diagonal in range(-self.back, self.ahead + 1):
            first = max(-diagonal, 0)  # the first row that has a key there
            biases = table.diagonal(diagonal)
            band[diagonal + self.back, first : first + len(biases)] = biases.float()
        del self.pos_bias, self.local_mask
        # How far the biases, and the 0 of all other keys, are apart.
        width = float(band.max().clamp_min(0) - band.min().clamp_max(0))
        self.is_node = not self.full_mask and width <= WIDEST_BIASES
        if self.is_node:
            self.register_buffer("position_bias", band.t().contiguous(), persistent=False)
        for name, value in self._tables(band).items():
            self.register_buffer(name, value, persistent=False)

    def _tables(self, band: Tensor) -> dict[str, Tensor]:
        """Return the band and its row numbers in the layout that the Scan over it takes."""
        row = torch.arange(self.length)
        if self.full_mask:
            return {"band": band, "row": row}
        count = len(band)
        steps = -(-count // _GROUP)
        padding = steps * _GROUP - count
        return {
            "band": F.pad(band, (0, 0, 0, padding), value=HIDDEN_KEY).reshape(steps, -1, self.length, 1),
            "offset": torch.arange(steps * _GROUP).clamp_max(count - 1).reshape(steps, -1),
            "row": row,
        }

    def _check_window(self) -> None:
        """Check that the saved mask, by which upstream multiplies the biases, belongs to this window."""
        size, reach = len(self.local_mask), min(self.window, len(self.local_mask)) - 1
        inside = [self.local_mask.diagonal(offset) for offset in range(-reach, reach + 1)]
        expected = size * (2 * reach + 1) - reach * (reach + 1)
        if not all(bool(part.all()) for part in inside) or int(self.local_mask.count_nonzero()) != expected:
            seen = int(self.local_mask[0].count_nonzero())
            raise UsageError(
                f"local_window_size is given as {self.window}, but local_mask in the checkpoint differs.",
                why=f"Its first row keeps {seen} biases.",
                fix=f"Set local_window_size to {seen}.",
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        full_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer; mask `[B, T]` of keys and full_mask `[T, T]` of query and key are bool, True = keep.

        A row that sees no key gives `output.bias`. Between the matrices everything is fp32.
        """
        dtype = self.query.weight.dtype
        gate, keys, values = (
            part(x.to(dtype)).float() for part, x in ((self.query, query), (self.key, key), (self.value, value))
        )
        if self.is_node and torch.onnx.is_in_onnx_export():
            variant = AftVariant(causal=self.causal, has_mask=mask is not None)
            inputs = [gate, keys, values, self.position_bias, mask]
            gated = attention_node(variant.op_type, inputs, PLUGIN_ATTRIBUTES)
        else:
            gated = gate.sigmoid() * self._means(keys, values, mask, full_mask).reshape(gate.shape)
        output: Tensor = self.output(gated.to(dtype))
        return output

    def _means(self, keys: Tensor, values: Tensor, mask: Tensor | None, full_mask: Tensor | None) -> Tensor:
        """Compute the weighted means by Scans, `[T, B, D]` → `[T, B·D]`."""
        if mask is not None:
            kept = mask.t().unsqueeze(-1)
            # The values too: a hidden key's weight is 0, but 0·NaN would be NaN.
            keys, values = torch.where(kept, keys, HIDDEN_KEY), torch.where(kept, values, 0.0)
        keys, values = keys.flatten(1), values.flatten(1)  # channels of all batches side by side, [T, F]
        if full_mask is not None:
            m, num, den = self._over_all_keys(keys, values, full_mask)
        else:
            m, num, den = self._over_band(self._outside(keys, values), keys, values)
        mean = num / den
        if mask is not None or full_mask is not None:
            mean = torch.where(m > HIDDEN_KEY / 2, mean, 0.0)
        return mean

    def _outside(self, keys: Tensor, values: Tensor) -> State:
        """Compute for every row i the state of the keys up to i - s, and unless causal of those from i + s on."""
        count = self.length - self.window  # rows that have keys on one side beyond the window
        if count <= 0:
            return _nothing(keys)
        if self.causal:
            return _padded(_running(keys[:count], values[:count]), self.window)
        # The keys ahead are the keys behind in the reversed sequence. Computing both side by side takes half the steps
        # and a tenth more memory.
        both = (torch.cat((x[:count], x.flip(0)[:count]), dim=1) for x in (keys, values))
        halves = [x.chunk(2, dim=1) for x in _padded(_running(*both), self.window)]
        return _merge([behind for behind, _ in halves], [ahead.flip(0) for _, ahead in halves])

    def _over_band(self, state: State, keys: Tensor, values: Tensor) -> State:
        """Add the keys of the window, whose biases are learned, to the state."""
        around = (0, 0, self.back, self.ahead)
        fixed = (F.pad(keys, around, value=HIDDEN_KEY), F.pad(values, around), self.row)

        def body(state: State, step: tuple[Tensor, ...], fixed: tuple[Tensor, ...]) -> State:
            (bias, offset), (keys, values, row) = step, fixed
            seen = [row + shift for shift in offset.unbind()]  # the key at this offset from each row
            logits = [keys[index] + b for index, b in zip(seen, bias.unbind(), strict=True)]
            return _absorb(state, logits, [values[index] for index in seen])

        return _scan(body, state, (self.band, self.offset), fixed)[0]

    def _over_all_keys(self, keys: Tensor, values: Tensor, full_mask: Tensor) -> State:
        """Compute the state of the keys that the mask shows to each row, key by key."""
        group = math.gcd(self.length, _GROUP)
        steps = [x.reshape(-1, group, x.shape[1]) for x in (keys, values, full_mask.t())]
        fixed = (self.band.flatten(), self.row)

        def body(state: State, step: tuple[Tensor, ...], fixed: tuple[Tensor, ...]) -> State:
            keys, values, visible, number = (x.unbind() for x in step)
            biases = [self._column(j, v, *fixed) for j, v in zip(number, visible, strict=True)]
            return _absorb(state, [k + b for k, b in zip(keys, biases, strict=True)], values)

        return _scan(body, _nothing(keys), (*steps, self.row.reshape(-1, group)), fixed)[0]

    def _column(self, key: Tensor, visible: Tensor, band: Tensor, row: Tensor) -> Tensor:
        """Return the biases of one key (a scalar index) in all rows, `[T, 1]`; HIDDEN_KEY where it is not seen."""
        count = self.back + 1 + self.ahead
        offset = key - row + self.back
        bias = torch.where((offset >= 0) & (offset < count), band[offset.clamp(0, count - 1) * self.length + row], 0.0)
        if self.causal:
            visible = visible & (offset < count)
        return torch.where(visible, bias, HIDDEN_KEY).unsqueeze(-1)
