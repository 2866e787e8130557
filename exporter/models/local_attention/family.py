"""`LocalAttention` as a family: its row in the registry, its file's sizes and inputs, and what weights show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.error_texts import argument
from ....core.errors import UsageError
from ..family import (
    Family,
    Inputs,
    ModelSpec,
    ShapeRequest,
    Sizes,
    StateDictForm,
    StepForm,
    UpstreamClass,
    cache_pairs,
    needs_argument,
    optional_inputs,
    ring_caches,
    sequence_length,
)
from ..inference import INV_FREQ, Findings, TensorShapes, from_presence, from_size
from ..parts.float64 import Float64State
from .adapter import adapt
from .arguments import LocalAttentionArgs
from .module import LocalAttention
from .reference import local_attention
from .step_module import StepAttention


def _sizes(args: LocalAttentionArgs, request: ShapeRequest) -> Sizes:
    dim_head = request.dim_head or args.rotary_dim
    if args.rotary_dim is not None and dim_head != args.rotary_dim:
        raise UsageError(
            f"{argument('dim_head')} is {dim_head}, but the rotary embedding is {args.rotary_dim} wide.",
            why="Rotary turns the whole head.",
            fix=f"Use {argument('dim_head', args.rotary_dim)}.",
        )
    if dim_head is None:
        raise needs_argument("dim_head", "LocalAttention without rotary has no weights that tell the head size.")
    if request.heads is None:
        raise needs_argument("heads", "LocalAttention has no weights that tell the number of heads.")
    length = sequence_length(request, None)
    if not args.autopad and length % args.window_size:
        raise UsageError(
            f"{argument('seq_len', length)} is no multiple of the window size {args.window_size}.",
            why="This LocalAttention has autopad=False and refuses such a length.",
            fix="Use a multiple, or autopad=true in the config.",
        )
    return Sizes(length, request.batch, request.heads, dim_head, mask=request.mask, attn_bias=request.attn_bias)


def _inputs(args: LocalAttentionArgs, sizes: Sizes) -> Inputs:
    shape = (sizes.batch, sizes.heads, sizes.seq_len, sizes.dim_head)
    return dict.fromkeys(("q", "k", "v"), ("float", shape)) | optional_inputs(args.geometry(), sizes)


def _step(
    model: StepAttention, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    q, k, v, *bias = data
    out, following = model(torch.cat((q, k), dim=1), v, cache_pairs(caches)[0], model.view(position, q.shape[0], *bias))
    return out, *following


def _module(spec: ModelSpec) -> LocalAttention:
    sizes = spec.sizes
    return LocalAttention(spec.args, sizes.seq_len, sizes.dim_head, dynamic_length=sizes.dynamic_length)


def _reference(
    spec: ModelSpec, state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
) -> tuple[Tensor, ...]:
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    return (local_attention(spec.args, state, q, k, v, inputs.get("mask"), inputs.get("attn_bias")),)


def _infer_arguments(shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
    """Infer arguments from rotary frequencies.

    Absent frequencies show nothing, because rotary is on if the config gives `dim`.
    """
    if INV_FREQ not in shapes:
        return {}
    findings = {"use_rotary_pos_emb": from_presence(shapes, INV_FREQ)}
    if given.get("rel_pos_emb_config") is None:
        findings["dim"] = from_size(shapes, INV_FREQ, 1, 0, per_unit=2)
    return findings


ZETA_RAISES = "zetascale 2.8.8 raises in forward as published: it gives masked_fill a tensor for a number"

LOCAL_ATTENTION = Family(
    name="attention",
    arguments=LocalAttentionArgs,
    classes=(
        UpstreamClass("local_attention.LocalAttention"),
        UpstreamClass("zeta.LocalAttention", why_not_run=ZETA_RAISES),
    ),
    window_argument="window_size",
    sizes=_sizes,
    inputs=_inputs,
    module=_module,
    reference=_reference,
    state_dict=StateDictForm(
        recognises=lambda shapes: set(shapes) <= {INV_FREQ},
        recognised_by="LocalAttention at most rel_pos.inv_freq",
        infer_arguments=_infer_arguments,
    ),
    step=StepForm(
        module=lambda spec, chunk: StepAttention(spec.args, spec.sizes.heads, spec.sizes.dim_head, chunk),
        call=_step,
        caches=ring_caches,
        length_axis=2,
    ),
    adapters={
        "local_attention.local_attention.LocalAttention": adapt,
        "zeta.nn.attention.local_attention.LocalAttention": adapt,
    },
    tokens=("k", "v"),
    casts_inputs=True,
    sizes_are_arguments=False,
)
