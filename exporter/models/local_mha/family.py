"""`LocalMHA` as a family: its row in the registry, and its file's sizes and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

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
    optional_inputs,
    ring_caches,
    sequence_length,
)
from ..local_attention.family import ZETA_RAISES
from ..parts.float64 import Float64State
from .adapter import adapt
from .arguments import LocalMHAArgs
from .infer import infer_arguments
from .module import LocalMHA
from .reference import local_mha
from .step_module import StepMHA


def _sizes(args: LocalMHAArgs, request: ShapeRequest) -> Sizes:
    length = sequence_length(request, None)
    return Sizes(length, request.batch, args.heads, args.dim_head, mask=request.mask, attn_bias=request.attn_bias)


def _inputs(args: LocalMHAArgs, sizes: Sizes) -> Inputs:
    return {"x": ("float", (sizes.batch, sizes.seq_len, args.dim))} | optional_inputs(args.geometry(), sizes)


def _step(model: StepMHA, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, *bias = data
    out, following = model(x.flatten(0, 1), cache_pairs(caches)[0], model.attn_fn.view(position, x.shape[0], *bias))
    return out.reshape(x.shape), *following


def _reference(
    spec: ModelSpec, state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
) -> tuple[Tensor, ...]:
    return (local_mha(spec.args, state, inputs["x"], inputs.get("mask"), inputs.get("attn_bias")),)


SETS_ITSELF = {
    "autopad": "LocalMHA always pads: it passes autopad = true to LocalAttention itself.",
    "scale": "LocalMHA passes scale to LocalAttention itself: qk_scale with qk_rmsnorm, else none.",
}
LOCAL_MHA = Family(
    name="mha",
    arguments=LocalMHAArgs,
    classes=(
        UpstreamClass("local_attention.LocalMHA", SETS_ITSELF),
        UpstreamClass(
            "zeta.LocalMHA",
            {**SETS_ITSELF, "gate_values_per_head": "zeta's LocalMHA has no value gates."},
            ZETA_RAISES,
        ),
    ),
    window_argument="window_size",
    sizes=_sizes,
    inputs=_inputs,
    module=lambda spec: LocalMHA(spec.args, spec.sizes.seq_len, dynamic_length=spec.sizes.dynamic_length),
    reference=_reference,
    state_dict=StateDictForm(
        recognises=lambda shapes: "to_qkv.weight" in shapes,
        recognised_by="LocalMHA to_qkv.weight",
        infer_arguments=infer_arguments,
    ),
    step=StepForm(module=lambda spec, chunk: StepMHA(spec.args, chunk), call=_step, caches=ring_caches),
    adapters={
        "local_attention.transformer.LocalMHA": adapt,
        "zeta.nn.attention.local_attention_mha.LocalMHA": adapt,
    },
)
