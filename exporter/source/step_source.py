"""A model as a step graph: its inputs, the module that computes it, and checks that it can stream.

The family defines how (`StepFamily`). Names and layouts of data inputs and output are those of the same model's
whole-sequence file, with `C` tokens in place of its length.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from ...core.documents.step_record import CacheRecord, StepRecord
from ...core.dtypes import IO_NAME
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.limits import LARGEST_SIZE
from ...core.nodes.step import ring_slots
from ...core.tensors import TensorSpec
from ..models.forms import StepFamily
from .source_model import SourceModel

POSITION = "position"
# A chunk counts xpos' exponents from its middle. Its largest factor may be e to this number; fp32 ends at e^88.
_LARGEST_EXPONENT = 80.0
# The channel that decays fastest has ζ = 0.4/1.4.
_FASTEST_DECAY = math.log(1.4 / 0.4)


class StepSource:
    """A model that takes `chunk` tokens per call.

    Args:
        source: the model, at any length; its batch is the file's.
        chunk: tokens per sequence and call.

    Raises:
        UsageError: the model, or a requested input, cannot stream.
    """

    def __init__(self, source: SourceModel, chunk: int) -> None:
        self.source, self.chunk = source, chunk
        if not isinstance(source.family, StepFamily):
            raise UsageError(
                f"{source.class_name.split('.')[1]} cannot run step by step.",
                why="This package has no step module for it.",
                fix=f"Export whole sequences: {argument('mode', 'full')}.",
            )
        self.family: StepFamily[Any] = source.family
        _refuse(source, chunk, self.max_positions)
        self.call = self.family.step_call

    @property
    def slots(self) -> int:
        """Number of keys that a layer's ring holds."""
        return self.family.slots(self.source.args)

    @property
    def max_positions(self) -> int:
        """Number of positions with learned weights; without a limit, the number that fits 32 bits."""
        learned = self.family.max_positions(self.source.args)
        return LARGEST_SIZE if learned is None else learned

    def data(self, dtype: str, length: int | str | None = None) -> list[TensorSpec]:
        """List the data inputs of one call, or of a sequence of another length, or of a dynamic length by its name."""
        axis, size = self.family.length_axis, self.chunk if length is None else length
        return [
            spec
            if spec.name == "attn_bias"
            else replace(spec, shape=(*spec.shape[:axis], size, *spec.shape[axis + 1 :]))
            for spec in self.source.inputs(dtype)
        ]

    def caches(self, dtype: str) -> list[CacheRecord]:
        """List the tensors that a call passes to the next."""
        return [
            CacheRecord(
                input=name,
                output=f"next_{name}",
                shape=list(shape),
                dtype=IO_NAME[dtype] if element == "float" else element,
            )
            for name, shape, element in self.family.step_caches(self.source.spec)
        ]

    def inputs(self, dtype: str) -> list[TensorSpec]:
        """List all inputs of the graph, in order: data, position, caches."""
        caches = [TensorSpec(x.input, x.dtype, tuple(x.shape)) for x in self.caches(dtype)]
        return [*self.data(dtype), TensorSpec(POSITION, "int64", (1,)), *caches]

    def integer_limits(self, dtype: str) -> dict[str, int | None]:
        """Return, for tokens and the position, one more than the largest value; the chunk must fit the positions."""
        tokens = {spec.name: self.source.token_limit for spec in self.data(dtype) if "int" in spec.dtype}
        return {**tokens, POSITION: self.max_positions - self.chunk + 1}

    def output_names(self) -> list[str]:
        """List the names of all outputs of the graph, in order."""
        return [self.source.outputs[0], *(x.output for x in self.caches("fp32"))]

    def module(self, dtype: str) -> nn.Module:
        """Build the module with its weights and constants, in `dtype`."""
        return self.source.module(dtype, lambda: self.family.step_module(self.source.spec, self.chunk))

    def record(self, dtype: str, *, mode: str, prefill: str | None) -> StepRecord:
        """Return what the sidecar records about the file."""
        return StepRecord(
            mode=mode,  # type: ignore[arg-type]
            chunk=self.chunk,
            token_input=self.source.inputs(dtype)[0].name,
            sequence_axis=self.family.length_axis,
            position_input=POSITION,
            logits_output=self.source.outputs[0],
            caches=self.caches(dtype),
            max_positions=self.max_positions,
            in_place=self.chunk == 1,
            prefill=prefill,
            early_start=self.family.early_start,
        )


def is_causal(source: SourceModel) -> bool:
    """Return whether no output depends on a later token."""
    return source.shapes.causal if source.geometry is None else all(window.causal for window in source.layers)


def _refuse(source: SourceModel, chunk: int, max_positions: int) -> None:
    """Refuse a model, chunk or input that cannot stream, with the reason."""
    if not is_causal(source):
        takes_causal = "causal" in source.family.extra_inputs
        raise UsageError(
            f"This {source.class_name.split('.')[1]} is not causal, so it cannot run step by step.",
            why="The output at a token depends on tokens after it, which a step has not seen.",
            fix=f"Add {argument('causal', True)} if it was run with a causal mask."
            if takes_causal
            else f"Export whole sequences: {argument('mode', 'full')}.",
        )
    for name, given in (("mask", source.shapes.mask), ("full_mask", source.shapes.full_mask)):
        if given:
            raise UsageError(
                f"{argument(name)} does not apply to a step file.",
                why="Which keys are there follows from the position; a call has no padding.",
                fix="Give sequences of one length, or one sequence a batch.",
            )
    if chunk < 1:
        raise UsageError(f"{argument('chunk')} is {chunk}.", why="A call takes at least 1 token.")
    if chunk > max_positions:
        raise UsageError(
            f"{argument('chunk', chunk)} is beyond the model's {max_positions} positions.",
            fix=f"Use {max_positions} or less.",
        )
    limit = largest_chunk(source)
    if limit is not None and chunk > limit:
        raise UsageError(
            f"{argument('chunk', chunk)} is too long for this model's xpos.",
            why="The decay over one chunk would leave fp32's range.",
            fix=f"Use {argument('chunk', limit)} or less.",
        )


def largest_chunk(source: SourceModel) -> int | None:
    """Return the longest chunk whose xpos factors fit fp32, at least 1; None if there is no limit."""
    base = getattr(source.args, "xpos_base", None)
    if base is None or source.geometry is None:
        return None
    span = int(2 * _LARGEST_EXPONENT * abs(base) / _FASTEST_DECAY)
    return max(1, span - ring_slots(source.geometry))
