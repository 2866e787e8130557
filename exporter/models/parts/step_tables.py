"""What follows from the position alone, computed once a call for all layers: who sees what, and where keys go.

Ages: slot `j` of the ring holds the key of age `(t - j) mod R` as seen from the query at `t`. A key is visible if
its age is from 0 to `min(t, b·w)`, with `t mod w` more for block-local windows.

xpos: the keys in the ring are not scaled. A step scales them when it reads them, by `ζ^(age / base)`, which is at
most 1 at any position; a chunk counts its exponents from the middle of what it attends to. Source of ζ:
`core.node.NodeAttributes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....core.nodes.attention import LOWEST_BIAS, OUTSIDE_SCORE, SELF_SCORE
from ....core.nodes.step import StepAttributes, ring_slots
from ....plugins.torch_op import xpos_factor
from .step_rotary import RotaryPhase


@dataclass(frozen=True)
class StepTables:
    """The inputs of a step node that are the same for every layer; shapes as in `core.step_node`.

    Args:
        score_bias: `[C, V]`, or with a bias `[H, C, V]`.
        write_index: `[B, H, 1, 3]`, or for a chunk `[R]`.
        scales: of xpos, in the node's order.
        rotation: turns a head `[D]` of queries and keys at this position: a matrix `[D, D]` for one token,
            cosines and signed sines `[C, D]` for a chunk; nothing without rotary.
    """

    score_bias: Tensor
    write_index: Tensor
    scales: tuple[Tensor, ...]
    rotation: tuple[Tensor, ...]


class StepTableBuilder(nn.Module):
    """Makes the view of each call; its tables are constants of the graph.

    Args:
        attributes: those of the nodes.
        heads: heads `H`.
        head_dim: head size `D`.
        chunk: tokens a call `C`.
    """

    ring: Tensor
    row: Tensor
    decay: Tensor
    query_scale: Tensor
    new_key_scale: Tensor

    def __init__(self, attributes: StepAttributes, heads: int, head_dim: int, chunk: int) -> None:
        super().__init__()
        self.attributes, self.heads, self.head_dim, self.chunk = attributes, heads, head_dim, chunk
        self.slots = ring_slots(attributes.geometry)

    @torch.no_grad()
    def prepare(self) -> None:
        """Slots, rows of the chunk, and the powers of ζ they need."""
        tables = {"ring": torch.arange(self.slots), "row": torch.arange(self.chunk)}
        base = self.attributes.xpos_scale_base
        if base:
            # Of the V keys the middle one has exponent 0; for a step, whose query has exponent 0, the query.
            middle = 0.5 * (self.chunk - self.slots) if self.chunk > 1 else 0.0
            first = (
                1 if self.chunk > 1 else 0
            )  # the newest key of the ring is one before the chunk, or the query itself
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
        """Position int64 `[1]`, attn_bias `[H, w, K]`."""
        if self.chunk == 1:
            age = (position + (self.slots - self.ring).unsqueeze(0)) % self.slots
            index, behind, query = self._coordinates(batch, position % self.slots), age, position
        else:
            behind = (position + (self.slots - 1 - self.ring)) % self.slots
            age = self.row.unsqueeze(1) - torch.cat((-1 - behind, self.row))
            query = (position + self.row).unsqueeze(1)
            # The newest position that belongs in each slot, counted from the chunk's first.
            latest = self.chunk - 1 - (position + (self.chunk - 1 + self.slots - self.ring)) % self.slots
            index = torch.where(latest >= 0, self.slots + latest, self.ring)
        scales: tuple[Tensor, ...] = ()
        if self.attributes.xpos_scale_base:
            ring_scale = self.decay[behind.flatten()]
            scales = (ring_scale,)
            if self.chunk > 1:
                scales = (self.query_scale, torch.cat((ring_scale, self.new_key_scale)))
        rotation = (
            () if rotary is None else rotary(position) if self.chunk == 1 else rotary.several(position + self.row)
        )
        return StepTables(self._score_bias(query, age, attn_bias), index, scales, rotation)

    def _coordinates(self, batch: int, slot: Tensor) -> Tensor:
        """`[B, H, 1, 3]`: batch, head, slot."""
        place = torch.zeros(batch, self.heads, 1, 3, dtype=torch.int64)
        place[..., 0], place[..., 1] = torch.arange(batch)[:, None, None], torch.arange(self.heads)[:, None]
        return place + slot * torch.tensor([0, 0, 1])

    def _score_bias(self, query: Tensor, age: Tensor, attn_bias: Tensor | None) -> Tensor:
        """Query positions `[C, 1]` (of a step `[1]`) and ages `[C, V]` → `[C, V]`, or with a bias `[H, C, V]`."""
        geometry = self.attributes.geometry
        reach, place = query, query % geometry.window_size
        if not geometry.exact_windowsize:
            reach = torch.minimum(query, place + geometry.backward_reach)
        elif self.chunk > 1:  # a single query's ring holds nothing older
            reach = query.clamp_max(geometry.backward_reach)
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
        """The bias of every query and key, `[H, C, V]` fp32."""
        geometry = self.attributes.geometry
        width = geometry.keys_per_window
        slot = (place + geometry.backward_reach - age).clamp(0, width - 1)
        return attn_bias.float().clamp_min(LOWEST_BIAS).flatten(1)[:, place * width + slot]
