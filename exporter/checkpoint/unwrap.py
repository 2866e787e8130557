"""Find the plain state dict inside what a training script saved.

There are two steps, and each adds a note. The first finds the entry that holds the weights, since a training
checkpoint is a table of tables. If several entries are possible, the first of `ENTRIES` is taken, so the trained model
comes before its moving average (EMA); every other set is named, and can be asked for (`weight_sets`). The second
removes the prefixes that wrappers (DataParallel, torch.compile, FSDP, Lightning, ema_pytorch) put in front of names.
An ema_pytorch state holds the average as `ema_model.` and the trained model as `online_model.`: such a state is saved
for the average, so the average is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...core.error_texts import argument
from ...core.errors import UsageError
from ..models.adapter_names import refuse_adapters
from ..models.inference import bounded
from .settings import settings_tables
from .tensors import shape_of
from .weight_sets import (
    INFIXES,
    NOT_WEIGHTS,
    WeightSet,
    as_table,
    at_entry,
    is_optimizer,
    other_sets,
    tensors_of,
)

# Entries that hold weights; the first one present is used.
ENTRIES = (
    *("model_state_dict", "state_dict", "model", "module", "network", "net", "generator", "weights", "params"),
    *("ema_model_state_dict", "ema_state_dict", "state_dict_ema", "ema_model", "model_ema", "ema"),
)
# Name prefixes of modules that wrap the model; the first one present is removed.
PREFIXES = ("ema_model.", "online_model.", "module.", "model.", "network.", "net.", "transformer.", "attn.")
# Those of them that name parts of a model, next to which may be other parts; wrappers only have a few numbers.
_PARTS = ("transformer.", "attn.")
# The first part of every name in a supported class's state dict.
_ROOTS = frozenset(
    {
        *("token_emb", "pos_emb", "layers", "global_layers", "dynamic_pos_bias", "to_logits"),
        *("norm", "to_qkv", "q_scale", "k_scale", "attn_fn", "rel_pos", "to_v_gate", "to_out"),
        *("query", "key", "value", "output", "pos_bias", "local_mask"),
    }
)
_DEEPEST = 8


@dataclass(frozen=True)
class Unwrapped:
    """The weights inside a file's contents.

    Args:
        state: the tensors, under the model's own names.
        settings: the entries next to them that hold training settings.
        others: every other set of weights that the file holds.
        entry: the entry that was read; "" for the file itself.
    """

    state: dict[str, torch.Tensor]
    settings: dict[str, Any]
    others: list[WeightSet] = field(default_factory=list)
    entry: str = ""


def unwrap(
    loaded: object, path: Path, notes: list[str], roots: Collection[str] | None = None, entry: str | None = None
) -> Unwrapped:
    """Find the state dict inside a file's contents, and the entries next to it that hold training settings.

    Args:
        loaded: what the file holds.
        path: path of the file, for messages.
        notes: gets a line for every choice.
        roots: first parts of the model's own names; by default those of the supported classes.
        entry: the set of weights to read, as `weight_sets` names them; None chooses.

    Raises:
        UsageError: there are no tensors, there is no such entry, or several entries are possible.
    """
    roots = _ROOTS if roots is None else roots
    table = as_table(loaded)
    if table is None or (isinstance(loaded, list | tuple) and not any(map(as_table, loaded))):
        raise UsageError(
            f"{path} contains {_described(loaded)}, not a state dict.",
            why="A state dict maps names to tensors.",
            fix="Save model.state_dict().",
        )
    if entry is not None:
        return _asked(loaded, path, notes, roots, entry)
    found = _unwrapped(table, [], path, notes, roots)
    others = [] if found.state == {} else other_sets(loaded, found.state)
    return Unwrapped(found.state, found.settings, others, found.entry)


def _asked(loaded: object, path: Path, notes: list[str], roots: Collection[str], entry: str) -> Unwrapped:
    """Return the set of weights at an entry."""
    base = None
    with suppress(UsageError):  # if the default cannot be chosen, the entry is found only by its path
        base = _unwrapped(as_table(loaded) or {}, [], path, [], roots)
    others = other_sets(loaded, base.state) if base is not None and base.state else []
    wanted = next((known for known in others if known.entry == entry and known.same_model), None)
    if base is not None and wanted is not None:
        notes.append(f"weights read from the entry '{entry}'")
        state = {name: wanted.state.get(name, tensor) for name, tensor in base.state.items()}
        kept = [name for name in state if name not in wanted.state]
        if kept:
            notes.append(
                f"'{entry}' lacks some tensors; those of '{base.entry or 'the model'}' are used: {bounded(kept, 5)}"
            )
        found = Unwrapped(state, base.settings, entry=entry)
    else:
        way, value = at_entry(loaded, entry)
        table = as_table(value)
        if table is None or not any(isinstance(name, str) for name in table):
            raise UsageError(f"The entry '{entry}' of {path} contains {_described(value)}, not a state dict.")
        notes.append(f"weights read from the entry '{entry}'")
        found = _unwrapped(table, way, path, notes, roots, entry)
    return Unwrapped(found.state, found.settings, other_sets(loaded, found.state) if found.state else [], found.entry)


def _described(value: object) -> str:
    """Describe a value that is not a state dict."""
    if isinstance(value, torch.Tensor):
        return "one tensor"
    if isinstance(value, list | tuple):
        tensors = sum(isinstance(inner, torch.Tensor) for inner in value)
        return f"a list of {tensors} tensors without names" if tensors else f"a list of {len(value)}"
    return f"one {type(value).__name__}"


def _unwrapped(
    table: Mapping[Any, Any],
    way: Sequence[Mapping[Any, Any]],
    path: Path,
    notes: list[str],
    roots: Collection[str],
    entry: str = "",
) -> Unwrapped:
    """Find the state dict in nested tables, and remove the prefixes of its names."""
    if is_optimizer(table):
        raise UsageError(
            f"{path} is the state of an optimizer, not the weights of a model.",
            why="It has 'state' and 'param_groups', but no tensors of a model.",
            fix="Give the file of the model's weights, written by torch.save(model.state_dict(), 'weights.pt')",
        )
    tables, names = _way_to_weights(table, path, notes, roots)
    chosen, settings = tables[-1], settings_tables([*way, *tables])
    state = tensors_of(chosen)
    others = [str(name) for name in chosen if name not in state and name not in settings]
    if others:
        notes.append(f"ignored because they are not tensors: {bounded(others, 5)}")
    if chosen and not state:
        raise UsageError(
            f"{path} contains no tensors.",
            why=f"It contains {bounded([str(name) for name in chosen], 5)}.",
            fix="Save model.state_dict().",
        )
    entry = ".".join(filter(None, [entry, *names]))
    plain = _without_prefixes(_without_infixes(state, path, notes), path, notes, roots, entry)
    return Unwrapped(plain, settings, entry=entry)


def _holds_weights(value: object) -> bool:
    """Return whether a table has named tensors in it, directly or in a table inside."""
    seen: set[int] = set()  # a pickled table can contain itself
    waiting = [value]
    while waiting:
        table = waiting.pop()
        if isinstance(table, list | tuple):
            waiting += [inner for inner in table if isinstance(inner, Mapping)]
        elif isinstance(table, Mapping) and id(table) not in seen and not is_optimizer(table):
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
) -> tuple[list[Mapping[Any, Any]], list[str]]:
    """Return the nested tables down to the one that holds the weights, in the documented order, and their names."""
    way, names = [table], []
    for _ in range(_DEEPEST):
        candidates = [] if _is_model_state(table, roots) else _candidates(table, path)
        if not candidates:
            break
        other = f"; the file also contains {bounded(candidates[1:], 5)}" if len(candidates) > 1 else ""
        notes.append(f"weights read from the entry '{candidates[0]}'{other}")
        table = as_table(table[candidates[0]]) or {}
        way.append(table)
        names.append(candidates[0])
    return way, names


def _candidates(table: Mapping[Any, Any], path: Path) -> list[str]:
    """List the entries that may hold the weights, the chosen one first; none if the table itself holds them."""
    inner = [name for name, value in table.items() if isinstance(name, str) and as_table(value) is not None]
    usual = [name for name in ENTRIES if name in inner]
    full = [name for name in usual if _holds_weights(table[name])]
    if full:
        return full
    others = [name for name in inner if not name.lower().startswith(NOT_WEIGHTS)]
    others = [name for name in others if _holds_weights(table[name])]
    if len(others) > 1:
        raise UsageError(
            f"{path} contains several sets of weights: {bounded(others, 5)}.",
            why="None of the sets has a usual name.",
            fix=f"Choose one: {argument('entry', others[0])}.",
        )
    # LocalAttention without rotary has no parameters: an empty table is its whole state.
    return others or [name for name in usual if not table[name]]


def _without_infixes(state: dict[str, torch.Tensor], path: Path, notes: list[str]) -> dict[str, torch.Tensor]:
    for infix in INFIXES:
        touched = [name for name in state if infix in name]
        if not touched:
            continue
        renamed = {name.replace(infix, ""): tensor for name, tensor in state.items()}
        if len(renamed) < len(state):
            raise UsageError(
                f"{path} contains the weights twice, with and without '{infix}' in their names.",
                why="The command cannot tell which ones the model used.",
                fix="Save the model's own state_dict().",
            )
        notes.append(f"'{infix}' removed from {len(touched)} names")
        state = renamed
    return state


def _without_prefixes(
    state: dict[str, torch.Tensor], path: Path, notes: list[str], roots: Collection[str], entry: str
) -> dict[str, torch.Tensor]:
    """Strip wrappers' prefixes until the names are the model's own, or no known wrapper is left.

    Raises:
        UsageError: there are weights of other parts, which the file would lack.
    """
    removed = ""
    while state and not any(name.partition(".")[0] in roots for name in state):
        prefix = next((known for known in PREFIXES if any(name.startswith(known) for name in state)), None)
        if prefix is None:
            _refuse_unknown_prefixes(state, path, roots, ".".join(filter(None, [entry, removed.rstrip(".")])))
            return state
        inner = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        dropped = [name for name in state if not name.startswith(prefix)]
        others = [name for name in dropped if state[name].ndim]
        if prefix in _PARTS and others:
            raise UsageError(
                f"{path} contains '{prefix[:-1]}' and other modules: {bounded(others, 5)}.",
                why=f"A file of {prefix}* alone would compute only a part of the model.",
                fix=f"Export the whole module: {argument('factory')}, with these weights. For the part alone, "
                f"save a state_dict() of it.",
            )
        also_dropped = f"; dropped: {bounded(dropped, 5)}" if dropped else ""
        notes.append(f"prefix '{prefix}' removed from {len(inner)} names{also_dropped}")
        state, removed = inner, removed + prefix
    return _without_copies(state, notes, roots)


def _refuse_unknown_prefixes(state: Mapping[str, torch.Tensor], path: Path, roots: Collection[str], entry: str) -> None:
    """Refuse equal names with several prefixes that no known wrapper has.

    Args:
        state: the tensors.
        path: the file.
        roots: first parts of the model's own names.
        entry: the tables and prefixes around these names.

    Raises:
        UsageError: they do: these are several sets of weights; or an adapter has given the names their prefix.
    """
    refuse_adapters(state)
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in state.items():
        parts = name.split(".")
        at = next((at for at in range(1, len(parts)) if parts[at] in roots), None)
        if at is not None:
            groups.setdefault(".".join(parts[:at]), {})[".".join(parts[at:])] = shape_of(tensor)
    prefixes = [one for one in groups if any(groups[one] == groups[other] for other in groups if other != one)]
    if prefixes:
        raise UsageError(
            f"{path} contains several sets of weights: {bounded(prefixes, 5)}.",
            why="The same names occur with several prefixes, none of which is usual.",
            fix=f"Choose one: {argument('entry', '.'.join(filter(None, [entry, prefixes[0]])))}.",
        )


def _without_copies(
    state: dict[str, torch.Tensor], notes: list[str], roots: Collection[str]
) -> dict[str, torch.Tensor]:
    """Drop another set of the model's weights with a prefix in the same table, and its numbers."""
    foreign = {name: tensor for name, tensor in state.items() if name.partition(".")[0] not in roots}
    copies = [name for name, tensor in foreign.items() if _is_copy(name, tensor, state)]
    if not copies or len(foreign) == len(state):
        return state
    dropped = [name for name, tensor in foreign.items() if name in copies or not tensor.ndim]
    notes.append(f"dropped: {bounded(dropped, 5)}")
    return {name: tensor for name, tensor in state.items() if name not in set(dropped)}


def _is_copy(name: str, tensor: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a name is a prefix and one of the other names, with a tensor of the same shape."""
    rests = [name[place + 1 :] for place, letter in enumerate(name) if letter == "."]
    return any(rest in state and shape_of(state[rest]) == shape_of(tensor) for rest in rests)
