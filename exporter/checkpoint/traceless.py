"""List the arguments that change a model's outputs but that its tensors do not show, each with its meaning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..models.arguments import Arguments
    from ..models.registry import ClassEntry

# By name, the most important first; the meaning is worded to follow "fill in:".
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "local_attn_window_size": "tokens in a window",
        "window_size": "tokens in a window",
        "local_window_size": "positions on each side with a learned bias",
        "causal": "true if a token sees no later ones",
        "exact_windowsize": "true if a token sees just window_size tokens back, not all of the window before its own",
        "look_backward": "windows before its own that a token sees",
        "look_forward": "windows after its own that a token sees",
        "heads": "heads of the attention",
        "dim_head": "channels of a head",
        "dim": "channels of a head that rotary embeddings turn",
        "shared_qk": "true if queries are the keys too",
        "autopad": "true if sequences are padded to whole windows",
        "scale": "factor of the scores",
        "qk_scale": "factor of the scores",
        "use_rotary_pos_emb": "true with rotary embeddings",
        "use_xpos": "true if rotary embeddings are scaled (xpos)",
        "xpos_scale_base": "base of xpos' scale",
    }
)
# Padding decides which lengths a model accepts, but changes no output.
_WITHOUT_EFFECT = {"autopad"}
# Arguments without an effect on an exported model: for training, for global layers, or a deprecated form of `dim`.
NO_EFFECT = frozenset(
    {"attn_dropout", "ff_dropout", "dropout", "ignore_index", "layers_insert_global_attn", "rel_pos_emb_config"}
)
# An argument has no effect if the other argument has this value.
_IDLE_WHERE = {
    "qk_scale": ("qk_rmsnorm", False),
    "xpos_scale_base": ("use_xpos", False),
    "use_rotary_pos_emb": ("dim", None),
}
# What a default of None stands for upstream.
_NONE_MEANS = {
    "look_forward": "0 if causal, else 1",
    "exact_windowsize": "true",
    "dim": "none",
    "scale": "1 / √(channels of a head)",
    "xpos_scale_base": "half a window",
}


def traceless_arguments(entry: ClassEntry, values: Mapping[str, Any]) -> list[str]:
    """List a class's arguments that its tensors need not show, without those that have no effect at these values."""
    idle = {name for name, (other, value) in _IDLE_WHERE.items() if other in values and values[other] == value}
    return [name for name in MEANINGS if name in entry.args.model_fields and name not in {*idle, *entry.unsupported}]


def not_in_weights(entry: ClassEntry, args: Arguments, inferred: Collection[str]) -> list[str]:
    """List the arguments that no tensor shows, wherever their values came from.

    Args:
        entry: the class.
        args: arguments of the model.
        inferred: names of the arguments that its weights show.
    """
    possible = traceless_arguments(entry, args.model_dump())
    names = [name for name in possible if name not in {*inferred, *_WITHOUT_EFFECT}]
    if getattr(args, "num_residual_streams", 1) > 1:
        names.append("hyper_connections")
    return names


def default_in_words(entry: ClassEntry, name: str) -> str | None:
    """Write upstream's default of an argument in words; None if it has none."""
    field = entry.args.model_fields[name]
    if field.is_required():
        return None
    if field.default is None:
        return _NONE_MEANS[name]
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
