"""Read a model's arguments from the settings that a training script or trainer saved in the checkpoint.

Lightning saves `hyper_parameters`, plain scripts `args`, `config`, `model_args` and the like: tables, or an
`argparse.Namespace`. A value counts as an argument of the model where its name is the argument's, with a prefix such
as `attn_` or without, and every table around it is about the model (`hyper_parameters.model.window_size`). A value
that may belong to something else (`data.window_size`), or that is given twice and differs, is shown and not used.
"""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import TypeAdapter, ValidationError

from ...core.error_texts import shown
from ...core.errors import UsageError
from .hidden_arguments import MEANINGS, NO_EFFECT

if TYPE_CHECKING:
    from ..models.registry import ClassEntry

# Entries of a checkpoint that contain settings.
ENTRIES = (
    *("hyper_parameters", "hyperparameters", "hparams", "args", "config", "cfg"),
    *("model_args", "model_config", "model_kwargs"),
)
# Tables in these entries with settings of the model.
_ABOUT_THE_MODEL = frozenset(
    {
        *ENTRIES,
        *("model", "net", "network", "module", "backbone", "transformer", "local_transformer", "local_mha"),
        *("attn", "attention", "local_attn", "local_attention", "arch", "architecture", "model_params", "params"),
        *("kwargs", "init_args", "init_kwargs"),
    }
)
_PREFIXES = re.compile(r"(?:model|net|network|transformer|local|attn|attention)_")
# Keys that name a class in a table: in this package's configurations, LightningCLI and Hydra.
_CLASS_NAMES = ("class", "class_path", "_target_")
_RELEASE = "hyper_connections"
# Limits on nesting and on the number of values, because a pickled table can contain itself.
_DEEPEST = 16
_MOST_VALUES = 10_000
_MOST_NOTES = 8


@dataclass(frozen=True)
class Setting:
    """One value of a checkpoint's settings.

    Args:
        name: name of the class's argument.
        value: its value.
        source: where it was found, such as "hyper_parameters.model.window_size".
        exact: whether it was found under the argument's own name, without a prefix.
        why_unused: why it is not used; "" if it is used.
    """

    name: str
    value: Any
    source: str
    exact: bool = True
    why_unused: str = ""

    @property
    def entry(self) -> str:
        """The entry of the checkpoint that holds it."""
        return self.source.partition(".")[0]


@dataclass(frozen=True)
class Settings:
    """The settings that are arguments of a class.

    Args:
        used: by argument name, the settings that give its value; the first one counts.
        unused: settings that may belong to something else, have two values, or have a value the argument cannot take.
    """

    used: dict[str, list[Setting]] = field(default_factory=dict)
    unused: list[Setting] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        """The values that are used, by argument name."""
        return {name: settings[0].value for name, settings in self.used.items()}

    def notes(self, inferred: Collection[str]) -> list[str]:
        """Write notes for the user: the sources of arguments, and unused settings.

        Args:
            inferred: names of arguments that the weights show; they need no note.
        """
        by_source: dict[str, list[str]] = {}
        for name, (setting, *_) in self.used.items():
            if name not in inferred:
                source = setting.source.rpartition(".")[0] if setting.exact else setting.source
                by_source.setdefault(source, []).append(f"{name} {shown(setting.value)}")
        used = [f"{', '.join(values)}, from the checkpoint's {source}" for source, values in by_source.items()]
        unused = [
            f"{x.source} {shown(x.value)} of the checkpoint is not used for {x.name}: {x.why_unused}"
            for x in self.unused
            if x.name in MEANINGS and x.name not in inferred
        ]
        return [*used, *unused[:_MOST_NOTES]]

    def without(self, name: str, why: str) -> Settings:
        """Return these settings with those of one argument marked as not used."""
        dropped = [replace(setting, why_unused=why) for setting in self.used.get(name, [])]
        used = {known: settings for known, settings in self.used.items() if known != name}
        return Settings(used, [*self.unused, *dropped])


def settings_tables(tables: Sequence[Mapping[Any, Any]]) -> dict[str, Any]:
    """Return the entries with settings of the tables around a checkpoint's weights, the outermost table first."""
    found: dict[str, Any] = {}
    for table in tables:
        for name in ENTRIES:
            if name not in found and _table(table.get(name)) is not None:
                found[name] = table[name]
    return found


def stated_classes(tables: Mapping[str, Any]) -> list[Setting]:
    """Return the settings that may name the model's class."""
    return [
        Setting("class", value, ".".join((*path, leaf)))
        for path, leaf, value in _leaves(tables)
        if leaf in _CLASS_NAMES and isinstance(value, str) and _foreign_part(path) is None
    ]


def read_settings(tables: Mapping[str, Any], entry: ClassEntry) -> Settings:
    """Find a class's arguments in the settings of a checkpoint.

    Raises:
        UsageError: two entries of the checkpoint contradict each other.
    """
    found: dict[str, list[Setting]] = {}
    unused: list[Setting] = []
    for path, leaf, value in _leaves(tables):
        named = _argument(leaf, entry)
        if named is None or value is None:
            continue
        name, exact = named
        setting = Setting(name, value, ".".join((*path, leaf)), exact, _why_unused(entry, name, value, path))
        if setting.why_unused:
            unused.append(setting)
        else:
            found.setdefault(name, []).append(setting)
    used: dict[str, list[Setting]] = {}
    for name, settings in found.items():
        chosen, left = _chosen(name, settings)
        unused += left
        if chosen:
            used[name] = chosen
    return Settings(used, unused)


def differing(tables: Mapping[str, Any], given: Mapping[str, Any]) -> list[Setting]:
    """Return the settings that differ from the arguments of a call, at most one for each argument.

    Names count as equal with a prefix such as `attn_` and without. An argument whose value is among its settings does
    not differ.

    Args:
        tables: the checkpoint's settings, as `settings_tables` returns them.
        given: the arguments, defaults included.
    """
    plain = {_without_prefix(name): name for name in given}
    found: dict[str, list[Setting]] = {}
    for path, leaf, value in _leaves(tables):
        name = leaf.replace("-", "_")
        argument = name if name in given else plain.get(_without_prefix(name))
        if argument is None or value is None or _foreign_part(path) is not None:
            continue
        found.setdefault(argument, []).append(Setting(argument, value, ".".join((*path, leaf)), name == argument))
    return [
        next((x for x in settings if x.exact), settings[0])
        for name, settings in found.items()
        if not any(same_value(x.value, given[name]) for x in settings)
    ]


def _without_prefix(name: str) -> str:
    while match := _PREFIXES.match(name):
        name = name[match.end() :]
    return name


def _chosen(name: str, settings: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Split an argument's settings into those that are used, which all have one value, and the others.

    Raises:
        UsageError: two entries of the checkpoint contradict each other.
    """
    chosen = [setting for setting in settings if setting.exact] or list(settings)
    entries = {setting.entry for setting in chosen}
    unused = []
    for other in settings:
        if other in chosen or same_value(other.value, chosen[0].value):
            continue
        if name in MEANINGS and other.entry not in entries:
            raise contradiction(name, _said([*chosen, other]))
        unused.append(replace(other, why_unused=f"{chosen[0].source} says {shown(chosen[0].value)}"))
    if _agree(chosen):
        return chosen, unused
    if len(entries) > 1 and all(_agree([x for x in chosen if x.entry == entry]) for entry in entries):
        raise contradiction(name, _said(chosen))
    return [], [*unused, *(replace(setting, why_unused="it is given with two values") for setting in chosen)]


def _said(settings: Sequence[Setting]) -> list[tuple[Any, str]]:
    return [(setting.value, f"the checkpoint's {setting.source}") for setting in settings]


def reconciled(own: Settings, given: Mapping[str, Any], inferred: Mapping[str, Any], source: str) -> Settings:
    """Return the checkpoint's settings without those that the weights contradict.

    Only a setting whose name has a prefix is dropped so; one with the argument's own name must agree.

    Args:
        own: the checkpoint's settings.
        given: arguments of the config; None counts as not given.
        inferred: arguments inferred from the weights.
        source: where the given arguments come from.

    Raises:
        UsageError: settings, given arguments and weights contradict each other.
    """
    for name, settings in list(own.used.items()):
        said = _said(settings)
        if given.get(name) is not None:
            said.insert(0, (given[name], source))
        fits = name not in inferred or same_value(inferred[name], settings[0].value)
        weights = shown(inferred[name]) if name in inferred else ""
        if not fits and not settings[0].exact:
            own = own.without(name, f"the weights show {weights}")
        elif not fits or not all(same_value(value, said[0][0]) for value, _ in said):
            raise contradiction(name, said, weights)
    return own


def contradiction(name: str, said: Sequence[tuple[Any, str]], weights: str = "") -> UsageError:
    """Make the error for an argument that is given with several values, each with its source."""
    each = [*dict.fromkeys(f"{shown(value)} in {source}" for value, source in said)]
    each += [f"{weights} from the weights"] if weights else []
    return UsageError(
        f"{name} is {', '.join(each[:-1])} and {each[-1]}.",
        why="The command cannot tell which value the model was trained with.",
        fix=f"Correct the configuration; if the checkpoint's own {name} is wrong, save model.state_dict() alone.",
    )


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values of an argument are equal; lists count as tuples."""
    one, other = (tuple(value) if isinstance(value, list) else value for value in (one, other))
    return bool(one == other)


def _agree(settings: Sequence[Setting]) -> bool:
    return all(same_value(setting.value, settings[0].value) for setting in settings)


def _table(value: object) -> Mapping[Any, Any] | None:
    """Return a table of settings (a mapping, or an argument parser's result) as a mapping; None for other values."""
    if isinstance(value, argparse.Namespace):
        return vars(value)
    return value if isinstance(value, Mapping) else None


def _leaves(tables: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """List each value with its path of table names and its own name; names with dots or slashes are paths."""
    waiting: deque[tuple[tuple[str, ...], Any]] = deque(((name,), table) for name, table in tables.items())
    seen, count = set(), 0
    while waiting and count < _MOST_VALUES:
        path, value = waiting.popleft()
        table = _table(value)
        if table is None:
            count += 1
            yield path[:-1], path[-1], value
        elif id(value) not in seen and len(path) < _DEEPEST:
            seen.add(id(value))
            named = ((name, inner) for name, inner in table.items() if isinstance(name, str) and len(name) <= 200)
            waiting += [((*path, *re.split(r"[./]", name)), inner) for name, inner in named]


def _argument(leaf: str, entry: ClassEntry) -> tuple[str, bool] | None:
    """Return the argument that a setting's name stands for, and whether the name has no prefix."""
    if leaf == _RELEASE:
        return leaf, True
    name = leaf.replace("-", "_")
    fields = set(entry.args.model_fields) - NO_EFFECT - set(entry.unsupported)
    if not entry.family.sizes_are_arguments:
        fields -= {"dim"}  # the width of a head in this class, but of the model in most settings
    if name in fields:
        return name, True
    while match := _PREFIXES.match(name):
        name = name[match.end() :]
        if name in fields:
            return name, False
    return (entry.family.window_argument, False) if name == "window_size" else None


def _foreign_part(path: Sequence[str]) -> str | None:
    """Return the first table around a setting that may not describe the model, or None."""
    return next((part for part in path[1:] if part.lower() not in _ABOUT_THE_MODEL), None)


def _why_unused(entry: ClassEntry, name: str, value: object, path: Sequence[str]) -> str:
    foreign = _foreign_part(path)
    if foreign is not None:
        return f"{foreign} may describe something else"
    if name == _RELEASE:
        return "" if isinstance(value, str) else "it is not a release"
    about = entry.args.model_fields[name]
    annotated: Any = Annotated
    parts: tuple[Any, ...] = (about.annotation, *about.metadata)
    try:
        TypeAdapter(annotated[parts] if about.metadata else parts[0]).validate_python(value)
    except ValidationError as error:
        return str(error.errors()[0]["msg"])[:100].lower()
    return ""
