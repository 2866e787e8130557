"""Read the weights of a Hugging Face folder: safetensors only, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....core.error_texts import shown
from ....core.errors import UsageError
from ....core.storage.reading import read_plain
from ..inference import bounded
from .config import CONFIG, broken, grows, raised

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_BYTES = 64 << 20
# Class → prefix of tensors that no output of a file depends on, and that a folder saved by another class lacks.
_UNREAD = {"LongformerModel": "pooler."}
# Encoder that is exported alone → names of its tensors in whole models, as patterns, and what they become.
_INSIDE = {"LEDEncoder": {r"^(led\.)?encoder\.": "", r"^(led\.)?shared\.": "embed_tokens."}}
# Files of other kinds that hold weights.
_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


def files(folder: Path) -> list[Path]:
    """List the files that make the model, in a fixed order.

    Raises:
        UsageError: the folder has no weights that can be read, or its index cannot be.
    """
    config = folder / CONFIG
    if (folder / SINGLE).exists():
        return [config, folder / SINGLE]
    if (folder / INDEX).exists():
        return [config, folder / INDEX, *(folder / name for name in _shards(folder / INDEX))]
    why, fix = "It has no safetensors.", "Save the model with `save_pretrained`."
    other = next((name for name in _OTHERS if (folder / name).exists()), None)
    if (folder / "adapter_config.json").exists():
        why, fix = "It is a PEFT adapter, not a model.", "Merge it into its model, and save that."
    elif other is not None:
        why = f"It has {other}: pickles are never opened, and other frameworks' weights not read."
    raise UsageError(f"{folder} has no weights that can be read.", why=why, fix=fix)


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index lists.

    Raises:
        UsageError: it cannot be read, or names a file elsewhere.
    """
    try:
        raw = read_plain(index, _MOST_BYTES)
        if len(raw) > _MOST_BYTES:
            raise ValueError("it is too long")
        table = json.loads(raw)["weight_map"]
        names = sorted(set(table.values()))
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("weight_map names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{index} cannot be read.", why=raised(error)) from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UsageError(f"{index} names {shown(name)}.", why="A shard is a .safetensors file in the same folder.")
    return names


def load_model(
    kind: type[PreTrainedModel], config: Any, folder: Path, *, part: bool
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model in fp32 with transformers, from safetensors alone; return it, and notes.

    Args:
        kind: the class.
        config: its configuration.
        folder: the folder.
        part: another class than the saved one was asked for, which may leave tensors out.

    Raises:
        UsageError: tensors are missing, unexpected, or have other shapes; or a file is damaged.
    """
    from transformers.utils import logging

    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True, "dtype": torch.float32}
    options["ignore_mismatched_sizes"] = True  # they are refused below, by name
    options["key_mapping"] = _INSIDE.get(kind.__name__)
    shows, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model, info = kind.from_pretrained(folder, config=config, **options)
    except (TypeError, AttributeError, KeyError) as error:
        raise broken(folder.name, error) from error
    except Exception as error:  # the folder decides what goes wrong, and where
        raise UsageError(f"{folder} cannot be loaded.", why=raised(error), fix="Copy or save it again.") from error
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    unread = [name for name in missing if name.startswith(_UNREAD.get(kind.__name__, "\0"))]
    missing = [name for name in missing if name not in unread]
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if wrong:
        raise UsageError(
            f"{folder} does not fit its configuration.",
            why=f"Of another shape: {bounded(wrong, 3)}.",
            fix="Correct config.json, or copy the folder again.",
        )
    if missing or (unexpected and not part):
        names, verb = (missing, "lacks") if missing else (unexpected, "has unexpected")
        raise UsageError(
            f"{folder} {verb} {len(names)} tensors of a {kind.__name__}: {bounded(names, 5)}.",
            why="Weights that are missing would be random." if missing else "They would be lost.",
            fix="Check the configuration, and the task.",
        )
    notes = [f"{len(unexpected)} tensors of {folder.name} are no part of {kind.__name__}"] if unexpected else []
    if unread:
        notes.append(f"{folder.name} lacks {bounded(unread, 3)}, which no output of the file depends on")
    return model.eval(), notes


def whole_state(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return the weights and all buffers of a model by name, floating point ones in float32."""
    state = {**dict(model.named_buffers()), **model.state_dict()}
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [("", kinds)]:
            if grows(kind):  # longer sequences that a live model has seen are no part of it
                own = path + "." * bool(path) + layer + "_" * bool(layer)
                state[f"{own}inv_freq"] = state[f"{own}original_inv_freq"]
    return {name: x.detach().float() if x.is_floating_point() else x.detach() for name, x in state.items()}
