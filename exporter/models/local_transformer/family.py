"""`LocalTransformer` as a family: its row in the registry, and its file's sizes and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ....core.error_texts import argument
from ....core.errors import UsageError
from ..family import (
    Family,
    Inputs,
    LiveCall,
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
from ..local_mha.family import SETS_ITSELF
from ..parts.float64 import Float64State
from .arguments import LocalTransformerArgs
from .infer import infer_arguments, length_unless_given, recognises
from .module import LocalTransformer
from .reference import local_transformer
from .step_module import StepTransformer


def _sizes(args: LocalTransformerArgs, request: ShapeRequest) -> Sizes:
    if request.attn_bias:
        raise UsageError(
            f"{argument('attn_bias')} does not apply to LocalTransformer.",
            why="Its forward takes no attention bias; a dynamic position bias is part of its weights.",
        )
    limit = "" if args.learned_positions is None else "max_seq_len"
    length = sequence_length(request, args.max_seq_len, limit, "There is no learned position embedding past it.")
    return Sizes(length, request.batch, args.heads, args.dim_head, mask=request.mask, attn_bias=False)


def _inputs(args: LocalTransformerArgs, sizes: Sizes) -> Inputs:
    rows = (sizes.batch, sizes.seq_len)
    data: Inputs = {"x": ("float", (*rows, args.dim))} if args.num_tokens is None else {"tokens": ("int64", rows)}
    return data | optional_inputs(args.geometry(), sizes)


def _step(
    model: StepTransformer, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    out, following = model(data[0], position, cache_pairs(caches))
    return out, *(cache for pair in following for cache in pair)


def _module(spec: ModelSpec) -> LocalTransformer:
    sizes = spec.sizes
    return LocalTransformer(
        spec.args, sizes.seq_len, mixes_residuals=spec.mixes_residuals, dynamic_length=sizes.dynamic_length
    )


def _reference(
    spec: ModelSpec, state: Float64State, x: Mapping[str, Tensor], positions: Tensor | None
) -> tuple[Tensor, ...]:
    data = next(iter(x.values()))
    return (local_transformer(spec.args, spec.mixes_residuals, state, data, x.get("mask"), positions),)


def _live_call(given: Mapping[str, Tensor]) -> LiveCall:
    """Build the call of upstream's model, whose forward names both tokens and embeddings `x`."""
    others = {name: tensor for name, tensor in given.items() if name not in ("x", "tokens")}
    data = given.get("tokens", given.get("x"))
    if data is None:
        return LiveCall(dict(given), dict(given), "out")  # forward refuses it
    name, output = ("x", "out") if data.is_floating_point() else ("tokens", "logits")
    return LiveCall({"x": data, **others}, {name: data, **others}, output)


LOCAL_TRANSFORMER = Family(
    name="transformer",
    arguments=LocalTransformerArgs,
    classes=(
        UpstreamClass(
            "local_attention.LocalTransformer",
            {
                **SETS_ITSELF,
                "window_size": "LocalTransformer calls it local_attn_window_size.",
                "prenorm": "LocalTransformer passes prenorm = true to LocalMHA itself.",
                "use_rotary_pos_emb": "LocalTransformer sets it itself: rotary is on unless use_dynamic_pos_bias is.",
                "dropout": "LocalTransformer calls it attn_dropout and ff_dropout.",
                "global_attn_layer": "It is a torch module of any kind, "
                "which a config cannot name and nothing here can rebuild.",
            },
        ),
    ),
    window_argument="local_attn_window_size",
    sizes=_sizes,
    inputs=_inputs,
    outputs=lambda args: ("out",) if args.num_tokens is None else ("logits",),
    module=_module,
    reference=_reference,
    state_dict=StateDictForm(
        recognises=recognises,
        recognised_by="LocalTransformer has layers.*",
        infer_arguments=infer_arguments,
        follow=length_unless_given,
    ),
    step=StepForm(
        module=lambda spec, chunk: StepTransformer(spec.args, chunk, mixes_residuals=spec.mixes_residuals),
        call=_step,
        caches=ring_caches,
        max_positions=lambda args: args.learned_positions,
    ),
    live_call=_live_call,
    parameters={"tokens": "x"},
    tokens=("tokens", "x"),
    token_limit=lambda args: args.num_tokens,
    samples=True,
)
