"""Tables that depend on the position alone, computed once per call for all layers.

They hold which keys a query sees, and where in the ring new keys are written.

Ages: slot `j` of the ring holds the key of age `(t - j) mod R` as seen from the query at `t`. A key is visible if
its age is from 0 to `min(t, b·w)`, with `t mod w` more for block-local windows.

xpos: the keys in the ring are not scaled. A step scales them when it reads them, by `ζ^(age / base)`, which is at most
1 at any position; a chunk counts its exponents from the middle of the keys it attends to. Source of ζ:
`core.nodes.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....core.nodes.attention import LOWEST_BIAS, OUTSIDE_SCORE, SELF_SCORE
from ....core.nodes.step import StepAttributes, ring_slots
from ....plugins.torch_op import xpos_factor
from .step_rotary import RotaryPhase, far_remainder


@dataclass(frozen=True)
class StepTables:
    """The inputs of a step node that are the same for every layer; shapes as in `core.nodes.step`.

    Args:
        score_bias: `[C, V]`, or with a bias `[H, C, V]`.
        write_index: `[B, H, 1, 3]`, or for a chunk `[R]`.
        scales: the scales of xpos, in the node's order.
        rotation: rotates a head `[D]` of queries and keys at this position: a matrix `[D, D]` for one token,
            cosines and signed sines `[C, 2, D/2]` for a chunk; empty without rotary.
    """

    score_bias: Tensor
    write_index: Tensor
    scales: tuple[Tensor, ...]
    rotation: tuple[Tensor, ...]


class StepTableBuilder(nn.Module):
    """A module that computes the tables of each call from constants of the graph.

    Args:
        attributes: attributes of the nodes.
        heads: heads `H`.
        head_dim: head size `D`.
        chunk: tokens per call `C`.
        positions: how many positions the model has; None if there is no limit.
    """

    ring: Tensor
    row: Tensor
    decay: Tensor
    query_scale: Tensor
    new_key_scale: Tensor

    def __init__(
        self, attributes: StepAttributes, heads: int, head_dim: int, chunk: int, positions: int | None = None
    ) -> None:
        super().__init__()
        self.attributes, self.heads, self.head_dim, self.chunk = attributes, heads, head_dim, chunk
        self.slots = ring_slots(attributes.geometry)
        self.remainder = far_remainder if positions is None else torch.remainder

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the slots, the rows of the chunk, and the powers of ζ they need."""
        tables = {"ring": torch.arange(self.slots), "row": torch.arange(self.chunk)}
        base = self.attributes.xpos_scale_base
        if base:
            # The middle one of the V keys has exponent 0; for a step it is the query that has exponent 0.
            middle = 0.5 * (self.chunk - self.slots) if self.chunk > 1 else 0.0
            # The newest key of the ring is one before the chunk, or the query itself.
            first = 1 if self.chunk > 1 else 0
            distances = {
                "decay": tables["ring"] + first + middle,
                "query_scale": tables["row"] - middle,
                "new_key_scale": middle - tables["row"],
            }
            tables |= {name: xpos_factor(self.head_dim, x, base).float() for name, x in distances.items()}
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def forward(
        self, position: Tensor, batch: int, rotary: RotaryPhase | None, attn_bias: Tensor | None = None
    ) -> StepTables:
        """Compute the tables of a call; position int64 `[1]`, attn_bias `[H, w, K]`."""
        # Sums use the slot, because sums with a late position would not fit 32 bits.
        slot = self.remainder(position, self.slots)
        if self.chunk == 1:
            age = (slot + (self.slots - self.ring).unsqueeze(0)) % self.slots
            index, behind, query = self._coordinates(batch, slot), age, position
        else:
            behind = (slot + (self.slots - 1 - self.ring)) % self.slots
            age = self.row.unsqueeze(1) - torch.cat((-1 - behind, self.row))
            query = (position + self.row).unsqueeze(1)
            # The newest position that belongs in each slot, counted from the chunk's first.
            latest = self.chunk - 1 - (slot + (self.chunk - 1 + self.slots - self.ring)) % self.slots
            index = torch.where(latest >= 0, self.slots + latest, self.ring)
        scales: tuple[Tensor, ...] = ()
        if self.attributes.xpos_scale_base:
            ring_scale = self.decay[behind.flatten()]
            scales = (ring_scale,)
            if self.chunk > 1:
                scales = (self.query_scale, torch.cat((ring_scale, self.new_key_scale)))
        rotation: tuple[Tensor, ...] = ()
        if rotary is not None:
            rotation = rotary(position) if self.chunk == 1 else rotary.several(position + self.row)
        return StepTables(self._score_bias(query, age, attn_bias), index, scales, rotation)

    def _coordinates(self, batch: int, slot: Tensor) -> Tensor:
        """Build the coordinates batch, head and slot, `[B, H, 1, 3]`."""
        place = torch.zeros(batch, self.heads, 1, 3, dtype=torch.int64)
        place[..., 0], place[..., 1] = torch.arange(batch)[:, None, None], torch.arange(self.heads)[:, None]
        return place + slot * torch.tensor([0, 0, 1])

    def _score_bias(self, query: Tensor, age: Tensor, attn_bias: Tensor | None) -> Tensor:
        """Compute the bias of scores, `[C, V]`, or with attn_bias `[H, C, V]`.

        Query positions are `[C, 1]`, for a step `[1]`; ages are `[C, V]`.
        """
        geometry = self.attributes.geometry
        reach, place = query, self.remainder(query, geometry.window_size)
        if not geometry.exact_windowsize:
            reach = torch.minimum(query, place + geometry.backward_reach)
        elif self.chunk > 1:  # a single query's ring holds nothing older
            reach = query.clamp(0, geometry.backward_reach)  # before position 0 a query sees itself
        visible = age <= reach
        if self.chunk > 1:
            visible = visible & (age >= 0)
        seen = torch.tensor(0.0)
        itself = age == 0
        if attn_bias is not None:
            seen = self._given(attn_bias, place, age)
            seen = seen.masked_fill(itself, 0.0) if self.attributes.shared_qk else seen
        if self.attributes.shared_qk:
            seen = torch.where(itself, seen + SELF_SCORE, seen)
        return torch.where(visible, seen, OUTSIDE_SCORE)

    def _given(self, attn_bias: Tensor, place: Tensor, age: Tensor) -> Tensor:
        """Return the bias of every query and key, `[H, C, V]` fp32."""
        geometry = self.attributes.geometry
        width = geometry.keys_per_window
        slot = (place + geometry.backward_reach - age).clamp(0, width - 1)
        return attn_bias.float().clamp_min(LOWEST_BIAS).flatten(1)[:, place * width + slot]
