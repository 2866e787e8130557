"""Replace the forward of a live `LocalAttention` by an export-friendly one; its attributes show its arguments.

It computes the same as `module.py`, with the layer's own rotary frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....core.errors import UsageError
from ....core.geometry import WindowGeometry
from ..drop_in import install
from ..family import LayerCall
from .arguments import LocalAttentionArgs
from .fully_masked_rows import fill_fully_masked_rows
from .module import LocalAttention


def adapt(layer: Any, calls: Sequence[LayerCall], dynamic_length: bool) -> WindowGeometry:
    """Replace the forward of a `LocalAttention` of local_attention or of zeta.

    Raises:
        UsageError: the layer cannot be replaced; the text says why.
    """
    for call in calls:
        shapes = [call.shapes[name] for name in ("q", "k", "v")]
        if len(set(shapes)) > 1:  # upstream takes wider values, and one head of keys for all
            raise UsageError(f"It is called with q, k, v of the shapes {', '.join(str(list(x)) for x in shapes)}.")
        heads, batch = call.shapes.get("attn_bias", (1,))[0], call.shapes.get("mask", (1,))[0]
        packed = math.prod(call.shapes["q"][:-2])
        if packed % (heads * batch):
            raise UsageError(f"A mask of {batch} rows and a bias of {heads} heads do not divide {packed} sequences.")
        if call.given.get("window_size", layer.window_size) != layer.window_size:
            raise UsageError("It is called with a window_size of its own.")
    widths = {call.shapes["q"][-1] for call in calls}
    if len(widths) > 1:
        raise UsageError(f"It is called with heads of different sizes: {sorted(widths)}.")
    lengths = {call.shapes["q"][-2] for call in calls}
    core = WindowedCore(layer, lengths, widths.pop(), sequence_first=False, dynamic_length=dynamic_length)
    install(layer, ExportableAttention, core)
    return core.geometry


def attention_args(layer: Any) -> LocalAttentionArgs:
    """Read the constructor arguments of a live LocalAttention.

    Raises:
        UsageError: the layer has a part that upstream's class would not have.
    """
    rotary = layer.rel_pos
    if type(layer.dropout) not in (nn.Dropout, nn.Identity):
        raise UsageError(f"Its dropout is a {type(layer.dropout).__name__}.")
    if has_hooks(layer.dropout, rotary):
        raise UsageError("Its dropout or its rotary embedding has hooks.")
    xpos = False
    if rotary is not None:
        if not is_upstream(rotary, "SinusoidalEmbeddings"):
            raise UsageError(f"Its rotary embedding is a {type(rotary).__name__}.")
        xpos = bool(getattr(rotary, "use_xpos", False))
    if xpos:
        dim = 2 * rotary.inv_freq.shape[0]
        scale = (torch.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim)
        if not torch.allclose(rotary.scale.cpu().float(), scale, atol=1e-6):
            raise UsageError("Its xpos scale is not upstream's.")
    scale_of_scores = layer.scale
    if isinstance(scale_of_scores, Tensor) and scale_of_scores.numel() == 1:
        scale_of_scores = float(scale_of_scores)
    return LocalAttentionArgs(
        window_size=layer.window_size,
        causal=bool(layer.causal),
        look_backward=layer.look_backward,
        look_forward=layer.look_forward,
        shared_qk=bool(layer.shared_qk),
        dim=None if rotary is None else 2 * rotary.inv_freq.shape[0],
        autopad=bool(layer.autopad),
        exact_windowsize=bool(layer.exact_windowsize),
        scale=scale_of_scores,
        use_rotary_pos_emb=rotary is not None,
        use_xpos=xpos,
        xpos_scale_base=float(rotary.scale_base) if xpos else None,
    )


def has_hooks(*parts: nn.Module | None) -> bool:
    """Return whether a part of a layer that is not called after a replacement has hooks, which may change results."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in parts if part is not None)


def is_upstream(part: nn.Module, class_name: str) -> bool:
    """Return whether a part of a layer computes the same as upstream's class of that name."""
    for owner in type(part).__mro__:
        if owner.__name__ == class_name and owner.__module__.partition(".")[0] in ("local_attention", "zeta"):
            return type(part).forward is owner.forward and "forward" not in vars(part)  # type: ignore[attr-defined]
    return False


_OPEN = "open"


class WindowedCore(nn.Module):
    """The attention of a live layer for the lengths at which it was called, with the layer's own rotary frequencies.

    Args:
        layer: the live `LocalAttention`.
        lengths: every length of its sequences, or with `dynamic_length` the longest.
        head_dim: head size.
        sequence_first: `q, k, v` are `[B, N, H, D]`, else `[B, H, N, D]`.
        dynamic_length: the file's length is dynamic.

    Raises:
        UsageError: the layer has a part that upstream's class would not have, or a rotary embedding of another width.
    """

    def __init__(
        self, layer: Any, lengths: set[int], head_dim: int, *, sequence_first: bool, dynamic_length: bool
    ) -> None:
        super().__init__()
        args = attention_args(layer)
        if args.rotary_dim not in (None, head_dim):
            raise UsageError(f"Its rotary embedding is {args.rotary_dim} wide and its heads are {head_dim}.")
        self.args, self.geometry = args, args.geometry()
        self.sequence_first, self.dynamic_length = sequence_first, dynamic_length
        wanted = {_OPEN: max(lengths)} if dynamic_length else {str(length): length for length in sorted(lengths)}
        self.by_length = nn.ModuleDict()
        for name, length in wanted.items():
            part = LocalAttention(args, length, head_dim, sequence_first=sequence_first, dynamic_length=dynamic_length)
            if part.rel_pos is not None:
                # Not persistent, so that the layer's state dict keeps upstream's names.
                inv_freq = layer.rel_pos.inv_freq.detach().cpu().float()
                part.rel_pos.register_buffer("inv_freq", inv_freq, persistent=False)
                part.rel_pos.prepare()
            self.by_length[name] = part

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_bias: Tensor | None) -> Tensor:
        """Compute the same as `module.py`, but with upstream's output in rows whose keys are all masked."""
        name = _OPEN if self.dynamic_length else str(int(q.shape[1 if self.sequence_first else 2]))
        if name not in self.by_length:
            raise UsageError(
                f"A {self.geometry.window_size}-token window layer is called with {name} tokens.",
                why=f"With the example inputs it was called with {', '.join(self.by_length)}.",
            )
        # Called as a function, so that the node is named after the layer.
        out: Tensor = self.by_length[name].forward(q, k, v, mask, attn_bias)
        if mask is None:
            return out
        return fill_fully_masked_rows(out, v, mask, self.geometry, sequence_first=self.sequence_first)


def bias_with_heads(bias: Tensor, heads: int, geometry: Any) -> Tensor:
    """Expand an additive bias `[g, w|1, K|1]` to `[heads, w, K]`: upstream repeats its heads in turn."""
    whole = bias.expand(-1, geometry.window_size, geometry.keys_per_window)
    return whole if bias.shape[0] == heads else whole.repeat(heads // bias.shape[0], 1, 1)


class ExportableAttention(nn.Module):
    """`LocalAttention.forward` for any leading axes, packed in upstream's order."""

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
        """Compute attention, `[…, N, D]` → the same.

        mask is bool `[m, N]` and attn_bias `[g, w, K]`, where m and g divide the product of the leading axes.
        """
        core, mask = self.exported_core, input_mask if mask is None else mask
        if window_size is not None and window_size != core.geometry.window_size:
            raise UsageError(f"LocalAttention is called with window_size {window_size}.", why="A file has one window.")
        if not (core.dynamic_length or core.args.autopad) and q.shape[-2] % core.geometry.window_size:
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
            attn_bias = bias_with_heads(attn_bias, q.shape[1], core.geometry)
        return core.forward(q, k, v, mask, attn_bias).reshape(given)

    @staticmethod
    def _fits_as_it_is(q: Tensor, mask: Tensor | None, attn_bias: Tensor | None) -> bool:
        """Return whether the inputs are `[B, H, N, D]` with a mask for each of B and a bias for each of H."""
        masked = mask is None or mask.shape[0] == q.shape[0]
        return bool(masked and (attn_bias is None or q.shape[1] % attn_bias.shape[0] == 0))
