"""From a live upstream layer to its export-friendly forward: its arguments are read off its attributes.

Each adapter checks that the layer is what upstream builds and was called in a way a file can repeat; if it is not, it
raises UsageError with the reason, before anything is changed, and the layer is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....core.errors import UsageError
from ....core.geometry import WindowGeometry
from ...observe import Call
from ..aft_local.arguments import AFTLocalArgs
from ..aft_local.module import AFTLocal
from ..arguments import LocalAttentionArgs
from ..parts.drop_in import ExportableAFT, ExportableAttention, ExportableMHA, WindowedCore, install


def adapt_attention(layer: Any, calls: Sequence[Call], open_length: bool) -> WindowGeometry:
    """`LocalAttention`, of local_attention or of zeta.

    Raises:
        UsageError: why it is left as it is.
    """
    args = attention_args(layer)
    for call in calls:
        heads, batch = call.shapes.get("attn_bias", (1,))[0], call.shapes.get("mask", (1,))[0]
        packed = 1
        for size in call.shapes["q"][:-2]:
            packed *= size
        if packed % (heads * batch):
            raise UsageError(f"A mask of {batch} rows and a bias of {heads} heads do not divide {packed} sequences.")
        if call.given.get("window_size", layer.window_size) != layer.window_size:
            raise UsageError("It is called with a window_size of its own.")
    core = _core(args, layer, calls, "q", open_length, sequence_first=False)
    install(layer, ExportableAttention, core)
    return core.geometry


def adapt_mha(layer: Any, calls: Sequence[Call], open_length: bool) -> WindowGeometry:
    """`LocalMHA`, of local_attention or of zeta; its parts stay those of the live layer.

    Raises:
        UsageError: why it is left as it is; its LocalAttention is then replaced by itself.
    """
    attention = layer.attn_fn
    if not _is_upstream(attention, "LocalAttention"):
        raise UsageError(f"Its attention is a {type(attention).__name__}.")
    if attention._forward_hooks or attention._forward_pre_hooks:
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
    core = _core(attention_args(attention), attention, calls, "x", open_length, sequence_first=True, owner=layer)
    install(layer, ExportableMHA, core)
    return core.geometry


def attention_args(layer: Any) -> LocalAttentionArgs:
    """The constructor arguments of a live LocalAttention.

    Raises:
        UsageError: it holds something upstream does not build.
    """
    rotary = layer.rel_pos
    if type(layer.dropout) not in (nn.Dropout, nn.Identity):
        raise UsageError(f"Its dropout is a {type(layer.dropout).__name__}.")
    xpos = False
    if rotary is not None:
        if not _is_upstream(rotary, "SinusoidalEmbeddings"):
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


def _is_upstream(part: nn.Module, class_name: str) -> bool:
    """Whether a part of a layer computes what upstream's class of that name does."""
    for owner in type(part).__mro__:
        if owner.__name__ == class_name and owner.__module__.partition(".")[0] in ("local_attention", "zeta"):
            return type(part).forward is owner.forward and "forward" not in vars(part)  # type: ignore[attr-defined]
    return False


def _core(
    args: LocalAttentionArgs,
    attention: Any,
    calls: Sequence[Call],
    argument: str,
    open_length: bool,
    *,
    sequence_first: bool,
    owner: Any = None,
) -> WindowedCore:
    lengths = {call.shapes[argument][-2] for call in calls}
    widths = {call.shapes[argument][-1] for call in calls}
    if owner is None and len(widths) > 1:
        raise UsageError(f"It is called with heads of different sizes: {sorted(widths)}.")
    width = widths.pop() if owner is None else _head_dim(owner, calls)
    if args.rotary_dim not in (None, width):
        raise UsageError(f"Its rotary embedding is {args.rotary_dim} wide and its heads are {width}.")
    inv_freq = None if attention.rel_pos is None else attention.rel_pos.inv_freq
    return WindowedCore(args, lengths, width, inv_freq, sequence_first=sequence_first, open_length=open_length)


def _head_dim(layer: Any, calls: Sequence[Call]) -> int:
    """Head size of a live LocalMHA; its matrices may be wrapped, so their result is asked."""
    with torch.no_grad():
        rows = layer.to_qkv(torch.zeros(1, 1, calls[0].shapes["x"][-1])).shape[-1]
    return int(rows) // (3 * int(layer.heads))


def adapt_aft(layer: Any, calls: Sequence[Call], open_length: bool) -> None:
    """labml's `AFTLocal`.

    What the mask was seen to be is built in: nothing hidden, or a causal triangle. Should it depend on the inputs
    after all, the parity check fails.

    Raises:
        UsageError: why it is left as it is.
    """
    if open_length:
        raise UsageError("AFT-local has no export with an open length.")
    lengths = {call.shapes["query"][0] for call in calls}
    kinds = {_mask_kind(call) for call in calls}
    if len(lengths) > 1 or len(kinds) > 1:
        raise UsageError("It is called with several lengths or kinds of mask.")
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


def _mask_kind(call: Call) -> str:
    """ "none", "causal", "keys" (every query has the same) or "full"."""
    mask = call.given.get("mask")
    if mask is None or bool(mask.all()):
        return "none"
    length = call.shapes["query"][0]
    triangle = torch.ones(length, length, dtype=torch.bool).tril()[:, :, None]
    if mask.shape[0] == length and bool((mask == triangle).all()):
        return "causal"
    if bool((mask == mask[:1]).all()):
        return "keys"
    if mask.shape[2] == 1:
        return "full"
    raise UsageError("Its mask is another one for each sequence of the batch.")
