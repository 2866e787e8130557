"""The table of peers: their labels, and the cells in which each is not measured, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..candidates import HEADS
from . import candidates as ways
from .candidates import Run
from .grid import MAIN_WINDOW, SOME_LENGTHS, Array, Cell

# The node's function definition and its compiled kernel.
OURS = ("node", "kernel")
_ALL_SCORES_AT_MOST = 2 << 30


@dataclass(frozen=True)
class Peer:
    """One way to compute it.

    Args:
        label: as figures and lists call it.
        short: as the head of a column.
        prepare: everything up to the call that is timed.
        all_scores: it holds scores of every query with every key, in so many bytes each, 0 where it does not.
        slow_to_make: compiling or exporting it takes many seconds a cell: only some cells get it, unless all are asked.
        refuses: a reason why it cannot compute a cell, or None.
    """

    label: str
    short: str
    prepare: Callable[[Cell, dict[str, Array]], Run]
    all_scores: int = 0
    slow_to_make: bool = False
    refuses: Callable[[Cell], str | None] = lambda _: None

    def why_not(self, cell: Cell, *, thorough: bool = False) -> str | None:
        """Why a cell is left out, or None; `thorough` leaves out none for the time its making takes."""
        scores = self.all_scores * HEADS * cell.length**2
        if scores > _ALL_SCORES_AT_MOST:
            return "its n×n scores take more than 2 GiB"
        often = cell.window == MAIN_WINDOW and cell.dtype == "fp32" and cell.length in SOME_LENGTHS
        if self.slow_to_make and not often and not thorough:
            return f"slow to compile or export: only at w = {MAIN_WINDOW}, fp32, n = 1k, 4k and 16k without --thorough"
        return self.refuses(cell)


def _only_causal_exact(cell: Cell) -> str | None:
    if not (cell.geometry.causal and cell.geometry.exact_windowsize):
        return "its window is causal and exact"
    return "it takes no key mask" if cell.masked else None


PEERS = {
    "node": Peer("localattn node", "node", ways.node),
    "kernel": Peer("localattn, compiled kernel", "kernel", ways.kernel),
    "upstream": Peer("local-attention, eager", "eager", ways.upstream),
    "upstream_compiled": Peer("local-attention, torch.compile", "compile", ways.upstream_compiled, slow_to_make=True),
    "upstream_exported": Peer(
        "local-attention, exported as it is", "exported", ways.upstream_exported, slow_to_make=True
    ),
    "dense": Peer("dense SDPA exported", "dense", ways.dense, all_scores=8),
    "attention_op": Peer("ONNX Attention, n×n mask", "AttnOp", ways.attention_operator, all_scores=8),
    "gqa": Peer("GroupQueryAttention", "GQA", ways.group_query, all_scores=4, refuses=_only_causal_exact),
    "sdpa_blocks": Peer("torch SDPA over blocks", "blocks", ways.sdpa_blocks),
    "flex": Peer("FlexAttention, compiled", "Flex", ways.flex, slow_to_make=True),
}
