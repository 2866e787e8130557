"""Replace the forward of a live `AFTLocal` by an export-friendly one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....core.errors import UsageError
from ..drop_in import install
from ..family import LayerCall
from .arguments import AFTLocalArgs
from .module import AFTLocal


def adapt(layer: Any, calls: Sequence[LayerCall], dynamic_length: bool) -> None:
    """Replace the forward of labml's `AFTLocal`.

    A mask that does not depend on the module's inputs is built in by its kind: no mask, or a causal triangle. The
    observed values of one that does prove nothing, so only its shape counts.

    Raises:
        UsageError: the layer cannot be replaced; the text says why.
    """
    if dynamic_length:
        raise UsageError("AFT-local has no export with a dynamic length.")
    lengths = {call.shapes["query"][0] for call in calls}
    kinds = {_mask_kind(call) for call in calls}
    if len(lengths) > 1 or len(kinds) > 1:
        raise UsageError("It is called with several lengths or kinds of mask.")
    if type(layer.activation) is not nn.Sigmoid:
        raise UsageError(f"Its activation is a {type(layer.activation).__name__}.")
    kind = kinds.pop()
    args = AFTLocalArgs(
        d_model=calls[0].shapes["query"][-1],
        seq_len=layer.pos_bias.shape[0],
        local_window_size=layer.local_window_size,
        bias=getattr(layer.query, "bias", None) is not None,
    )
    core = AFTLocal(args, lengths.pop(), causal=kind == "causal", full_mask=kind == "full")
    core.pos_bias = nn.Parameter(layer.pos_bias.detach().float(), requires_grad=False)
    core.local_mask = layer.local_mask.detach().bool()
    core.prepare()
    for name in ("query", "key", "value", "output"):
        setattr(core, name, getattr(layer, name))
    install(layer, ExportableAFT, core, exported_mask=kind)


def _mask_kind(call: LayerCall) -> str:
    """Return the kind of a call's mask: "none", "causal", "keys" (the same for every query) or "full"."""
    mask = call.given.get("mask")
    if mask is None or ("mask" not in call.dependent and bool(mask.all())):
        return "none"
    if "mask" not in call.dependent:
        length = call.shapes["query"][0]
        triangle = torch.ones(length, length, dtype=torch.bool).tril()[:, :, None]
        if mask.shape[0] == length and bool((mask == triangle).all()):
            return "causal"
        if bool((mask == mask[:1]).all()):
            return "keys"
    elif mask.shape[0] == 1:
        return "keys"
    if mask.shape[2] == 1:
        return "full"
    raise UsageError("Its mask is another one for each sequence of the batch.")


class ExportableAFT(nn.Module):
    """labml's `AFTLocal.forward`, computed in a way that depends on the observed kind of mask."""

    exported_core: AFTLocal
    exported_mask: str

    def forward(self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the layer, `[T, B, D]` → the same; mask bool `[T or 1, T, B or 1]`."""
        keys = full = None
        if mask is not None and self.exported_mask == "keys":
            keys = mask[0].t().expand(query.shape[1], -1)
        elif mask is not None and self.exported_mask == "full":
            full = mask[:, :, 0].expand(query.shape[0], -1)
        return self.exported_core.forward(query, key, value, keys, full)
