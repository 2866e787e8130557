"""Read the configuration in a Hugging Face folder."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.error_texts import argument, close_match, shown
from ....core.errors import MissingDependency, UsageError
from ....core.storage.reading import read_json
from ....core.storage.unchanged import Identity, identity

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CONFIG = "config.json"
# Files that say what a folder is, with config.json or without one.
_WITHOUT_CONFIG = ("adapter_config.json", "modules.json")
# A configuration may list the labels of a classifier.
_MOST_BYTES = 8 << 20
_MOST_LAYERS = 4096

_FIX = "Take the folder as model.save_pretrained(folder) writes it."
# Entries that scores or logits are divided by, and ends of the names of those that are added below a root.
_ABOVE_ZERO = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "query_pre_attn_scalar")
_NOT_BELOW_ZERO = ("_eps", "_epsilon")
# Entries that say how a model is run by PyTorch, not what it computes.
_RUNNING = (
    *("auto_map", "dtype", "torch_dtype", "return_dict", "output_attentions", "output_hidden_states"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
)


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder holds a Hugging Face configuration, or one that cannot be read, or only adapters.

    Raises:
        UsageError: the folder cannot be read.
    """
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UsageError(f"Cannot read {folder}.", why=f"{error.strerror or error}.", fix="Check the path.") from error
    if not names.isdisjoint(_WITHOUT_CONFIG):
        return True
    if CONFIG not in names:
        return any(folder.glob("*/adapter_config.json"))
    try:
        config = read_config(folder)
    except UsageError:
        return True  # reading it says why
    return not config.keys().isdisjoint(("architectures", "transformers_version"))


@lru_cache(maxsize=2)
def _parsed(path: Path, now: Identity) -> object:
    return read_json(path, _MOST_BYTES, _FIX)


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json`; a file that did not change is parsed once.

    Raises:
        UsageError: it cannot be read, or is no JSON object.
    """
    path = folder / CONFIG
    found: object = copy.deepcopy(_parsed(path, identity(path)))
    if not isinstance(found, dict):
        raise UsageError(f"{path} is {shown(found)}.", why="A configuration is a JSON object.", fix=_FIX)
    return found


def require_transformers() -> None:
    """Refuse to go on without transformers.

    Raises:
        MissingDependency: it is not installed, or is too old.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency(
            "A Hugging Face model needs transformers.", fix="pip install 'localattn[transformers]'"
        ) from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 23):
        raise MissingDependency(
            f"transformers {transformers.__version__} is too old.",
            why="Masks and attention are read through interfaces of 5.23 and later.",
            fix="pip install 'localattn[transformers]'",
        )


def made_config(config: Mapping[str, Any], where: str) -> PreTrainedConfig:
    """Make transformers' configuration from the values of `config.json`, without caches and tuples of outputs.

    Raises:
        UsageError: the type is unknown, or a value cannot be used; or the weights are quantised; or the folder brings
            code of its own.
    """
    from transformers import CONFIG_MAPPING, __version__

    kind = config.get("model_type")
    quantised = _anywhere(config, "quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else shown(quantised)
        raise UsageError(
            f"{where} is quantised with {shown(method)}.",
            why="Its weights are no plain numbers; no other code than PyTorch's reads them here.",
            fix=f"Export the original weights; {argument('weight_dtype', 'int8')} makes them small.",
        )
    if config.get("fusion_config"):
        raise UsageError(
            f"{where} asks for fused modules.",
            why="fusion_config in config.json replaces parts of transformers' own classes.",
            fix="Remove the entry: it says how PyTorch runs the model, not what it computes.",
        )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if config.get("auto_map"):
            raise UsageError(
                f"{where} brings code of its own.",
                why="Its configuration has an auto_map, and code of a folder is never run.",
                fix="If the code is yours, build the model in Python and export it with localattn.export_module.",
            )
        raise UsageError(
            f"{where} is of the type {shown(kind)}, which transformers {__version__} does not have.",
            why="model_type in config.json names the type.",
            fix=close_match(kind, list(CONFIG_MAPPING)) if isinstance(kind, str) else _FIX,
        )
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and not 0 < layers <= _MOST_LAYERS:
        raise UsageError(f"{where}: num_hidden_layers is {layers}.", why=f"It is from 1 to {_MOST_LAYERS}.")
    _check_rotary(config, where)
    _check_numbers(config, where)
    values = {name: value for name, value in config.items() if name not in _RUNNING}
    try:
        made: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # each type checks its values in its own way
        raise broken(where, error, config) from error
    return made


def _anywhere(config: Mapping[str, Any], name: str) -> Any:
    """Return an entry of a configuration or of one inside it; None where there is none."""
    inner = (_anywhere(value, name) for value in config.values() if isinstance(value, Mapping))
    return config[name] if config.get(name) is not None else next((x for x in inner if x is not None), None)


def _check_numbers(config: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that make the outputs NaN or that mean nothing, such as a limit of scores below 0.

    Raises:
        UsageError: there is one.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_numbers(value, where)
        elif isinstance(value, int | float):
            if name in _ABOVE_ZERO:
                fits, why = 0 < value < math.inf, "It is above 0, or null."
            elif name.endswith(_NOT_BELOW_ZERO):
                fits, why = 0 <= value < math.inf, "It is 0 or above."
            else:
                fits, why = not math.isnan(value), "It is a number."
            if not fits:
                raise UsageError(f"{where}: {name} is {value}.", why=why, fix=_FIX)


def _check_rotary(config: Mapping[str, Any], where: str) -> None:
    """Refuse rotary embeddings whose angles would be multiplied or divided by a number that is not above 0.

    Raises:
        UsageError: there is one.
    """
    tables = _rotary_tables(config)
    entries = [("rope_theta", table.get("rope_theta")) for table in (config, *tables)]
    entries += [("factor", table.get("factor")) for table in tables]
    for name, value in entries:
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise UsageError(f"{where}: {name} of the rotary embedding is {value}.", why="It is above 0.", fix=_FIX)


def rotation_grows(config: Mapping[str, Any]) -> bool:
    """Return whether a rotary embedding changes beyond the positions that the configuration states."""
    return any(grows(_type(table)) for table in _rotary_tables(config))


def rotation_changes(config: Mapping[str, Any]) -> list[int]:
    """List the lengths beyond which a rotary embedding takes other frequencies, those of `longrope`."""
    name = "original_max_position_embeddings"
    stated = [table.get(name, config.get(name)) for table in _rotary_tables(config) if _type(table) == "longrope"]
    return [length for length in stated if isinstance(length, int)]


def grows(kind: object) -> bool:
    """Return whether a type of rotary embedding is one that changes with the length, as transformers tells it."""
    return isinstance(kind, str) and "dynamic" in kind


def _type(table: Mapping[str, Any]) -> object:
    return table.get("rope_type", table.get("type"))


def _rotary_tables(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the tables of rotary embeddings in a configuration, those of single types of layers among them."""
    owners = [owner for owner in (config, config.get("text_config")) if isinstance(owner, Mapping)]
    found = [owner.get(name) for owner in owners for name in ("rope_parameters", "rope_scaling")]
    found += [inner for outer in found if isinstance(outer, Mapping) for inner in outer.values()]
    return [table for table in found if isinstance(table, Mapping)]


def broken(where: str, error: Exception, config: Mapping[str, Any] | None = None) -> UsageError:
    """Make the error for a configuration that transformers refuses.

    Args:
        where: the folder's name.
        error: what transformers raised.
        config: the values, to name the one that is unknown.
    """
    unknown = error.args[0] if isinstance(error, KeyError) and error.args else None
    path = None if config is None or unknown is None else _path_of(config, unknown)
    if path is not None:
        return UsageError(f"{where}: {path} is {shown(unknown)}.", why="transformers does not know it.", fix=_FIX)
    return UsageError(
        f"The configuration of {where} cannot be used.",
        why=raised(error),
        fix="Correct config.json, or copy the folder again.",
    )


def raised(error: Exception) -> str:
    """Write on one line what transformers raised."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:250]}"


def _path_of(config: Mapping[str, Any], value: object) -> str | None:
    """Return where a value stands in a configuration, names joined by dots; None if nowhere."""
    for name, found in config.items():
        if type(found) is type(value) and found == value:
            return name
        inner = _path_of(found, value) if isinstance(found, Mapping) else None
        if inner is not None:
            return f"{name}.{inner}"
    return None
