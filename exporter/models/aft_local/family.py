"""`AFTLocal` as a family: its row in the registry, its file's sizes and inputs, and what weights show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....core.documents.window_view import WindowView, bias_views
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
    StepCache,
    StepForm,
    UpstreamClass,
    sequence_length,
)
from ..inference import Findings, Inferred, TensorShapes, from_presence, from_size
from ..parts.float64 import Float64State
from .adapter import adapt
from .arguments import AFTLocalArgs
from .module import AFTLocal
from .reference import aft_local
from .step_module import StepAFTLocal, ring_keys


def _sizes(args: AFTLocalArgs, request: ShapeRequest) -> Sizes:
    if request.attn_bias:
        raise UsageError(
            f"{argument('attn_bias')} does not apply to AFTLocal.", why="Its biases are part of its weights."
        )
    length = sequence_length(request, args.seq_len, "seq_len", "There are no learned biases past it.")
    return Sizes(
        length,
        request.batch,
        heads=1,
        dim_head=args.d_model,
        mask=request.mask,
        attn_bias=False,
        causal=request.causal,
        full_mask=request.full_mask,
    )


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


def _reference(
    spec: ModelSpec, state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
) -> tuple[Tensor, ...]:
    return (aft_local(spec.args, state, **inputs, causal=spec.sizes.causal, rows=positions),)


def _window_views(class_name: str, args: AFTLocalArgs, sizes: Sizes | None) -> list[WindowView]:
    causal, length = (False, args.seq_len) if sizes is None else (sizes.causal, sizes.seq_len)
    return bias_views(class_name, args.local_window_size, causal, length)


def _infer_arguments(shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
    """Infer arguments from shapes.

    Raises:
        UsageError: a tensor is missing or has another number of axes.
    """
    return {
        "d_model": from_size(shapes, "query.weight", 2, 1),
        "seq_len": from_size(shapes, "pos_bias", 2, 0),
        "bias": from_presence(shapes, "query.bias"),
    }


def _infer_values(state: Mapping[str, Tensor]) -> Findings:
    """Infer the window from `local_mask`, because no shape shows it."""
    mask = state.get("local_mask")
    if mask is None or mask.ndim != 2:
        return {}
    kept = int(mask[0].count_nonzero())
    return {"local_window_size": Inferred(kept, "local_mask", f"the first row of local_mask keeps {kept} biases")}


def _live_call(given: Mapping[str, Tensor]) -> LiveCall:
    """Build the call of upstream's model, and translate its one mask `[T, T, B or 1]`, True = keep, for the file.

    A causal mask is an option of the export, not an input.
    """
    call = {name: tensor for name, tensor in given.items() if name != "full_mask"}
    inputs = {name: tensor for name, tensor in call.items() if name != "mask"}
    if "full_mask" in given:
        call["mask"] = given["full_mask"][:, :, None]
    mask = call.get("mask")
    if mask is None or _is_causal(mask) or bool(mask.all()):
        return LiveCall(call, inputs, "out")
    if mask.shape[0] == 1:  # the same keys for every query
        inputs["mask"] = mask[0].t().expand(call["query"].shape[1], -1)
    elif bool((mask == mask[:, :, :1]).all()):
        inputs["full_mask"] = mask[:, :, 0]
    else:
        raise UsageError("The mask is another one for each sequence.", why="An exported AFTLocal has one for all.")
    return LiveCall(call, inputs, "out")


def _is_causal(mask: Tensor) -> bool:
    square = mask.ndim == 3 and mask.shape[0] == mask.shape[1]
    return square and bool((mask == torch.ones_like(mask[:, :, 0]).tril()[:, :, None]).all())


_NOT_RUN = "labml-nn's AFTLocal takes a [T, T] mask and memory quadratic in the length, and departs where sums cancel"

AFT_LOCAL = Family(
    name="aft",
    arguments=AFTLocalArgs,
    classes=(UpstreamClass("labml_nn.AFTLocal", why_not_run=_NOT_RUN),),
    window_argument="local_window_size",
    sizes=_sizes,
    inputs=_inputs,
    module=_module,
    reference=_reference,
    state_dict=StateDictForm(
        recognises=lambda shapes: "pos_bias" in shapes,
        recognised_by="AFTLocal pos_bias",
        infer_arguments=_infer_arguments,
        infer_values=_infer_values,
    ),
    step=StepForm(
        module=lambda spec, _: StepAFTLocal(spec.args),
        call=lambda model, data, position, caches: model(*data, position, *caches),
        caches=_caches,
        slots=ring_keys,
        length_axis=0,
        max_positions=lambda args: int(args.seq_len),
    ),
    geometry=lambda args: None,
    describe_window=lambda args: f"learned biases up to {args.local_window_size - 1} positions away, 0 beyond",
    window_views=_window_views,
    adapters={"labml_nn.transformers.aft.AFTLocal": adapt},
    extra_inputs=frozenset({"causal", "full_mask"}),
    why_static="Its learned biases are laid out by length.",
    tokens=("key", "value"),
    live_call=_live_call,
    batch_axis=1,
    sequence_axis=0,
    samples=True,
)
