"""Choose the class of transformers that a folder is exported as."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ....core.error_texts import argument, close_match, shown
from ....core.errors import UsageError
from .types import module_names, quirks_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FEATURES = "feature-extraction"
# Task → transformers' table of classes for it.
TASKS: Mapping[str, str] = {
    FEATURES: "MODEL_MAPPING",
    "fill-mask": "MODEL_FOR_MASKED_LM_MAPPING",
    "text-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "text-generation": "MODEL_FOR_CAUSAL_LM_MAPPING",
}


def choose_class(
    config: Mapping[str, Any], made: PreTrainedConfig, task: str | None, where: str, exported: str | None = None
) -> type[PreTrainedModel]:
    """Return the class to export: that of a task, or the one that the configuration names.

    No code of the folder is run: the class is one of transformers' own.

    Args:
        config: the values of `config.json`.
        made: the configuration that `made_config` makes of them.
        task: a key of `TASKS`; None for the class that the model was saved as.
        where: the folder's name, for errors.
        exported: name of the class that the file was exported as which the model is compared with; it comes before
            the saved one.

    Raises:
        UsageError: the configuration names no known class, or the model has none for the task.
    """
    from transformers import PreTrainedModel, __version__

    if task is not None:
        if task not in TASKS:
            raise UsageError(f"{argument('task')} is {shown(task)}.", fix=f"Known: {', '.join(TASKS)}.")
        chosen = _class_for(task, config, made)
        if chosen is None:
            known = [other for other in TASKS if _class_for(other, config, made) is not None]
            raise UsageError(
                f"{config['model_type']} has no model for {task}.", fix=f"It has some for {', '.join(known) or 'none'}."
            )
        return chosen
    names = config.get("architectures") if exported is None else [exported]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UsageError(
            f"{where} does not say which class it is of.",
            why=f"architectures is {shown(names)}.",
            fix=f"Give {argument('task')}, one of {', '.join(TASKS)}.",
        )
    named = named_class(names[0], config)
    if not (isinstance(named, type) and issubclass(named, PreTrainedModel)):
        raise UsageError(
            f"transformers {__version__} has no model class {shown(names[0])}.",
            why="Only its own classes are exported; code of a folder is never run.",
            fix=close_match(names[0], _classes_of(config)) if _classes_of(config) else "Update transformers.",
        )
    wanted = getattr(named, "config_class", None)
    if not (isinstance(wanted, type) and isinstance(made, wanted)):
        raise UsageError(
            f"{names[0]} is no class of a {config['model_type']}.",
            why=f"{where} names both: architectures and model_type.",
            fix=close_match(names[0], _classes_of(config)),
        )
    return named


def _class_for(task: str, config: Mapping[str, Any], made: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return transformers' class for a task and a type of model, or None if it has none."""
    from transformers.models.auto import modeling_auto

    encoder = quirks_of(made.model_type).encoder
    if task == FEATURES and encoder:
        alone: type[PreTrainedModel] = named_class(encoder, config)
        return alone
    try:
        found = getattr(modeling_auto, TASKS[task]).get(type(made), None)
    except ValueError:  # the table names a class that this release of transformers does not have
        return None
    chosen: type[PreTrainedModel] | None = found[0] if isinstance(found, tuple) else found
    return chosen


def refuse_decoder(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse a class that has an encoder and a decoder.

    Raises:
        UsageError: it is one.
    """
    if "decoder_input_ids" not in inspect.signature(kind.forward).parameters:
        return
    encoder = quirks_of(config.model_type).encoder
    raise UsageError(
        f"{kind.__name__} has an encoder and a decoder.",
        why="The decoder sees all outputs of the encoder, and writes token by token: that takes files of its own.",
        fix=f"{argument('task', FEATURES)} exports its encoder alone, {encoder}." if encoder else "",
    )


def named_class(name: str, config: Mapping[str, Any]) -> Any:
    """Return a class of transformers by name, at its root or in the module of the model's type, or None."""
    if not name.isidentifier():
        return None
    modules = [module for module in module_names(config.get("model_type", "")) if module.isidentifier()]
    owners = [f"transformers.models.{module}.modeling_{module}" for module in modules]
    for owner in ("transformers", *owners):
        with suppress(ImportError):
            found = getattr(import_module(owner), name, None)
            if found is not None:
                return found
    return None


def _classes_of(config: Mapping[str, Any]) -> list[str]:
    from transformers.models.auto import modeling_auto

    kind = str(config.get("model_type", ""))
    tables = (getattr(modeling_auto, f"{table}_NAMES") for table in TASKS.values())
    return [table[kind] for table in tables if isinstance(table.get(kind), str)]
