"""Find every set of weights in a checkpoint, to report all of them and to read the requested one.

A training checkpoint often holds a model more than once: as trained, averaged (EMA, SWA), the best so far, a teacher,
a copy in an optimizer. Each set has an entry: the names of the tables around it with dots between them, then, where one
table holds several sets, the prefix of its names. `--entry` takes any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.error_texts import argument, close_match, shown
from ...core.errors import UsageError
from .tensors import shape_of

# Inserted anywhere in a name by a wrapper around a part of the model.
INFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# First letters of entries that hold tensors, but no weights.
NOT_WEIGHTS = ("optim", "sched", "scaler", "rng", "grad", "loss", "callbacks", "loops")
# Limits on nesting and on the number of values: a pickled table can contain itself.
_DEEPEST = 12
_MOST_VALUES = 1_000_000
# The cosine above which tensors of an optimizer are a copy of the weights. Moments of gradients are near 0.
_COPY = 0.5
_SCALE = 4.0  # how much larger or smaller a copy may be
# What optimizers keep of gradients, whatever its numbers.
_MOMENTS = ("exp_avg", "exp_inf", "momentum", "square_avg", "grad_avg", "acc_delta", "max_exp", "prev", "eta", "mu")
_CUT = 1 << 22  # compared numbers per tensor
# How names of buffers end, which a list of parameters does not have.
_BUFFERS = ("inv_freq", ".scale", "num_batches_tracked", "running_mean", "running_var")
_NAMED = 8  # sets named in one line


@dataclass(frozen=True)
class WeightSet:
    """A set of weights in a checkpoint, other than the one that is read.

    Args:
        entry: what `--entry` takes.
        state: its tensors, under the names of the set that is read where it is of the same model.
        same_model: whether it has the names and shapes of the set that is read.
        equal: whether it has the same numbers too.
    """

    entry: str
    state: Mapping[str, torch.Tensor]
    same_model: bool
    equal: bool = False


def without_infixes(name: str) -> str:
    """Return a tensor's name without the parts that wrappers inserted."""
    for infix in INFIXES:
        name = name.replace(infix, "")
    return name


def told(others: Sequence[WeightSet], path: Path, entry: str, *, asked: bool) -> tuple[list[str], list[str]]:
    """Report the sets that are not read: as notes, or as warnings if the user did not choose a set.

    Args:
        others: those sets.
        path: the file.
        entry: the entry that is read.
        asked: whether the user chose it.
    """
    notes: list[str] = []
    warnings: list[str] = []
    rivals = [other for other in others if other.same_model and not other.equal]
    if rivals:
        read = f"the weights of '{entry}' are read" if entry else "the weights without a prefix are read"
        takes = ", ".join(argument("entry", other.entry) for other in rivals[:_NAMED])
        more = f" and {len(rivals) - _NAMED} more" if len(rivals) > _NAMED else ""
        line = f"{path} contains several sets of this model's weights; {read}. To read another set: {takes}{more}"
        (notes if asked else warnings).append(line)
    for what, found in (
        ("the same weights once more", [other for other in others if other.same_model and other.equal]),
        ("weights of another model", [other for other in others if not other.same_model]),
    ):
        if found:
            takes = ", ".join(argument("entry", other.entry) for other in found[:_NAMED])
            notes.append(
                f"the file also contains {what}: {takes}{f' and {len(found) - _NAMED} more' if found[_NAMED:] else ''}"
            )
    return notes, warnings


def as_table(value: object) -> Mapping[Any, Any] | None:
    """Return a table, or a list or tuple as a table of its numbered entries; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return {str(number): inner for number, inner in enumerate(value)}
    return None


def is_optimizer(table: Mapping[Any, Any]) -> bool:
    """Return whether a table is what an optimizer's `state_dict()` returns."""
    return "param_groups" in table and "state" in table


def tensors_of(table: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the named tensors of a table."""
    return {name: value for name, value in table.items() if isinstance(name, str) and isinstance(value, torch.Tensor)}


def other_sets(loaded: object, state: Mapping[str, torch.Tensor]) -> list[WeightSet]:
    """List a checkpoint's sets of weights other than the one that is read.

    Args:
        loaded: what the file holds.
        state: the set that is read, under the model's own names.
    """
    chosen = {id(tensor) for tensor in state.values()}
    names = {name: shape_of(tensor) for name, tensor in state.items()}
    found: dict[str, WeightSet] = {}
    for path, value in _walk(loaded):
        if any(part.lower().startswith("grad") for part in path):
            continue
        optimizer = any(part.lower().startswith("optim") for part in path)
        table = value if isinstance(value, Mapping) else None
        groups = _named(tensors_of(table), names, chosen) if table is not None else []
        groups += _ordered(value, names, chosen)
        if table is not None:
            groups += _transposed(table, names)
        for prefix, tensors in groups:
            pairs = [(state[name], tensor) for name, tensor in tensors.items()]
            in_optimizer = optimizer or (table is not None and bool(prefix) and prefix.startswith("*"))
            if not pairs or (in_optimizer and not _are_copies(pairs)):
                continue
            # The prefix is given if the table's name is not enough: the table has several sets, or is the file itself.
            alone = bool(path) and len(groups) == 1 and not prefix.startswith("*")
            entry = ".".join((*path, *filter(None, ["" if alone else prefix.lstrip("*").rstrip(".")])))
            equal = all(one is other or _same(one, other) for one, other in pairs)
            found.setdefault(entry, WeightSet(entry, tensors, True, equal))
        if table is not None and path and not groups and not any(part.lower().startswith(NOT_WEIGHTS) for part in path):
            rest = {name: tensor for name, tensor in tensors_of(table).items() if id(tensor) not in chosen}
            if len(rest) == len(tensors_of(table)) and any(x.ndim and x.is_floating_point() for x in rest.values()):
                found.setdefault(".".join(path), WeightSet(".".join(path), rest, False))
    found.pop("", None)
    return list(found.values())


def at_entry(loaded: object, entry: str) -> tuple[list[Mapping[Any, Any]], object]:
    """Return the tables on the path to an entry, and its value.

    Args:
        loaded: what the file holds.
        entry: names of tables with dots between them; the names themselves may contain dots. The rest may be a prefix
            of the names in the last table.

    Raises:
        UsageError: the entry does not exist.
    """
    way: list[Mapping[Any, Any]] = []
    value, left = loaded, entry
    while left:
        table = as_table(value)
        if table is None or len(way) > _DEEPEST:
            break
        way.append(table)
        fitting = [name for name in map(str, table) if left == name or left.startswith(f"{name}.")]
        if not fitting:
            inner = {str(name): x for name, x in table.items() if str(name).startswith(f"{left.rstrip('.')}.")}
            cut = len(left.rstrip(".")) + 1
            if inner:
                return way, {name[cut:]: x for name, x in inner.items()}
            break
        longest = max(fitting, key=len)
        value, left = next(x for name, x in table.items() if str(name) == longest), left[len(longest) + 1 :]
    if left:
        known = sorted({".".join(path) for path, x in _walk(loaded) if path and as_table(x) is not None})
        raise UsageError(
            f"The checkpoint has no entry {shown(entry)}.",
            fix=f"{argument('entry')} takes the name of a table, or a prefix of names in one. "
            + (
                close_match(entry, known[:200])
                if known
                else "This file contains only one set of weights: leave the option out."
            ),
        )
    return way, value


def _walk(loaded: object) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the tables and lists of a checkpoint with their paths, the outermost first."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), loaded)]
    seen, count = set(), 0
    while waiting and count < _MOST_VALUES:
        path, value = waiting.pop(0)
        table = as_table(value)
        if table is None or id(value) in seen or len(path) > _DEEPEST:
            continue
        seen.add(id(value))
        count += len(table)
        yield path, value
        waiting += [((*path, str(name)), inner) for name, inner in table.items() if as_table(inner)]


def _enough(found: Mapping[str, object], names: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether enough names were found for a set of the same model: half of those that are not numbers."""
    whole = [name for name, shape in names.items() if shape]
    return bool(whole) and 2 * sum(name in found for name in whole) >= len(whole)


def _named(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, tuple[int, ...]], chosen: set[int]
) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Group a table's tensors by the prefix before the model's own names; names without their dots count too."""
    dotless = {name.replace(".", ""): name for name in names}
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for given, tensor in tensors.items():
        name, shape = without_infixes(given), shape_of(tensor)
        starts = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]
        own = next((at for at in starts if names.get(name[at:]) == shape), None)
        if own is not None:
            groups.setdefault(name[:own], {})[name[own:]] = tensor
            continue
        # LitEma keeps averages as buffers, whose names cannot have dots, nor have the prefixes of wrappers in them.
        last = starts[-1]
        own = next((at for at in range(last, len(name)) if names.get(dotless.get(name[at:], "")) == shape), None)
        if own is not None:
            groups.setdefault(name[:own], {})[dotless[name[own:]]] = tensor
    return [
        (prefix, found)
        for prefix, found in groups.items()
        if _enough(found, names) and not all(id(tensor) in chosen for tensor in found.values())
    ]


def _ordered(
    value: object, names: Mapping[str, tuple[int, ...]], chosen: set[int]
) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Match tensors in a list, or in a table by number, with the parameters of the model in their order."""
    if isinstance(value, Mapping) and value and all(type(key) is int for key in value):
        value = [value[key] for key in sorted(value)]
    if not isinstance(value, list | tuple):
        return []
    flat = [x for inner in value for x in (inner if isinstance(inner, list | tuple) else [inner])]
    if not flat or not all(isinstance(x, torch.Tensor) for x in flat) or id(flat[0]) in chosen:
        return []
    found = _in_order(flat, names)
    return [("", found)] if found else []


def _in_order(tensors: Sequence[torch.Tensor], names: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Give tensors the names of the model's in order, if only one assignment fits; skip buffers."""
    shapes = [shape_of(tensor) for tensor in tensors]
    for kept in (list(names), [name for name in names if not name.endswith(_BUFFERS)]):
        if [names[name] for name in kept] == shapes:
            return dict(zip(kept, tensors, strict=True))
    listed = list(names)
    # ways[i]: how often the first i shapes fit into the names so far, in order; 2 stands for several.
    ways, last = [1] + [0] * len(shapes), {}
    for name in listed:
        for place in range(len(shapes) - 1, -1, -1):
            if ways[place] and shapes[place] == names[name]:
                ways[place + 1] = min(2, ways[place + 1] + ways[place])
    if ways[-1] != 1 or not shapes:
        return {}
    place = 0
    for name in listed:
        if place < len(shapes) and names[name] == shapes[place]:
            last[name] = tensors[place]
            place += 1
    return last if _enough(last, names) else {}


def _transposed(
    table: Mapping[Any, Any], names: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Collect an optimizer's values for each parameter, `{0: {"exp_avg": …}, 1: …}`, as one set for each key.

    The prefix that is returned begins with a star.
    """
    if len(table) < 2 or not all(isinstance(inner, Mapping) for inner in table.values()):
        return []
    numbered = all(isinstance(name, int) for name in table)
    keys = {key for inner in table.values() for key in inner if isinstance(key, str)} if len(table) < 100_000 else set()
    found = []
    for key in sorted(key for key in keys if not key.startswith(_MOMENTS))[:50]:
        kept = {name: inner[key] for name, inner in table.items() if isinstance(inner.get(key), torch.Tensor)}
        if numbered:
            tensors = _in_order([kept[name] for name in sorted(kept)], names)
        else:
            tensors = {
                own: tensor
                for name, tensor in kept.items()
                for own in [without_infixes(str(name))]
                if names.get(own) == shape_of(tensor)
            }
            tensors = tensors if _enough(tensors, names) else {}
        if tensors:
            found.append((f"*{key}", tensors))
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same numbers; False if they cannot be compared."""
    try:
        return one.dtype == other.dtype and torch.equal(one, other)
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def _are_copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return whether all tensors of an optimizer together are similar to the weights."""
    product = squares = others = 0.0
    for one, other in pairs:
        if one.is_floating_point() and other.is_floating_point() and one.shape == other.shape:
            x, y = (tensor.detach().flatten()[:_CUT].to(torch.float64) for tensor in (one, other))
            product, squares, others = product + float(x @ y), squares + float(x @ x), others + float(y @ y)
    alike = squares > 0 and others > 0 and product / (squares * others) ** 0.5 > _COPY
    return alike and 1 / _SCALE < (others / squares) ** 0.5 < _SCALE
