"""`LocalTransformer` as a family: its file's sizes and inputs, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ....core.error_texts import argument
from ....core.errors import UsageError
from ...options import ShapeRequest, Sizes
from ..family import Inputs, LiveCall, ModelSpec, UpstreamClass, optional_inputs, sequence_length
from ..forms import StateDictFamily, StepFamily, cache_pairs
from ..inference import Findings, TensorShapes
from ..local_mha.family import SETS_ITSELF
from ..parts.float64 import Float64State
from .arguments import LocalTransformerArgs
from .infer import infer_arguments, length_unless_given, recognises
from .module import LocalTransformer
from .reference import local_transformer
from .step_module import StepTransformer

_UNSUPPORTED = {
    **SETS_ITSELF,
    "window_size": "LocalTransformer calls it local_attn_window_size.",
    "prenorm": "LocalTransformer passes prenorm = true to LocalMHA itself.",
    "use_rotary_pos_emb": "LocalTransformer sets it itself: rotary is on unless use_dynamic_pos_bias is.",
    "dropout": "LocalTransformer calls it attn_dropout and ff_dropout.",
    "global_attn_layer": "It is a torch module of any kind, which a config cannot name and nothing here can rebuild.",
}


class LocalTransformerFamily(StateDictFamily[LocalTransformerArgs], StepFamily[LocalTransformerArgs]):
    """`local_attention.LocalTransformer`."""

    name = "transformer"
    arguments = LocalTransformerArgs
    classes = (UpstreamClass("local_attention.LocalTransformer", _UNSUPPORTED),)
    window_argument = "local_attn_window_size"
    parameters: Mapping[str, str] = {"tokens": "x"}
    tokens = ("tokens", "x")
    samples = True
    state_dict_of = "LocalTransformer has layers.*"

    def sizes(self, args: LocalTransformerArgs, request: ShapeRequest) -> Sizes:
        """Take the model's longest sequence, if no length is given."""
        if request.attn_bias:
            raise UsageError(
                f"{argument('attn_bias')} does not apply to LocalTransformer.",
                why="Its forward takes no attention bias; a dynamic position bias is part of its weights.",
            )
        limit = "" if args.learned_positions is None else "max_seq_len"
        length = sequence_length(request, args.max_seq_len, limit, "There is no learned position embedding past it.")
        return Sizes(length, request.batch, args.heads, args.dim_head, mask=request.mask, attn_bias=False)

    def inputs(self, args: LocalTransformerArgs, sizes: Sizes) -> Inputs:
        """List tokens `[B, N]` or embeddings `[B, N, D]`, then the mask."""
        rows = (sizes.batch, sizes.seq_len)
        data: Inputs = {"x": ("float", (*rows, args.dim))} if args.num_tokens is None else {"tokens": ("int64", rows)}
        return data | optional_inputs(args.geometry(), sizes)

    def outputs(self, args: LocalTransformerArgs) -> tuple[str, ...]:
        """Return `logits` for tokens, `out` for embeddings."""
        return ("out",) if args.num_tokens is None else ("logits",)

    def module(self, spec: ModelSpec[LocalTransformerArgs]) -> LocalTransformer:
        """Build the export-friendly module."""
        sizes = spec.sizes
        return LocalTransformer(
            spec.args, sizes.seq_len, mixes_residuals=spec.mixes_residuals, dynamic_length=sizes.dynamic_length
        )

    def reference(
        self,
        spec: ModelSpec[LocalTransformerArgs],
        state: Float64State,
        inputs: Mapping[str, Tensor],
        positions: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Compute the formula."""
        data = next(iter(inputs.values()))
        return (local_transformer(spec.args, spec.mixes_residuals, state, data, inputs.get("mask"), positions),)

    def token_limit(self, args: LocalTransformerArgs) -> int | None:
        """Return the size of the vocabulary."""
        return args.num_tokens

    def live_call(self, given: Mapping[str, Tensor]) -> LiveCall:
        """Build the call of upstream's model, whose forward names both tokens and embeddings `x`."""
        others = {name: tensor for name, tensor in given.items() if name not in ("x", "tokens")}
        data = given.get("tokens", given.get("x"))
        if data is None:
            return LiveCall(dict(given), dict(given), "out")  # forward refuses it
        name, output = ("x", "out") if data.is_floating_point() else ("tokens", "logits")
        return LiveCall({"x": data, **others}, {name: data, **others}, output)

    def recognises_state(self, shapes: TensorShapes) -> bool:
        """Look for layers, and tables of tokens or positions."""
        return recognises(shapes)

    def infer_arguments(self, shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
        """Infer arguments from shapes."""
        return infer_arguments(shapes, given)

    def follow(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Set no longest sequence for a model without embeddings."""
        return length_unless_given(values)

    def step_module(self, spec: ModelSpec[LocalTransformerArgs], chunk: int) -> nn.Module:
        """Build the module for calls of `chunk` tokens."""
        return StepTransformer(spec.args, chunk, mixes_residuals=spec.mixes_residuals)

    def step_call(
        self, module: StepTransformer, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call it with tokens or embeddings."""
        out, following = module(data[0], position, cache_pairs(caches))
        return out, *(cache for pair in following for cache in pair)

    def max_positions(self, args: LocalTransformerArgs) -> int | None:
        """Return the number of learned positions, if there are such."""
        return args.learned_positions


LOCAL_TRANSFORMER = LocalTransformerFamily()
