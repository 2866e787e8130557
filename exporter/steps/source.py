"""A model as a step graph: what goes in besides its tokens, which module computes it, and what cannot stream.

One entry of `STEP_KINDS` per sort of model. Names and layouts of data inputs and output are those of the same
model's whole-sequence file, with `C` tokens in place of its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import UsageError
from ...core.step_facts import CacheFacts, StepFacts
from ...core.step_node import ring_slots
from ...core.tensors import TensorSpec
from ..checkpoint.config import CLASSES
from ..models.aft_local.arguments import AFTLocalArgs
from ..models.aft_local.step_module import StepAFTLocal, ring_keys
from ..models.arguments import LocalTransformerArgs
from ..models.local_attention.step_module import StepAttention, StepMHA
from ..models.local_transformer.step_module import StepTransformer
from ..source import NUMPY_DTYPE, SourceModel

POSITION = "position"
# A chunk counts xpos' exponents from its middle. e to this is the largest factor it may hold; fp32 ends at e^88.
_LARGEST_EXPONENT = 80.0
# ζ of the channel that decays fastest is 0.4/1.4.
_FASTEST_DECAY = math.log(1.4 / 0.4)

Cache = tuple[str, tuple[int, ...], str]
Call = Callable[[Any, Sequence[Tensor], Tensor, Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class StepKind:
    """How one sort of model takes a few tokens at a time.

    Args:
        module: the module for chunks of a size, weights not yet loaded.
        call: module, data inputs, position `[1]` and caches → output and next caches.
        caches: name, shape and element type ("float", or numpy's name) of each tensor handed on.
        length_axis: the axis of data inputs and output that counts tokens.
    """

    module: Callable[[SourceModel, int], nn.Module]
    call: Call
    caches: Callable[[SourceModel], list[Cache]]
    length_axis: int = 1


def _pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _call_attention(
    model: StepAttention, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    q, k, v, *bias = data
    out, following = model(torch.cat((q, k), dim=1), v, _pairs(caches)[0], model.view(position, q.shape[0], *bias))
    return out, *following


def _call_mha(model: StepMHA, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, *bias = data
    out, following = model(x.flatten(0, 1), _pairs(caches)[0], model.attn_fn.view(position, x.shape[0], *bias))
    return out.reshape(x.shape), *following


def _call_transformer(
    model: StepTransformer, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    out, following = model(data[0], position, _pairs(caches))
    return out, *(cache for pair in following for cache in pair)


def _rings(source: SourceModel) -> list[Cache]:
    assert source.geometry is not None
    shape = (source.shapes.batch, source.shapes.heads, ring_slots(source.geometry), source.shapes.dim_head)
    return [(f"{part}_cache.{layer}", shape, "float") for layer in range(source.depth) for part in ("key", "value")]


def _aft_caches(source: SourceModel) -> list[Cache]:
    assert isinstance(source.args, AFTLocalArgs)
    row = (source.shapes.batch, source.args.d_model)
    ring = (ring_keys(source.args), *row)
    return [("key_cache.0", ring, "float32"), ("value_cache.0", ring, "float32"), ("state.0", (3, *row), "float32")]


STEP_KINDS: Mapping[str, StepKind] = {
    "attention": StepKind(
        module=lambda source, chunk: StepAttention(source.args, source.shapes.heads, source.shapes.dim_head, chunk),  # type: ignore[arg-type]
        call=_call_attention,
        caches=_rings,
        length_axis=2,
    ),
    "mha": StepKind(module=lambda source, chunk: StepMHA(source.args, chunk), call=_call_mha, caches=_rings),  # type: ignore[arg-type]
    "transformer": StepKind(
        module=lambda source, chunk: StepTransformer(source.args, chunk, mixes_residuals=source.mixes_residuals),  # type: ignore[arg-type]
        call=_call_transformer,
        caches=_rings,
    ),
    "aft": StepKind(
        module=lambda source, _: StepAFTLocal(source.args),  # type: ignore[arg-type]
        call=lambda model, data, position, caches: model(*data, position, *caches),
        caches=_aft_caches,
        length_axis=0,
    ),
}


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
        self.kind = STEP_KINDS[CLASSES[source.class_name].kind]
        _refuse(source, chunk, self.max_positions)
        self.call = self.kind.call

    @property
    def max_positions(self) -> int | None:
        """Positions with learned numbers, or None where there is no end."""
        args = self.source.args
        if isinstance(args, AFTLocalArgs):
            return args.seq_len
        is_limited = isinstance(args, LocalTransformerArgs) and args.num_tokens is not None
        return args.max_seq_len if is_limited else None  # type: ignore[union-attr]

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
            for name, shape, element in self.kind.caches(self.source)
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
        return self.source.module(dtype, lambda: self.kind.module(self.source, self.chunk))

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
