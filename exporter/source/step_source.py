"""A model as a step graph: what goes in besides its tokens, which module computes it, and what cannot stream.

The family says how (`StepForm`). Names and layouts of data inputs and output are those of the same
model's whole-sequence file, with `C` tokens in place of its length.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn

from ...core.documents.step_facts import CacheFacts, StepFacts
from ...core.errors import UsageError
from ...core.nodes.step import ring_slots
from ...core.tensors import TensorSpec
from ..models.family import NUMPY_DTYPE
from .source_model import SourceModel

POSITION = "position"
# A chunk counts xpos' exponents from its middle. e to this is the largest factor it may hold; fp32 ends at e^88.
_LARGEST_EXPONENT = 80.0
# ζ of the channel that decays fastest is 0.4/1.4.
_FASTEST_DECAY = math.log(1.4 / 0.4)


class StepSource:
    """A model that takes `chunk` tokens a call.

    Args:
        source: the model, at any length; its batch is the file's.
        chunk: tokens a sequence and call.

    Raises:
        UsageError: the model, or an input asked for, cannot stream.
    """

    def __init__(self, source: SourceModel, chunk: int) -> None:
        self.source, self.chunk = source, chunk
        self.kind = source.kind.step
        _refuse(source, chunk, self.max_positions)
        self.call = self.kind.call

    @property
    def max_positions(self) -> int | None:
        """Positions with learned numbers, or None where there is no end."""
        return self.kind.max_positions(self.source.args)

    def data(self, dtype: str) -> list[TensorSpec]:
        """The data inputs of one call."""
        axis, whole = self.kind.length_axis, self.source.inputs(dtype)
        return [
            spec if spec.name == "attn_bias" else replace(spec, shape=_with(spec.shape, axis, self.chunk))
            for spec in whole
        ]

    def caches(self, dtype: str) -> list[CacheFacts]:
        """What a call hands to the next."""
        return [
            CacheFacts(
                input=name,
                output=f"next_{name}",
                shape=list(shape),
                dtype=NUMPY_DTYPE[dtype] if element == "float" else element,
            )
            for name, shape, element in self.kind.caches(self.source.spec)
        ]

    def inputs(self, dtype: str) -> list[TensorSpec]:
        """All inputs of the graph, in order: data, position, caches."""
        caches = [TensorSpec(x.input, x.dtype, tuple(x.shape)) for x in self.caches(dtype)]
        return [*self.data(dtype), TensorSpec(POSITION, "int64", (1,)), *caches]

    def output_names(self) -> list[str]:
        """All outputs of the graph, in order."""
        return [self.source.output_name, *(x.output for x in self.caches("fp32"))]

    def module(self, dtype: str) -> nn.Module:
        """The module with its weights and constants, in `dtype`."""
        return self.source.module(dtype, lambda: self.kind.module(self.source.spec, self.chunk))

    def facts(self, dtype: str, *, mode: str, prefill: str | None) -> StepFacts:
        """What the sidecar says of the file."""
        return StepFacts(
            mode=mode,  # type: ignore[arg-type]
            chunk=self.chunk,
            token_input=self.source.inputs(dtype)[0].name,
            sequence_axis=self.kind.length_axis,
            position_input=POSITION,
            logits_output=self.source.output_name,
            caches=self.caches(dtype),
            max_positions=self.max_positions,
            in_place=self.chunk == 1,
            prefill=prefill,
        )


def _with(shape: tuple[int | str, ...], axis: int, size: int) -> tuple[int | str, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def is_causal(source: SourceModel) -> bool:
    """Whether no output depends on a later token."""
    return source.shapes.causal if source.geometry is None else source.geometry.causal


def _refuse(source: SourceModel, chunk: int, max_positions: int | None) -> None:
    """What cannot stream, with the reason."""
    if not is_causal(source):
        is_aft = source.geometry is None
        raise UsageError(
            f"This {source.class_name.split('.')[1]} is not causal, so it cannot run step by step.",
            why="The output at a token depends on tokens after it, which a step has not seen.",
            fix="Add --causal if it was run with a causal mask." if is_aft else "Export whole sequences: --mode full.",
        )
    for name, given in (("--mask", source.shapes.mask), ("--full-mask", source.shapes.full_mask)):
        if given:
            raise UsageError(
                f"{name} does not apply to a step file.",
                why="Which keys are there follows from the position; a call has no padding.",
                fix="Give sequences of one length, or one sequence a batch.",
            )
    if chunk < 1:
        raise UsageError(f"--chunk is {chunk}.", why="A call takes at least 1 token.")
    if max_positions is not None and chunk > max_positions:
        raise UsageError(
            f"--chunk {chunk} is beyond the model's {max_positions} positions.", fix=f"Use {max_positions} or less."
        )
    limit = largest_chunk(source)
    if limit is not None and chunk > limit:
        raise UsageError(
            f"--chunk {chunk} is too long for this model's xpos.",
            why="The decay over one chunk would leave fp32's range.",
            fix=f"Use --chunk {limit} or less.",
        )


def largest_chunk(source: SourceModel) -> int | None:
    """The longest chunk whose xpos factors fp32 holds, or None where any will do; at least 1."""
    base = getattr(source.args, "xpos_base", None)
    if base is None or source.geometry is None:
        return None
    span = int(2 * _LARGEST_EXPONENT * abs(base) / _FASTEST_DECAY)
    return max(1, span - ring_slots(source.geometry))
