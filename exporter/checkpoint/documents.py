"""Read a JSON, TOML or YAML text strictly: refuse texts that a person and the library would read differently.

If a key is given twice, a library takes the last value, but the author may have meant the first. In YAML 1.1 `010` is
8 and `1:30` is 90.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...core.error_texts import shown
from ...core.errors import MissingDependency, UsageError
from ...core.storage.nesting import check_nesting

_OCTAL = re.compile(r"[-+]?0[0-7_]*[0-7]")


def read_document(text: str, path: Path) -> object:
    """Return the document in a text, in the format of its file's suffix.

    Raises:
        UsageError: it is not valid, holds a key twice, or a number that is easily misread.
        MissingDependency: YAML, or TOML on Python 3.10, without its reader installed.
    """
    kind, reader = _READERS[path.suffix.lower()]
    try:
        check_nesting(text)
        return reader(text)
    except (ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{path} is not valid {kind}.", why=reason) from error


def read_json(text: str) -> Any:
    """Return the document in a JSON text.

    Raises:
        ValueError: it is not valid, or holds a key twice.
    """
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"{shown(key)} is given twice. Keep one of the two.")
        table[key] = value
    return table


def _read_toml(text: str) -> object:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    try:
        import tomli
    except ImportError as error:
        raise MissingDependency(
            "Reading TOML needs the package tomli in this Python.", fix="pip install tomli"
        ) from error
    return tomli.loads(text)


def _read_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency(
            "Reading YAML needs the package pyyaml.", fix="pip install pyyaml, or write the configuration as JSON."
        ) from error

    class Loader(yaml.SafeLoader):
        """A YAML loader of plain types without merge keys, a few of which can expand to any number of entries."""

        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise ValueError("Merge keys (<<) are not supported. Write the entries out.")
            super().flatten_mapping(node)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if not isinstance(key, yaml.ScalarNode):
                    continue  # a list or a table is not a valid key: PyYAML refuses it
                if (key.tag, key.value) in seen:
                    raise ValueError(f"{shown(key.value)} is given twice (line {_line(key)}). Keep one of the two.")
                seen.add((key.tag, key.value))
            return dict(super().construct_mapping(node, deep=deep))

        def construct_yaml_int(self, node: Any) -> int:
            number = int(super().construct_yaml_int(node))
            _check_plain_number(node)
            return number

        def construct_yaml_float(self, node: Any) -> float:
            number = float(super().construct_yaml_float(node))
            _check_plain_number(node)
            return number

    # The constructors are looked up in a table of functions, not by their names.
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _check_plain_number(node: Any) -> None:
    """Refuse an octal or sexagesimal number of YAML 1.1.

    Raises:
        ValueError: the number is octal or sexagesimal.
    """
    kind = "an octal" if _OCTAL.fullmatch(node.value) else "a sexagesimal (base 60)" if ":" in node.value else ""
    if kind:
        found = f"{shown(node.value)} (line {_line(node)}) is {kind} number in YAML."
        raise ValueError(f"{found} Write it in decimal, or in quotes.")


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


_READERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    ".json": ("JSON", read_json),
    ".toml": ("TOML", _read_toml),
    **dict.fromkeys((".yaml", ".yml"), ("YAML", _read_yaml)),
}
