"""Causal `AFTLocal` a few tokens at a time, in memory that only depends on its window `s`.

The formula of `module.py` in this folder: per channel the running softmax state (m, num, den) of the keys before the
window, whose bias is 0, is joined with the keys of the window, whose biases are learned. The caches between calls are,
with `t` the last position,

- `key_ring, value_ring` `[s, B, D]`: keys and values of `t - s < p ≤ t`, position `p` in slot `p mod s`,
- `state` `[3, B, D]`: (m, num, den) of the keys up to `t - s`; all zeros while there are none.

A call concatenates ring and new keys. Each of its queries sees the state and all of these keys that are not after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.nodes.aft import HIDDEN_KEY
from .arguments import AFTLocalArgs
from .module import AFTLocal

# m, num, den: [B, D], or [C, B, D].
State = tuple[Tensor, Tensor, Tensor]


class StepAFTLocal(AFTLocal):
    """Query, key, value `[C, B, D]` → `[C, B, D]`.

    Args:
        args: upstream's arguments; the model was run with a causal mask.
    """

    by_age: Tensor

    def __init__(self, args: AFTLocalArgs) -> None:
        super().__init__(args, args.seq_len, causal=True)
        self.slots = ring_keys(args)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the biases by age, `by_age[i, a] = pos_bias[i, i - a]` in the window, and a last column of 0.

        Raises:
            UsageError: the checkpoint's `local_mask` is that of another window.
        """
        self._check_window()
        length = len(self.pos_bias)
        age, row = torch.arange(self.slots + 1)[None], torch.arange(length)[:, None]
        bias = self.pos_bias.float()[row, (row - age).clamp_min(0)]
        self.register_buffer("by_age", torch.where(age < self.slots, bias, 0.0), persistent=False)
        del self.pos_bias, self.local_mask

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        key_ring: Tensor,
        value_ring: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the output and the next ring and state; position int64 `[1]`; fp32 between the matrices."""
        dtype, chunk, window = self.query.weight.dtype, key.shape[0], self.slots
        gate = self.query(query.to(dtype)).float().sigmoid()
        keys = torch.cat((key_ring, self.key(key.to(dtype)).float()))
        values = torch.cat((value_ring, self.value(value.to(dtype)).float()))
        slot, row = torch.arange(window), torch.arange(chunk)
        # Distance of each key from the chunk's first position.
        offset = torch.cat((-1 - (position + (window - 1 - slot)) % window, row))  # [s + C]
        written = position + offset >= 0

        peak, num, den = state.unbind()
        before = torch.where(den > 0, peak, HIDDEN_KEY), num, den
        age = row[:, None] - offset
        bias = self.by_age[position + row].gather(1, age.clamp(0, window))
        bias = torch.where((age >= 0) & written, bias, HIDDEN_KEY)
        _, num, den = _joined(before, keys + bias[:, :, None, None], values)
        output: Tensor = self.output((gate * (num / den)).to(dtype))

        leaves = written & (offset <= chunk - 1 - window)
        leaving = torch.where(leaves[:, None, None], keys, HIDDEN_KEY)
        peak, num, den = _joined(before, leaving, values)
        after = torch.where(peak > HIDDEN_KEY / 2, torch.stack((peak, num, den)), 0.0)

        latest = chunk - 1 - (position + (chunk - 1 + window - slot)) % window
        source = torch.where(latest >= 0, window + latest, slot)
        return output, keys[source], values[source], after


def ring_keys(args: AFTLocalArgs) -> int:
    """Return how many keys a ring holds: those with learned biases."""
    return min(args.local_window_size, args.seq_len)


def _joined(state: State, logits: Tensor, values: Tensor) -> State:
    """Add keys `[…, n, B, D]` to the state `[B, D]`, giving `[…, B, D]`."""
    peak = torch.maximum(state[0], logits.amax(dim=-3))
    weights, scale = torch.exp(logits - peak.unsqueeze(-3)), torch.exp(state[0] - peak)
    return peak, state[1] * scale + (weights * values).sum(dim=-3), state[2] * scale + weights.sum(dim=-3)
