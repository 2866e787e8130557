"""Upstream's layers with another forward: same call, same weights, same answers, but exportable.

`install` gives a live layer a class made of one of these and of its own: the object stays where it is, whoever
refers to it, with every weight, attribute and hook it had, `isinstance` included; only its forward is new. What is
computed is that of `modules.local_attention` and `modules.aft_local`, from the layer's own submodules, so
that a norm or a matrix the user put in place of upstream's stays in use.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ....core.errors import UsageError
from ..aft_local.module import AFTLocal
from ..arguments import LocalAttentionArgs
from ..local_attention.module import LocalAttention
from .fully_masked_rows import answer_unseen_rows
from .norms import unit_norm

_OPEN = "open"


class WindowedCore(nn.Module):
    """The attention of a layer, for the lengths it was seen to be called at.

    Args:
        args: of the layer.
        lengths: every length of its sequences, or with `open_length` the longest.
        head_dim: head size.
        inv_freq: the layer's own rotary frequencies, None without rotary.
        sequence_first: `q, k, v` are `[B, N, H, D]`, else `[B, H, N, D]`.
        open_length: the file's length is open.
    """

    def __init__(
        self,
        args: LocalAttentionArgs,
        lengths: set[int],
        head_dim: int,
        inv_freq: Tensor | None,
        *,
        sequence_first: bool,
        open_length: bool,
    ) -> None:
        super().__init__()
        self.args, self.geometry = args, args.geometry()
        self.sequence_first, self.open_length = sequence_first, open_length
        wanted = {_OPEN: max(lengths)} if open_length else {str(length): length for length in sorted(lengths)}
        self.by_length = nn.ModuleDict()
        for name, length in wanted.items():
            part = LocalAttention(args, length, head_dim, sequence_first=sequence_first, open_length=open_length)
            if part.rel_pos is not None and inv_freq is not None:
                # Not persistent: the layer's state dict keeps upstream's names.
                part.rel_pos.register_buffer("inv_freq", inv_freq.detach().cpu().float(), persistent=False)
                part.rel_pos.prepare()
            self.by_length[name] = part

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_bias: Tensor | None) -> Tensor:
        """As `modules.local_attention`, but with upstream's answer in rows whose keys are all masked."""
        name = _OPEN if self.open_length else str(int(q.shape[1 if self.sequence_first else 2]))
        if name not in self.by_length:
            raise UsageError(
                f"A {self.geometry.window_size}-token window layer is called with {name} tokens.",
                why=f"With the example inputs it was called with {', '.join(self.by_length)}.",
            )
        # Not called as a module, so that the node is named after the layer.
        out: Tensor = self.by_length[name].forward(q, k, v, mask, attn_bias)
        if mask is None:
            return out
        return answer_unseen_rows(out, v, mask, self.geometry, sequence_first=self.sequence_first)


def _with_heads(bias: Tensor, heads: int, geometry: Any) -> Tensor:
    """An additive bias `[g, w|1, K|1]` as `[heads, w, K]`: upstream repeats its heads in turn."""
    whole = bias.expand(-1, geometry.window_size, geometry.keys_per_window)
    return whole if bias.shape[0] == heads else whole.repeat(heads // bias.shape[0], 1, 1)


class ExportableAttention(nn.Module):
    """`LocalAttention.forward`: any leading axes, packed in upstream's order."""

    exported_core: WindowedCore

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        input_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        window_size: int | None = None,
    ) -> Tensor:
        """`[…, N, D]` → the same; mask bool `[m, N]`, attn_bias `[g, w, K]`, where m and g divide the leading axes."""
        core, mask = self.exported_core, input_mask if mask is None else mask
        if window_size is not None and window_size != core.geometry.window_size:
            raise UsageError(f"LocalAttention is called with window_size {window_size}.", why="A file has one window.")
        if not (core.open_length or core.args.autopad) and q.shape[-2] % core.geometry.window_size:
            raise UsageError(f"{q.shape[-2]} tokens are no multiple of the window {core.geometry.window_size}.")
        given = q.shape
        if q.ndim != 4 or not self._fits_as_it_is(q, mask, attn_bias):
            # The mask's batch comes first among the packed axes, the bias's heads last.
            inner = 1 if attn_bias is None else attn_bias.shape[0]
            leading = (-1, inner) if mask is None else (mask.shape[0], -1)
            q, k, v = (x.reshape(*leading, *x.shape[-2:]) for x in (q, k, v))
        if mask is not None:
            mask = mask.reshape(mask.shape[0], -1)
        if attn_bias is not None:
            attn_bias = _with_heads(attn_bias, q.shape[1], core.geometry)
        return core.forward(q, k, v, mask, attn_bias).reshape(given)

    @staticmethod
    def _fits_as_it_is(q: Tensor, mask: Tensor | None, attn_bias: Tensor | None) -> bool:
        """`[B, H, N, D]` with a mask for each of B and a bias for each of H."""
        masked = mask is None or mask.shape[0] == q.shape[0]
        return bool(masked and (attn_bias is None or q.shape[1] % attn_bias.shape[0] == 0))


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
        """`[B, N, dim]` → the same, and with `return_cache` the keys and values `[2, B, H, N, D]`."""
        if cache is not None:
            raise UsageError("LocalMHA is called with a cache.", why="A file sees whole sequences.")
        core = self.exported_core
        if self.norm is not None:
            x = self.norm(x)
        q, k, v = (rearrange(part, "b n (h d) -> b n h d", h=self.heads) for part in self.to_qkv(x).chunk(3, dim=-1))
        if self.qk_rmsnorm:
            q, k = unit_norm(q) * self.q_scale, unit_norm(k) * self.k_scale
        if attn_bias is not None:
            attn_bias = _with_heads(attn_bias, self.heads, core.geometry)
        if mask is not None:
            mask = mask.expand(x.shape[0], -1)
        out = core.forward(q, k, v, mask, attn_bias)
        to_v_gate = getattr(self, "to_v_gate", None)  # older releases and zeta's class have none
        if to_v_gate is not None:
            out = out * to_v_gate(x).sigmoid().unsqueeze(-1)
        projected: Tensor = self.to_out(rearrange(out, "b n h d -> b n (h d)"))
        # Where nobody uses it the exporter drops it.
        return (projected, torch.stack((k, v)).transpose(2, 3)) if return_cache else projected


class ExportableAFT(nn.Module):
    """labml's `AFTLocal.forward`; what its mask was seen to be decides how it is computed."""

    exported_core: AFTLocal
    exported_mask: str

    def forward(self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """`[T, B, D]` → the same; mask bool `[T or 1, T, B or 1]`."""
        keys = full = None
        if mask is not None and self.exported_mask == "keys":
            keys = mask[0].t().expand(query.shape[1], -1)
        elif mask is not None and self.exported_mask == "full":
            full = mask[:, :, 0].expand(query.shape[0], -1)
        return self.exported_core.forward(query, key, value, keys, full)


def install(layer: nn.Module, forward: type[nn.Module], core: nn.Module, **attributes: Any) -> None:
    """Give a live layer the forward of one of the classes above, in place."""
    original = type(layer)
    layer.__class__ = type(original.__name__, (forward, original), {"__module__": original.__module__})
    layer.add_module("exported_core", core)
    for name, value in attributes.items():
        setattr(layer, name, value)
