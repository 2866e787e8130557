"""`LocalAttention` as a family: its file's sizes and inputs, what weights show, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....core.error_texts import argument
from ....core.errors import UsageError
from ...options import ShapeRequest, Sizes
from ..family import Adapter, Inputs, ModelSpec, UpstreamClass, needs_argument, optional_inputs, sequence_length
from ..forms import StateDictFamily, StepFamily, cache_pairs
from ..inference import INV_FREQ, Findings, TensorShapes, from_presence, from_size
from ..parts.float64 import Float64State
from .adapter import adapt
from .arguments import LocalAttentionArgs
from .module import LocalAttention
from .reference import local_attention
from .step_module import StepAttention

ZETA_RAISES = "zetascale 2.8.8 raises in forward as published: it gives masked_fill a tensor for a number"


class LocalAttentionFamily(StateDictFamily[LocalAttentionArgs], StepFamily[LocalAttentionArgs]):
    """`LocalAttention` of local-attention and of zeta."""

    name = "attention"
    arguments = LocalAttentionArgs
    classes = (
        UpstreamClass("local_attention.LocalAttention"),
        UpstreamClass("zeta.LocalAttention", why_not_run=ZETA_RAISES),
    )
    window_argument = "window_size"
    adapters: Mapping[str, Adapter] = {
        "local_attention.local_attention.LocalAttention": adapt,
        "zeta.nn.attention.local_attention.LocalAttention": adapt,
    }
    tokens = ("k", "v")
    casts_inputs = True
    sizes_are_arguments = False
    state_dict_of = "LocalAttention at most rel_pos.inv_freq"
    length_axis = 2

    def sizes(self, args: LocalAttentionArgs, request: ShapeRequest) -> Sizes:
        """Take heads and their size from the request, because hardly any weight shows them."""
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

    def inputs(self, args: LocalAttentionArgs, sizes: Sizes) -> Inputs:
        """List queries, keys and values `[B, H, N, D]`, then the options."""
        shape = (sizes.batch, sizes.heads, sizes.seq_len, sizes.dim_head)
        return dict.fromkeys(("q", "k", "v"), ("float", shape)) | optional_inputs(args.geometry(), sizes)

    def module(self, spec: ModelSpec[LocalAttentionArgs]) -> LocalAttention:
        """Build the export-friendly module."""
        sizes = spec.sizes
        return LocalAttention(spec.args, sizes.seq_len, sizes.dim_head, dynamic_length=sizes.dynamic_length)

    def reference(
        self,
        spec: ModelSpec[LocalAttentionArgs],
        state: Float64State,
        inputs: Mapping[str, Tensor],
        positions: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Compute the formula."""
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        return (local_attention(spec.args, state, q, k, v, inputs.get("mask"), inputs.get("attn_bias")),)

    def recognises_state(self, shapes: TensorShapes) -> bool:
        """Look for rotary frequencies alone, or nothing."""
        return set(shapes) <= {INV_FREQ}

    def infer_arguments(self, shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
        """Infer arguments from rotary frequencies.

        Absent frequencies show nothing, because rotary is on if the config gives `dim`.
        """
        if INV_FREQ not in shapes:
            return {}
        findings = {"use_rotary_pos_emb": from_presence(shapes, INV_FREQ)}
        if given.get("rel_pos_emb_config") is None:
            findings["dim"] = from_size(shapes, INV_FREQ, 1, 0, per_unit=2)
        return findings

    def step_module(self, spec: ModelSpec[LocalAttentionArgs], chunk: int) -> nn.Module:
        """Build the module for calls of `chunk` tokens."""
        return StepAttention(spec.args, spec.sizes.heads, spec.sizes.dim_head, chunk)

    def step_call(
        self, module: StepAttention, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call it with queries, keys and values, and a bias if there is one."""
        q, k, v, *bias = data
        both = torch.cat((q, k), dim=1)
        out, following = module(both, v, cache_pairs(caches)[0], module.view(position, q.shape[0], *bias))
        return out, *following


LOCAL_ATTENTION = LocalAttentionFamily()
