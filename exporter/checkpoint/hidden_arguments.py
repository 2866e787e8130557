"""List the arguments that change a model's outputs but cannot be read from its tensors, and ask for them in a file.

The file is a configuration to complete, with the known arguments and a placeholder for each unknown one. A placeholder
is text that no argument accepts; the error for a configuration that still has one names it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...core.errors import UsageError
from ...core.storage.file_kinds import CONFIGURATION, default_configs
from ...core.storage.files import publish
from ...core.storage.outputs import Output, writing

if TYPE_CHECKING:
    from ..models.arguments import Arguments
    from ..models.registry import ClassEntry

# By name, the most important first; the meaning is worded to follow "fill in:".
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "local_attn_window_size": "tokens in a window",
        "window_size": "tokens in a window",
        "local_window_size": "positions on each side with a learned bias",
        "causal": "true if a token sees no later tokens",
        "exact_windowsize": "true if a token sees exactly window_size tokens back, not the whole windows before its "
        "own",
        "look_backward": "number of windows before its own that a token sees",
        "look_forward": "number of windows after its own that a token sees",
        "heads": "heads of the attention",
        "dim_head": "channels of a head",
        "dim": "channels of a head that rotary embeddings turn",
        "shared_qk": "true if queries and keys are the same",
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
# The meaning of a default of None upstream.
_NONE_MEANS = {
    "look_forward": "0 if causal, else 1",
    "exact_windowsize": "true",
    "dim": "none",
    "scale": "1 / sqrt(channels of a head)",
    "xpos_scale_base": "half a window",
}
_OPEN, _CLOSE = "<fill in: ", ">"
_RELEASE = (
    "release of hyper-connections used in training, such as 0.4.11; or remove this entry for any release since 0.3.10"
)
_ABOUT = "Replace each <fill in: …>. Values that the weights show may be left out."


def hidden_arguments(entry: ClassEntry, values: Mapping[str, Any]) -> list[str]:
    """List a class's arguments that its tensors may not show, without those that have no effect at these values."""
    idle = {name for name, (other, value) in _IDLE_WHERE.items() if other in values and values[other] == value}
    return [name for name in MEANINGS if name in entry.args.model_fields and name not in {*idle, *entry.unsupported}]


def not_in_weights(entry: ClassEntry, args: Arguments, inferred: Collection[str]) -> list[str]:
    """List the arguments that no tensor shows, with values from any source.

    Args:
        entry: the class.
        args: arguments of the model.
        inferred: names of the arguments that its weights show.
    """
    possible = hidden_arguments(entry, args.model_dump())
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


def config_template(
    entry: ClassEntry, known: Mapping[str, Any], inferred: Mapping[str, Any], release: str | None
) -> dict[str, Any]:
    """Return a configuration with the known arguments, and a placeholder for each unknown one that no tensor shows.

    Args:
        entry: the class.
        known: arguments that a configuration or the checkpoint itself gives.
        inferred: arguments inferred from the weights; they are left out.
        release: release of hyper-connections, if it is known.
    """
    values = {**inferred, **known}
    kwargs = {name: value for name, value in known.items() if name not in inferred}
    for name in hidden_arguments(entry, values):
        if name not in values:
            kwargs[name] = _placeholder(entry, name)
    document: dict[str, Any] = {"class": entry.name, "kwargs": kwargs}
    if values.get("num_residual_streams", 1) != 1:
        document["hyper_connections"] = release or f"{_OPEN}{_RELEASE}{_CLOSE}"
    return {"about": _ABOUT, **document} if placeholders(document) else document


def _placeholder(entry: ClassEntry, name: str) -> str:
    default = default_in_words(entry, name)
    # No model works without a window, so it must always be given.
    unsaid = "" if default is None or name == entry.family.window_argument else f"; or remove this entry for {default}"
    return f"{_OPEN}{MEANINGS[name]}{unsaid}{_CLOSE}"


def placeholders(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a configuration that are still placeholders, by name."""
    kwargs = document.get("kwargs")
    entries = {**(kwargs if isinstance(kwargs, Mapping) else {}), "class": document.get("class")}
    entries["hyper_connections"] = document.get("hyper_connections")
    return {str(name): value for name, value in entries.items() if isinstance(value, str) and _OPEN.strip() in value}


def template_text(document: Mapping[str, Any]) -> str:
    """Write a configuration as the text of its file."""
    return json.dumps(document, indent=2) + "\n"


def template_path(checkpoint: Path) -> Path:
    """Return the path at which a checkpoint's configuration is found by default."""
    return default_configs(checkpoint)[0]


def write_template(document: Mapping[str, Any], checkpoint: Path, found: Path | None) -> Path:
    """Write a configuration into its checkpoint's folder, and return its path.

    Args:
        document: the configuration.
        checkpoint: the weights.
        found: the configuration that the checkpoint has already, if any.

    Raises:
        UsageError: a configuration exists (it is never replaced), or the folder cannot be written.
    """
    path = template_path(checkpoint)
    existing = found if found is not None else path if path.exists() or path.is_symlink() else None
    if existing is not None:
        raise UsageError(
            f"{existing} already exists.",
            why="An existing configuration is never overwritten.",
            fix="Complete that file, or move it first.",
        )
    with writing(Output(path, CONFIGURATION), inputs=[checkpoint]) as folder:
        staged = folder / path.name
        staged.write_text(template_text(document), encoding="utf-8")
        publish(staged, path)
    return path
