"""Define what the sidecar says about a step file: how to call it repeatedly to continue a sequence.

A step file takes `chunk` tokens a sequence, the number of tokens consumed before, and the caches; it gives
the logits and the caches of the next call. Whoever runs it fills the caches once (`CacheRecord.fill`),
and after each call feeds `output` of every cache to its `input`.

Importing this module imports pydantic: light modules import it inside functions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..limits import LARGEST_SIZE
from .schema import Record


class CacheRecord(Record):
    """One tensor that each call passes on to the next.

    Args:
        input: the graph input it is read from.
        output: the graph output it is written to, of the same shape and dtype.
        shape: its shape.
        dtype: its element type, in numpy's names.
        fill: the value of every element before the first token.
    """

    input: str
    output: str
    shape: list[int]
    dtype: str
    fill: float = 0.0


class StepRecord(Record):
    """How to call a step file.

    Args:
        mode: "step" generates, one token a call; "prefill" consumes a prompt, `chunk` tokens a call.
        chunk: tokens a sequence and call, 1 for "step". A call is always full: what is left of a prompt
            goes through the step file token by token, whose caches are the same.
        token_input: the first data input: `tokens` int64 `[B, chunk]`, or where embeddings go in `x`
            `[B, chunk, dim]`, `q` `[B, H, chunk, D]` (with `k` and `v`), `query` `[chunk, B, dim]` (AFTLocal).
        sequence_axis: the axis of the data inputs and of the output that counts positions: 1 for `[B, chunk, …]`.
        position_input: int64 `[1]`, the tokens consumed before this call, the same for every sequence.
        logits_output: the model's output, `[B, chunk, vocabulary]` for tokens.
        caches: the tensors passed on, in the order of the graph's inputs.
        max_positions: positions the file can distinguish: those the model has learned embeddings or biases for, else
            those that 32 bits can count. A call with `position + chunk` beyond it is an error. None in older files,
            which count in 64 bits and run without end.
        in_place: one buffer may serve as a cache's input and its output. Else two take turns.
        prefill: the file in the same folder that takes larger chunks and returns the same caches, or None.
        early_start: the first call may begin before position 0: such positions are hidden from all others.
            So a prompt that fills no chunk is filled up in front.
    """

    mode: Literal["step", "prefill"]
    chunk: int = Field(ge=1)
    token_input: str
    sequence_axis: int = Field(default=1, ge=0)
    position_input: str = "position"
    logits_output: str
    caches: list[CacheRecord]
    max_positions: int | None = None
    in_place: bool
    prefill: str | None = None
    early_start: bool = False

    @property
    def why_positions_end(self) -> str:
        """Say in a sentence why there is no position past `max_positions`."""
        if self.max_positions == LARGEST_SIZE:
            return f"The file counts at most {LARGEST_SIZE:,} positions, the largest number in 32 bits."
        return f"The file was exported for {self.max_positions} positions, all that the model has or fewer."
