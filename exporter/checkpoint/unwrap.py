"""Find the plain state dict inside what a training script saved.

There are two steps, and each adds a note. The first finds the entry that holds the weights, since a training
checkpoint is a table of tables. If several entries are possible, the first of `ENTRIES` is taken, so the trained model
comes before its moving average (EMA). The second removes the prefixes that wrappers
(DataParallel, torch.compile, FSDP, Lightning, ema_pytorch) put in front of names. An ema_pytorch state holds the
average as `ema_model.` and the trained model as `online_model.`: such a state is saved for the average, so the average
is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ...core.error_texts import argument
from ...core.errors import UsageError
from ..models.inference import bounded
from .settings import settings_tables

# Entries that hold weights; the first one present is taken.
ENTRIES = (
    *("model_state_dict", "state_dict", "model", "module", "network", "net", "generator", "weights", "params"),
    *("ema_model_state_dict", "ema_state_dict", "ema_model", "model_ema", "ema"),
)
# Name prefixes of modules that wrap the model; the first one present is removed.
PREFIXES = ("ema_model.", "online_model.", "module.", "model.", "network.", "net.", "transformer.", "attn.")
# Of these the names of parts, which other parts may stand beside; wrappers have at most a few numbers of their own.
_PARTS = ("transformer.", "attn.")
# Inserted anywhere in a name by a wrapper around a part of the model.
_INFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# The first part of every name in a supported class's state dict.
_ROOTS = frozenset(
    {
        *("token_emb", "pos_emb", "layers", "global_layers", "dynamic_pos_bias", "to_logits"),
        *("norm", "to_qkv", "q_scale", "k_scale", "attn_fn", "rel_pos", "to_v_gate", "to_out"),
        *("query", "key", "value", "output", "pos_bias", "local_mask"),
    }
)
_NOT_WEIGHTS = ("optim", "sched", "scaler", "rng", "grad", "loss", "callbacks", "loops")
_DEEPEST = 8


def unwrap(
    loaded: object, path: Path, notes: list[str], roots: Collection[str] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Find the state dict inside a file's contents, and the entries beside it that hold training settings.

    Args:
        loaded: what the file holds.
        path: path of the file, for messages.
        notes: gets a line for every choice.
        roots: first parts of the model's own names; by default those of the supported classes.

    Raises:
        UsageError: there are no tensors, or several entries are possible.
    """
    roots = _ROOTS if roots is None else roots
    if not isinstance(loaded, Mapping):
        kind = type(loaded).__name__
        raise UsageError(
            f"{path} holds one {kind}, not a state dict.",
            why="A state dict is a table from names to tensors.",
            fix="Save model.state_dict().",
        )
    tables = _way_to_weights(loaded, path, notes, roots)
    chosen, settings = tables[-1], settings_tables([loaded, *tables])
    state = {name: value for name, value in chosen.items() if isinstance(name, str) and isinstance(value, torch.Tensor)}
    others = [str(name) for name in chosen if name not in state and name not in settings]
    if others:
        notes.append(f"ignored, not tensors: {bounded(others, 5)}")
    if chosen and not state:
        raise UsageError(
            f"{path} holds no tensors.",
            why=f"It holds {bounded([str(name) for name in chosen], 5)}.",
            fix="Save model.state_dict().",
        )
    return _without_prefixes(_without_infixes(state, path, notes), path, notes, roots), settings


def _holds_weights(value: object) -> bool:
    """Return whether a table has named tensors in it, directly or in a table inside."""
    seen: set[int] = set()  # a pickled table can contain itself
    waiting = [value]
    while waiting:
        table = waiting.pop()
        if isinstance(table, Mapping) and id(table) not in seen:
            if any(isinstance(name, str) and isinstance(inner, torch.Tensor) for name, inner in table.items()):
                return True
            seen.add(id(table))
            waiting += table.values()
    return False


def _is_model_state(table: Mapping[Any, Any], roots: Collection[str]) -> bool:
    """Return whether a table holds tensors under the names of the model."""
    return any(
        isinstance(name, str) and name.partition(".")[0] in roots and isinstance(value, torch.Tensor)
        for name, value in table.items()
    )


def _way_to_weights(
    table: Mapping[Any, Any], path: Path, notes: list[str], roots: Collection[str]
) -> list[Mapping[Any, Any]]:
    """Return the nested tables down to the one that holds the weights, found in the documented order."""
    way = [table]
    for _ in range(_DEEPEST):
        candidates = [] if _is_model_state(table, roots) else _candidates(table, path)
        if not candidates:
            break
        other = f"; it also holds {bounded(candidates[1:], 5)}" if len(candidates) > 1 else ""
        notes.append(f"weights read from the entry '{candidates[0]}'{other}")
        table = table[candidates[0]]
        way.append(table)
    return way


def _candidates(table: Mapping[Any, Any], path: Path) -> list[str]:
    """List the entries that may hold the weights, the chosen one first; none if the table itself holds them."""
    inner = [name for name, value in table.items() if isinstance(name, str) and isinstance(value, Mapping)]
    usual = [name for name in ENTRIES if name in inner]
    full = [name for name in usual if _holds_weights(table[name])]
    if full:
        return full
    others = [name for name in inner if not name.lower().startswith(_NOT_WEIGHTS)]
    others = [name for name in others if _holds_weights(table[name])]
    if len(others) > 1:
        raise UsageError(
            f"{path} holds several sets of weights: {bounded(others, 5)}.",
            why="None of them has a usual name.",
            fix="Save the one to read in a file of its own.",
        )
    # LocalAttention without rotary has no parameters: an empty table is its whole state.
    return others or [name for name in usual if not table[name]]


def _without_infixes(state: dict[str, torch.Tensor], path: Path, notes: list[str]) -> dict[str, torch.Tensor]:
    for infix in _INFIXES:
        touched = [name for name in state if infix in name]
        if not touched:
            continue
        renamed = {name.replace(infix, ""): tensor for name, tensor in state.items()}
        if len(renamed) < len(state):
            raise UsageError(
                f"{path} holds weights twice, with and without '{infix}' in their names.",
                why="Which of them the model used cannot be told.",
                fix="Save the model's own state_dict().",
            )
        notes.append(f"'{infix}' removed from {len(touched)} names")
        state = renamed
    return state


def _without_prefixes(
    state: dict[str, torch.Tensor], path: Path, notes: list[str], roots: Collection[str]
) -> dict[str, torch.Tensor]:
    """Strip wrappers' prefixes until the names are the model's own, or no known wrapper is left.

    Raises:
        UsageError: beside a part there are weights of others, of which the file would have nothing.
    """
    while state and not any(name.partition(".")[0] in roots for name in state):
        prefix = next((known for known in PREFIXES if any(name.startswith(known) for name in state)), None)
        if prefix is None:
            return state
        inner = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        dropped = [name for name in state if not name.startswith(prefix)]
        others = [name for name in dropped if state[name].ndim]
        if prefix in _PARTS and others:
            raise UsageError(
                f"{path} holds '{prefix[:-1]}' beside other modules: {bounded(others, 5)}.",
                why=f"A file of {prefix}* alone would compute a part of the model, and leave the rest out.",
                fix=f"Export the whole module: {argument('factory')}, with these weights. If the part alone is wanted, "
                f"save a state_dict() of it.",
            )
        left_out = f"; left out: {bounded(dropped, 5)}" if dropped else ""
        notes.append(f"prefix '{prefix}' removed from {len(inner)} names{left_out}")
        state = inner
    return state
