"""Examine a Hugging Face folder before anything of it is loaded: which files make the model, and what is next to them.

The files that are listed here are those that transformers reads, by its own order: shards of PyTorch's distributed
checkpoints, the file that `transformers_weights` names, one safetensors file, or the shards of an index. Each is a
plain file in the folder, or a link to one. State that lies next to the weights and would be left out is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from ....core.error_texts import argument, shown
from ....core.errors import UsageError
from ....core.storage.reading import open_plain, read_json, read_plain
from ..inference import bounded
from .config import CONFIG, raised, read_config
from .model_class import FEATURES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAFETENSORS, SAFETENSORS_INDEX = ".safetensors", ".safetensors.index.json"
# As transformers.distributed.checkpoint.is_sharded_checkpoint recognises them.
_DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_MOST_BYTES = 64 << 20
# Files of other kinds that hold weights.
_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")
# transformers reads it when it loads a decoder; it changes no output of the model.
_GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
SENTENCE_MODULES, _SENTENCE_CONFIG = "modules.json", "config_sentence_transformers.json"
HOW_TO_MERGE = (
    "Merge it where peft is installed, and export the result: "
    "PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)"
)
# Kinds of PEFT that put something in front of the tokens, or choose layers as they run: nothing can merge them.
NEVER_MERGED = frozenset(
    ("PREFIX_TUNING", "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT", "ADAPTION_PROMPT", "XLORA", "POLY")
)
_UNQUANTISED = f"Export the original weights; {argument('weight_dtype', 'int8')} makes them small."


class _State(NamedTuple):
    """State next to the weights that the file would not have.

    Args:
        names: patterns of the files that hold or describe it.
        what: what it is.
        fix: what to do.
        entries: of which one is in such a JSON file; empty: the file alone says it.
    """

    names: tuple[str, ...]
    what: str
    fix: str
    entries: tuple[str, ...] = ()


_ADAPTERS = (ADAPTER, "adapter_model.*", "adapter_fusion_config.json", "pytorch_adapter.bin", "pytorch_lora_weights.*")
_PROMPTS = ("soft_prompt*", "prompt_embeddings*", "prompt_encoder*", "learned_embeds*")
_HEADS = ("value_head.*", "v_head.*", "pytorch_model_head.bin", "head_config.json", "model_head.*")
_OTHER_STATE = (
    _State(_ADAPTERS, "an adapter (LoRA or another kind of PEFT) next to its weights", HOW_TO_MERGE),
    _State(_PROMPTS, "learned prompts next to its weights", "Export from Python a module that puts them in front."),
    _State(_HEADS, "a head in a file of its own", "Export from Python a module that contains model and head."),
    _State(("quantize_config.json",), "weights quantised by GPTQ", _UNQUANTISED, ("bits", "quant_method")),
    _State(("quant_config.json",), "weights quantised by AWQ", _UNQUANTISED, ("w_bit", "bits", "quant_method")),
    _State(("hf_quant_config.json",), "weights quantised by ModelOpt", _UNQUANTISED, ("quantization",)),
)


def _how_to_merge(folder: Path) -> str:
    """Return what to do about an adapter in a folder: what is merged depends on its kind."""
    try:
        found = read_json(folder / ADAPTER, 1 << 20, "")
    except UsageError:
        return HOW_TO_MERGE
    kind = found.get("peft_type") if isinstance(found, Mapping) else None
    if kind not in NEVER_MERGED:
        return HOW_TO_MERGE
    return f"{kind} cannot be merged into the weights. Export the base, in a copy of the folder without the adapter."


def adapters_below(folder: Path) -> list[str]:
    """List the adapters in the folders of a folder, which transformers does not apply when it loads that folder."""
    try:
        return sorted(f"{path.parent.name}/{ADAPTER}" for path in folder.glob(f"*/{ADAPTER}"))
    except OSError:  # a folder that cannot be listed
        return []


def names_in(folder: Path) -> list[str]:
    """List the names in a folder.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise UsageError(f"Cannot read {folder}.", why=f"{error.strerror or error}.", fix="Check the path.") from error


def files(folder: Path) -> list[Path]:
    """List the files that make the model, in a fixed order: config.json, then those that hold the weights.

    Raises:
        UsageError: state next to the weights would be left out; or the folder has no weights that can be read; or a
            file that names others cannot be read, or names one elsewhere; or one is no plain file that may be read.
    """
    names = names_in(folder)
    _refuse_other_state(folder, names)
    if CONFIG not in names:
        raise _without_config(folder, names)
    found = [folder / CONFIG, *_weight_files(folder, names)]
    for path in (*found, folder / _GENERATION):
        _check_readable(path)
    return found


def unread(folder: Path) -> list[str]:
    """List the safetensors files of a folder that are no part of the model."""
    read = {path.name for path in files(folder)}
    return [name for name in names_in(folder) if name.endswith(SAFETENSORS) and name not in read]


def _weight_files(folder: Path, names: Sequence[str]) -> list[Path]:
    distributed = [name for name in names if _DISTRIBUTED.fullmatch(name)]
    if distributed:  # transformers takes them before any other, and then reads every safetensors file of the folder
        others = [name for name in names if name.endswith(SAFETENSORS) and name not in distributed]
        if others:
            raise UsageError(
                f"{folder} has weights twice: {bounded(others, 2)}, and {bounded(distributed, 2)}.",
                why="transformers would read the shards of a distributed checkpoint, and mix all of these files.",
                fix="Keep the weights that are meant, alone, in a copy of the folder.",
            )
        return [folder / name for name in distributed]
    entry = read_config(folder).get("transformers_weights")
    if entry is not None:
        _check_name(folder / CONFIG, entry, (SAFETENSORS, SAFETENSORS_INDEX), "transformers_weights is")
        path = folder / entry
        return [path, *_shards(path)] if entry.endswith(SAFETENSORS_INDEX) else [path]
    if SINGLE in names:
        return [folder / SINGLE]
    if INDEX in names:
        return [folder / INDEX, *_shards(folder / INDEX)]
    other = next((name for name in _OTHERS if name in names), None)
    why = "It has no safetensors."
    if other is not None:
        why = f"It has {other}: pickles are never opened, and other frameworks' weights not read."
    fix = "Save the model with model.save_pretrained(folder)."
    raise UsageError(f"{folder} has no weights that can be read.", why=why, fix=fix)


def _shards(index: Path) -> list[Path]:
    """Return the files that an index lists.

    Raises:
        UsageError: it cannot be read, or names a file elsewhere.
    """
    _check_readable(index)
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
        _check_name(index, name, (SAFETENSORS,), "A shard is")
    return [index.parent / name for name in names]


def _check_name(owner: Path, name: object, endings: tuple[str, ...], what: str) -> None:
    """Refuse the name of a file of weights that is no safetensors file of the same folder.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(endings) or "\0" in name:
        why = f"{what} a {' or '.join(endings)} file in the same folder."
        raise UsageError(f"{owner} names {shown(name)}.", why=why, fix="Copy the folder again, or save it again.")


def _check_readable(path: Path) -> None:
    """Refuse a file that is not plain, or that cannot be opened, for the true reason; a missing one is told elsewhere.

    Raises:
        UsageError: it is such a file.
    """
    try:
        open_plain(path).close()
    except FileNotFoundError as error:
        if not path.is_symlink():
            return
        why = f"It is a link to {path.readlink()}, which does not exist."
        raise UsageError(f"Cannot read {path}.", why=why, fix="Fetch the folder again.") from error
    except OSError as error:
        fix = "Check who may read it."
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror or error}.", fix=fix) from error


def _refuse_other_state(folder: Path, names: Sequence[str]) -> None:
    """Refuse state next to the weights that the file would not have.

    Raises:
        UsageError: there is some.
    """
    for state in _OTHER_STATE:
        for name in (name for name in names if any(fnmatchcase(name, pattern) for pattern in state.names)):
            if not state.entries or _has_one(folder / name, state.entries):
                fix = _how_to_merge(folder) if state.fix == HOW_TO_MERGE else state.fix
                raise UsageError(f"{folder} has {state.what}.", why=f"{name} lies there.", fix=fix)


def _has_one(path: Path, entries: Sequence[str]) -> bool:
    """Return whether a JSON file has one of some entries; one that cannot be read may have any."""
    try:
        found = read_json(path, 1 << 20, "")
    except UsageError:
        return True
    return not isinstance(found, Mapping) or any(entry in found for entry in entries)


def _without_config(folder: Path, names: Sequence[str]) -> UsageError:
    """Make the error for a folder without config.json."""
    inner = next((x for x in _sentence_modules(folder) if x["path"]), None) if SENTENCE_MODULES in names else None
    if inner is not None:
        return UsageError(
            f"{folder} is a model of sentence-transformers.",
            why=f"Its transformer lies in {inner['path']}; what follows it is not exported.",
            fix=f"Give {folder / inner['path']} with {argument('task', FEATURES)} to export the transformer alone.",
        )
    below = adapters_below(folder)
    if below:
        what = f"{folder} has no model, and an adapter (LoRA or another kind of PEFT) in a folder of its own."
        return UsageError(what, why=f"{bounded(below, 3)} lies there.", fix=_how_to_merge((folder / below[0]).parent))
    return UsageError(f"{folder} has no {CONFIG}.", why="A model of its family has one.", fix="Copy all of it.")


def refuse_sentence_transformers(folder: Path, *, alone: bool) -> list[str]:
    """Refuse a model of sentence-transformers, unless its transformer alone is asked for; return what is left out.

    Args:
        folder: the folder.
        alone: whether the transformer alone is asked for.

    Raises:
        UsageError: it is one, and more is asked for; or its modules cannot be read.
    """
    if SENTENCE_MODULES not in names_in(folder):
        return []
    parts = [x["type"].rpartition(".")[2] for x in _sentence_modules(folder)[1:]]
    if (folder / _SENTENCE_CONFIG).exists():
        found = read_json(folder / _SENTENCE_CONFIG, 1 << 20, "Copy the folder again.")
        prompts = found.get("prompts") if isinstance(found, Mapping) else None
        if isinstance(prompts, Mapping) and any(prompts.values()):
            parts.append(f"prompts ({bounded([str(name) for name in prompts], 4)})")
    what = ", ".join(parts) or "nothing"
    if not alone:
        raise UsageError(
            f"{folder} is a model of sentence-transformers.",
            why=f"{SENTENCE_MODULES} adds to its transformer: {what}. The file would not have it.",
            fix=f"{argument('task', FEATURES)} exports the transformer alone; apply the rest to its output yourself.",
        )
    return [f"{SENTENCE_MODULES} adds to the transformer, and the file does not have: {what}"] if parts else []


def _sentence_modules(folder: Path) -> list[dict[str, str]]:
    """Read `modules.json` of sentence-transformers.

    Raises:
        UsageError: it cannot be read.
    """
    path = folder / SENTENCE_MODULES
    found: Any = read_json(path, 1 << 20, "Copy the folder again.")
    if not isinstance(found, list) or not all(
        isinstance(x, dict) and isinstance(x.get("type"), str) and isinstance(x.get("path"), str) for x in found
    ):
        raise UsageError(f"{path} cannot be read.", why="It lists modules with type and path.")
    return found
