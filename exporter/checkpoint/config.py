"""Read the configuration of a checkpoint: its class, and the arguments that its weights do not show.

    {"class": "local_attention.LocalTransformer", "kwargs": {"local_attn_window_size": 128, ...},
     "hyper_connections": "0.4.11", "about": {...}}

`kwargs` are the constructor's own keyword arguments. Every entry may be left out; `about` is free and
ignored. JSON, TOML and YAML hold the same document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...core.error_texts import close_match, shown
from ...core.errors import UsageError
from ...core.storage.file_kinds import CONFIG_SUFFIXES
from ...core.storage.reading import read_plain
from ..models.registry import CLASSES, ClassEntry
from .documents import read_document
from .hidden_arguments import placeholders

_MOST_VALUES = 10_000
LARGEST_FILE = 256 << 10  # bytes
_TOP_LEVEL = ("about", "class", "hyper_connections", "kwargs")
# The first hyper-connections release whose depth connection adds to the mixed residual.
_FIRST_MIXING_RELEASE = (0, 3, 10)
# The release numbers, then any suffix (rc1, .post2, +local).
_VERSION = re.compile(r"v?([0-9]{1,6}(?:\.[0-9]{1,6}){0,5})(?:[-_.+]?[A-Za-z][0-9A-Za-z.+-]{0,40})?")


# Packages, by their names on PyPI.
_PACKAGES = {"local-attention": "local_attention", "zetascale": "zeta", "labml-nn": "labml_nn"}


@dataclass(frozen=True)
class RawConfig:
    """A configuration as written: with known names only, but unchecked values.

    Args:
        class_name: a key of `CLASSES`, or None if the config leaves it to the weights.
        kwargs: constructor arguments, all of them or some.
        hyper_connections: the release the model was trained with, or None.
        source: where it came from, for messages.
    """

    class_name: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    hyper_connections: str | None = None
    source: str = "the config"


def resolve_class(name: object) -> ClassEntry:
    """Return the entry of a class, by its name in `CLASSES`, its import path or its bare name.

    Raises:
        UsageError: the class is unknown.
    """
    if not isinstance(name, str):
        raise UsageError(f"The class is {shown(name)}.", fix=f"Give one of {', '.join(CLASSES)}.")
    first, *rest = name.strip().split(".")
    # In a full path such as local_attention.transformer.LocalMHA, modules in the middle do not matter.
    if rest:
        path = f"{_PACKAGES.get(first, first)}.{rest[-1]}"
    else:  # the first class with that name, whatever its package
        path = next((known for known in CLASSES if known.endswith(f".{first}")), f"local_attention.{first}")
    if path not in CLASSES:
        raise UsageError(
            f"Unknown class {shown(name)}.",
            why=f"Supported: {', '.join(CLASSES)}.",
            fix=close_match(path, CLASSES),
        )
    return CLASSES[path]


def check_names(entry: ClassEntry, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of arguments, and return those that have an effect.

    An unsupported argument that is null or false is dropped.

    Raises:
        UsageError: an unsupported argument, or a name the class does not have.
    """
    kept = {}
    for name, value in kwargs.items():
        if name in entry.unsupported:
            if value is None or value is False:
                continue
            raise UsageError(f"{name} cannot be set for {entry.name}.", why=entry.unsupported[name])
        if name not in entry.args.model_fields:
            raise UsageError(
                f"{entry.name} has no argument {shown(name)}.",
                fix=close_match(str(name), entry.args.model_fields),
            )
        kept[name] = value
    return kept


def parse_config(document: object, source: str = "the config") -> RawConfig:
    """Check the shape of a config and the names in it.

    Raises:
        UsageError: not a table, a placeholder, an unknown entry, class or argument, an invalid version.
    """
    if not isinstance(document, Mapping):
        raise UsageError(
            f"{source} contains {shown(document)}.",
            why="A configuration is one table of class, kwargs and hyper_connections.",
            fix='Example: {"class": "local_attention.LocalMHA", "kwargs": {"window_size": 128}}',
        )
    for name in document:
        if name not in _TOP_LEVEL:
            raise UsageError(
                f"{source} has an unknown entry {shown(name)}.",
                why="Arguments of the constructor belong under kwargs.",
                fix=close_match(str(name), _TOP_LEVEL),
            )
    left = placeholders(document)
    if left:
        raise UsageError(
            f"{source} is incomplete: {', '.join(left)}.",
            why=f"{next(iter(left))} is still {shown(next(iter(left.values())), 120)}.",
            fix="Fill in each entry, or remove it where its text allows that.",
        )
    kwargs = document.get("kwargs")
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, Mapping):
        raise UsageError(f"{source}: kwargs is {shown(kwargs)}.", why="It is a table of arguments.")
    if not _is_small(kwargs):
        raise UsageError(
            f"{source}: kwargs has more than {_MOST_VALUES} values.",
            why="A model's constructor needs only a few arguments.",
        )
    class_name = document.get("class")
    if class_name is not None:
        entry = resolve_class(class_name)
        class_name, kwargs = entry.name, check_names(entry, kwargs)
    version = document.get("hyper_connections")
    adds_residual_only(version)
    return RawConfig(class_name, MappingProxyType(dict(kwargs)), version, source)


def _is_small(document: object) -> bool:
    """Return whether a document has few values; in YAML a few aliases can expand to any number, or to themselves."""
    waiting, count = [document], 0
    while waiting and count <= _MOST_VALUES:
        value = waiting.pop()
        inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
        count += 1 + len(inner)
        waiting += inner
    return count <= _MOST_VALUES


def load_config(path: Path) -> RawConfig:
    """Read a config by its suffix.

    Raises:
        UsageError: no such file, another suffix, not valid JSON, TOML or YAML, or an invalid config.
        MissingDependency: YAML, or TOML on Python 3.10, without its reader installed.
    """
    suffix = path.suffix.lower()
    if suffix not in CONFIG_SUFFIXES:
        raise UsageError(f"{path} is not a configuration.", fix=f"Name it {', '.join(CONFIG_SUFFIXES)}.")
    try:
        content = read_plain(path, LARGEST_FILE)
        if len(content) > LARGEST_FILE:
            raise UsageError(
                f"{path} is larger than {LARGEST_FILE >> 10} KiB.",
                why="A configuration has only a few lines.",
                fix="Check the path.",
            )
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror or error}.", fix="Check the path.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", why="It is not a configuration.") from error
    return parse_config(read_document(text, path), str(path))


def adds_residual_only(version: object) -> bool:
    """Return whether a hyper-connections release adds the branch to the unmixed residual.

    `r'_s = β_s·y + r_s` before 0.3.10, `r'_s = β_s·y + m_{1+s}` since; None is today's behaviour.

    Raises:
        UsageError: `version` is not a version.
    """
    if version is None:
        return False
    match = _VERSION.fullmatch(version.strip()) if isinstance(version, str) else None
    if match is None:
        raise UsageError(
            f"hyper_connections is {shown(version)}.",
            why="The entry is the release that the model was trained with, as text.",
            fix='Example: "hyper_connections": "0.4.11"',
        )
    release = tuple(int(part) for part in match[1].split("."))
    return release < _FIRST_MIXING_RELEASE
