"""`AFTLocal` as a family: its file's sizes and inputs, what weights show, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....core.documents.window_view import WindowView, bias_views
from ....core.error_texts import argument
from ....core.errors import UsageError
from ...options import ShapeRequest, Sizes
from ..family import Adapter, Inputs, LiveCall, ModelSpec, State, UpstreamClass, sequence_length
from ..forms import StateDictFamily, StepCache, StepFamily
from ..inference import Findings, Inferred, TensorShapes, from_presence, from_size
from ..parts.float64 import Float64State
from .adapter import adapt
from .arguments import AFTLocalArgs
from .module import AFTLocal
from .reference import aft_local
from .step_module import StepAFTLocal, ring_keys

_NOT_RUN = "labml-nn's AFTLocal takes a [T, T] mask and memory quadratic in the length, and departs where sums cancel"


class AFTLocalFamily(StateDictFamily[AFTLocalArgs], StepFamily[AFTLocalArgs]):
    """`labml_nn.AFTLocal`."""

    name = "aft"
    arguments = AFTLocalArgs
    classes = (UpstreamClass("labml_nn.AFTLocal", why_not_run=_NOT_RUN),)
    window_argument = "local_window_size"
    adapters: Mapping[str, Adapter] = {"labml_nn.transformers.aft.AFTLocal": adapt}
    extra_inputs = frozenset({"causal", "full_mask"})
    why_static = "Its learned biases are laid out by length."
    tokens = ("key", "value")
    batch_axis = 1
    sequence_axis = 0
    samples = True
    state_dict_of = "AFTLocal pos_bias"
    length_axis = 0

    def sizes(self, args: AFTLocalArgs, request: ShapeRequest) -> Sizes:
        """Take as many positions as there are learned biases, if no length is given."""
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

    def inputs(self, args: AFTLocalArgs, sizes: Sizes) -> Inputs:
        """List query, key and value `[T, B, D]`, then the masks."""
        data = (sizes.seq_len, sizes.batch, args.d_model)
        inputs: Inputs = dict.fromkeys(("query", "key", "value"), ("float", data))
        if sizes.mask:
            inputs["mask"] = ("bool", (sizes.batch, sizes.seq_len))
        if sizes.full_mask:
            inputs["full_mask"] = ("bool", (sizes.seq_len, sizes.seq_len))
        return inputs

    def module(self, spec: ModelSpec[AFTLocalArgs]) -> AFTLocal:
        """Build the export-friendly module."""
        sizes = spec.sizes
        return AFTLocal(spec.args, sizes.seq_len, causal=sizes.causal, full_mask=sizes.full_mask)

    def reference(
        self, spec: ModelSpec[AFTLocalArgs], state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute the formula."""
        return (aft_local(spec.args, state, **inputs, causal=spec.sizes.causal, rows=positions),)

    def window_views(self, class_name: str, args: AFTLocalArgs, sizes: Sizes | None) -> list[WindowView]:
        """Return the reach of the learned biases."""
        causal, length = (False, args.seq_len) if sizes is None else (sizes.causal, sizes.seq_len)
        return bias_views(class_name, args.local_window_size, causal, length)

    def live_call(self, given: Mapping[str, Tensor]) -> LiveCall:
        """Translate upstream's one mask `[T, T, B or 1]`, True = keep, for the file.

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

    def recognises_state(self, shapes: TensorShapes) -> bool:
        """Look for the table of biases."""
        return "pos_bias" in shapes

    def infer_arguments(self, shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
        """Infer arguments from shapes."""
        return {
            "d_model": from_size(shapes, "query.weight", 2, 1),
            "seq_len": from_size(shapes, "pos_bias", 2, 0),
            "bias": from_presence(shapes, "query.bias"),
        }

    def infer_values(self, state: State) -> Findings:
        """Infer the window from `local_mask`, because no shape shows it."""
        mask = state.get("local_mask")
        if mask is None or mask.ndim != 2:
            return {}
        kept = int(mask[0].count_nonzero())
        return {"local_window_size": Inferred(kept, "local_mask", f"the first row of local_mask keeps {kept} biases")}

    def step_module(self, spec: ModelSpec[AFTLocalArgs], chunk: int) -> nn.Module:
        """Build the module that takes tokens; it has the same weights for every number of them."""
        return StepAFTLocal(spec.args)

    def step_call(
        self, module: StepAFTLocal, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call it with query, key and value."""
        outputs: tuple[Tensor, ...] = module(*data, position, *caches)
        return outputs

    def step_caches(self, spec: ModelSpec[AFTLocalArgs]) -> list[StepCache]:
        """List the rings of keys and values, and the sums over all that left them."""
        row = (spec.sizes.batch, spec.args.d_model)
        ring = (ring_keys(spec.args), *row)
        return [("key_cache.0", ring, "float32"), ("value_cache.0", ring, "float32"), ("state.0", (3, *row), "float32")]

    def slots(self, args: AFTLocalArgs) -> int:
        """Return the number of keys with a learned bias."""
        return ring_keys(args)

    def max_positions(self, args: AFTLocalArgs) -> int:
        """Return the side of the table of biases."""
        return args.seq_len


def _is_causal(mask: Tensor) -> bool:
    square = mask.ndim == 3 and mask.shape[0] == mask.shape[1]
    return square and bool((mask == torch.ones_like(mask[:, :, 0]).tril()[:, :, None]).all())


AFT_LOCAL = AFTLocalFamily()
