"""`AFTLocal` as a family: its row in the registry, and how its file's sizes and inputs follow."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ....core.documents.window_view import WindowView, bias_views
from ....core.errors import UsageError
from ..family import (
    Family,
    Inputs,
    ModelSpec,
    ShapeRequest,
    Sizes,
    State,
    StepCache,
    StepForm,
    UpstreamClass,
    sequence_length,
)
from .adapter import adapt
from .arguments import AFTLocalArgs
from .infer import expected_shapes, infer_arguments, infer_values
from .module import AFTLocal
from .reference import aft_local
from .step_module import StepAFTLocal, ring_keys


def _sizes(args: AFTLocalArgs, request: ShapeRequest) -> Sizes:
    if request.attn_bias:
        raise UsageError("--attn-bias does not apply to AFTLocal.", why="Its biases are part of its weights.")
    length = sequence_length(request, args.seq_len)
    if length > args.seq_len:
        raise UsageError(
            f"--seq-len {length} is beyond the model's seq_len {args.seq_len}.",
            why="There are no learned biases past it.",
            fix=f"Use --seq-len {args.seq_len} or less.",
        )
    return Sizes(length, request.batch, 1, args.d_model, request.mask, False, request.causal, request.full_mask)


def _inputs(args: AFTLocalArgs, sizes: Sizes) -> Inputs:
    data = (sizes.seq_len, sizes.batch, args.d_model)
    inputs: Inputs = dict.fromkeys(("query", "key", "value"), ("float", data))
    if sizes.mask:
        inputs["mask"] = ("bool", (sizes.batch, sizes.seq_len))
    if sizes.full_mask:
        inputs["full_mask"] = ("bool", (sizes.seq_len, sizes.seq_len))
    return inputs


def _caches(spec: ModelSpec) -> list[StepCache]:
    row = (spec.sizes.batch, spec.args.d_model)
    ring = (ring_keys(spec.args), *row)
    return [("key_cache.0", ring, "float32"), ("value_cache.0", ring, "float32"), ("state.0", (3, *row), "float32")]


def _module(spec: ModelSpec) -> AFTLocal:
    sizes = spec.sizes
    return AFTLocal(spec.args, sizes.seq_len, causal=sizes.causal, full_mask=sizes.full_mask)


def _reference(spec: ModelSpec, state: State, x: Mapping[str, Tensor], positions: Tensor | None) -> Tensor:
    data = (x["query"], x["key"], x["value"], x.get("mask"), x.get("full_mask"))
    return aft_local(spec.args, state, *data, causal=spec.sizes.causal, rows=positions)


def _window_views(class_name: str, args: AFTLocalArgs) -> list[WindowView]:
    return bias_views(class_name, args.local_window_size, causal=False, length=args.seq_len)


AFT_LOCAL = Family(
    name="aft",
    arguments=AFTLocalArgs,
    classes=(UpstreamClass("labml_nn.AFTLocal"),),
    recognises=lambda shapes: "pos_bias" in shapes,
    recognised_by="AFTLocal pos_bias",
    infer_arguments=infer_arguments,
    infer_values=infer_values,
    expected_shapes=expected_shapes,
    window_argument="local_window_size",
    sizes=_sizes,
    inputs=_inputs,
    module=_module,
    reference=_reference,
    step=StepForm(
        module=lambda spec, _: StepAFTLocal(spec.args),
        call=lambda model, data, position, caches: model(*data, position, *caches),
        caches=_caches,
        length_axis=0,
        max_positions=lambda args: int(args.seq_len),
    ),
    geometry=lambda args: None,
    describe_window=lambda args: f"learned biases up to {args.local_window_size - 1} positions away, 0 beyond",
    window_views=_window_views,
    adapters={"labml_nn.transformers.aft.AFTLocal": adapt},
    extra_inputs=frozenset({"causal", "full_mask"}),
    why_static="Its learned biases are laid out by length.",
    batch_axis=1,
    samples=True,
)
