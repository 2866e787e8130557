"""`LocalMHA` as a family: its file's sizes and inputs, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...options import ShapeRequest, Sizes
from ..family import Adapter, Inputs, ModelSpec, UpstreamClass, optional_inputs, sequence_length
from ..forms import StateDictFamily, StepFamily, cache_pairs
from ..inference import Findings, TensorShapes
from ..local_attention.family import ZETA_RAISES
from ..parts.float64 import Float64State
from .adapter import adapt
from .arguments import LocalMHAArgs
from .infer import infer_arguments
from .module import LocalMHA
from .reference import local_mha
from .step_module import StepMHA

SETS_ITSELF = {
    "autopad": "LocalMHA always pads: it passes autopad = true to LocalAttention itself.",
    "scale": "LocalMHA passes scale to LocalAttention itself: qk_scale with qk_rmsnorm, else none.",
}


class LocalMHAFamily(StateDictFamily[LocalMHAArgs], StepFamily[LocalMHAArgs]):
    """`LocalMHA` of local-attention and of zeta."""

    name = "mha"
    arguments = LocalMHAArgs
    classes = (
        UpstreamClass("local_attention.LocalMHA", SETS_ITSELF),
        UpstreamClass(
            "zeta.LocalMHA",
            {**SETS_ITSELF, "gate_values_per_head": "zeta's LocalMHA has no value gates."},
            ZETA_RAISES,
        ),
    )
    window_argument = "window_size"
    adapters: Mapping[str, Adapter] = {
        "local_attention.transformer.LocalMHA": adapt,
        "zeta.nn.attention.local_attention_mha.LocalMHA": adapt,
    }
    state_dict_of = "LocalMHA to_qkv.weight"

    def sizes(self, args: LocalMHAArgs, request: ShapeRequest) -> Sizes:
        """Take the length from the request, because the model has none."""
        length = sequence_length(request, None)
        return Sizes(length, request.batch, args.heads, args.dim_head, mask=request.mask, attn_bias=request.attn_bias)

    def inputs(self, args: LocalMHAArgs, sizes: Sizes) -> Inputs:
        """List the embeddings `[B, N, D]`, then the options."""
        return {"x": ("float", (sizes.batch, sizes.seq_len, args.dim))} | optional_inputs(args.geometry(), sizes)

    def module(self, spec: ModelSpec[LocalMHAArgs]) -> LocalMHA:
        """Build the export-friendly module."""
        return LocalMHA(spec.args, spec.sizes.seq_len, dynamic_length=spec.sizes.dynamic_length)

    def reference(
        self, spec: ModelSpec[LocalMHAArgs], state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute the formula."""
        return (local_mha(spec.args, state, inputs["x"], inputs.get("mask"), inputs.get("attn_bias")),)

    def recognises_state(self, shapes: TensorShapes) -> bool:
        """Look for the matrix of queries, keys and values."""
        return "to_qkv.weight" in shapes

    def infer_arguments(self, shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
        """Infer arguments from shapes."""
        return infer_arguments(shapes, given)

    def step_module(self, spec: ModelSpec[LocalMHAArgs], chunk: int) -> nn.Module:
        """Build the module for calls of `chunk` tokens."""
        return StepMHA(spec.args, chunk)

    def step_call(
        self, module: StepMHA, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call it with embeddings, and a bias if there is one."""
        x, *bias = data
        rows = x.flatten(0, 1)
        out, following = module(rows, cache_pairs(caches)[0], module.attn_fn.view(position, x.shape[0], *bias))
        return out.reshape(x.shape), *following


LOCAL_MHA = LocalMHAFamily()
