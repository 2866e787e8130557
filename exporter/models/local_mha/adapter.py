"""Replace the forward of a live `LocalMHA` by an export-friendly one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ....core.errors import UsageError
from ....core.geometry import WindowGeometry
from ..drop_in import install
from ..family import LayerCall
from ..local_attention.adapter import WindowedCore, bias_with_heads, has_hooks, is_upstream
from ..parts.fused_calls import unit_norm


def adapt(layer: Any, calls: Sequence[LayerCall], dynamic_length: bool) -> WindowGeometry:
    """Replace the forward of a `LocalMHA` of local_attention or of zeta; it keeps the live layer's parts.

    Raises:
        UsageError: the layer cannot be replaced; the text says why. Its LocalAttention is then replaced alone.
    """
    attention = layer.attn_fn
    if not is_upstream(attention, "LocalAttention"):
        raise UsageError(f"Its attention is a {type(attention).__name__}.")
    if has_hooks(attention):
        raise UsageError("Its attention has hooks.")
    for call in calls:
        if "cache" in call.given:
            raise UsageError("It is called with a cache.")
        shape = call.shapes["x"]
        mask, bias = call.shapes.get("mask"), call.shapes.get("attn_bias", (1,))
        if len(shape) != 3 or (mask is not None and (len(mask) != 2 or mask[0] not in (1, shape[0]))):
            raise UsageError(f"It is called with x {list(shape)} and a mask {list(mask or ())}.")
        if layer.heads % bias[0]:
            raise UsageError(f"It is called with a bias for {bias[0]} heads and has {layer.heads}.")
    lengths = {call.shapes["x"][-2] for call in calls}
    with torch.no_grad():  # the matrix may be wrapped, so it is run to see its size
        rows = layer.to_qkv(torch.zeros(1, 1, calls[0].shapes["x"][-1])).shape[-1]
    head_dim = int(rows) // (3 * int(layer.heads))
    core = WindowedCore(attention, lengths, head_dim, sequence_first=True, dynamic_length=dynamic_length)
    install(layer, ExportableMHA, core)
    return core.geometry


class ExportableMHA(nn.Module):
    """`LocalMHA.forward` without splitting heads off the sequence: the attention node takes `[B, N, H, D]`."""

    exported_core: WindowedCore
    norm: nn.Module | None
    to_qkv: nn.Module
    to_out: nn.Module
    q_scale: Tensor
    k_scale: Tensor
    heads: int
    qk_rmsnorm: bool

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        cache: Any = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the layer, `[B, N, dim]` → the same; with `return_cache` also keys and values `[2, B, H, N, D]`."""
        if cache is not None:
            raise UsageError("LocalMHA is called with a cache.", why="A file sees whole sequences.")
        core = self.exported_core
        if self.norm is not None:
            x = self.norm(x)
        q, k, v = (rearrange(part, "b n (h d) -> b n h d", h=self.heads) for part in self.to_qkv(x).chunk(3, dim=-1))
        if self.qk_rmsnorm:
            q, k = unit_norm(q) * self.q_scale, unit_norm(k) * self.k_scale
        if attn_bias is not None:
            attn_bias = bias_with_heads(attn_bias, self.heads, core.geometry)
        if mask is not None:
            mask = mask.expand(x.shape[0], -1)
        out = core.forward(q, k, v, mask, attn_bias)
        to_v_gate = getattr(self, "to_v_gate", None)  # older releases and zeta's class have none
        if to_v_gate is not None:
            out = out * to_v_gate(x).sigmoid().unsqueeze(-1)
        projected: Tensor = self.to_out(rearrange(out, "b n h d -> b n (h d)"))
        # The exporter drops it if it is not used.
        return (projected, torch.stack((k, v)).transpose(2, 3)) if return_cache else projected
