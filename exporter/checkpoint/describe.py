"""Describe a checkpoint for `inspect`: arguments inferred from the weights, configured, assumed, missing or needed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ...core.error_texts import shown
from ...core.errors import UsageError
from ...core.storage.wrong_file import check_exists
from ..models.registry import CLASSES, find_folder, parts_of
from .config import load_config
from .folders import is_index
from .hidden_arguments import config_template, placeholders, template_path
from .infer_config import Gathered, Resolved, gather, infer_config
from .load import LoadedCheckpoint, find_config, load_state, with_tied
from .open_checkpoint import OpenedCheckpoint, open_checkpoint


def describe_checkpoint(path: Path, config: Path | None = None, entry: str | None = None) -> dict[str, Any]:
    """Describe a checkpoint in JSON types, even if its configuration is incomplete.

    Args:
        path: the checkpoint.
        config: its configuration file; by default the one in its folder, if there is one.
        entry: the set of weights to describe, where a file holds several; None chooses.

    Raises:
        UsageError: the checkpoint or its configuration cannot be read.
    """
    check_exists(path)
    if path.is_dir() and find_folder(path) is not None:
        return _of_folder(open_checkpoint(path, config, entry=entry))
    loaded = with_tied(load_state(path, entry=entry))
    found = find_config(path, config)
    raw = load_config(found) if found is not None else None
    description: dict[str, Any] = {
        **_of_tensors(loaded, _size(path)),
        "config": str(found) if found is not None else None,
        "class": raw.class_name if raw is not None else None,
        "given": _entries(raw.kwargs, found.name if found is not None else "") if raw is not None else {},
        "save_as": str(template_path(path)),
        "window": None,
        "windows": [],
    }
    try:
        known = gather(loaded.state, raw, settings=loaded.settings)
        description |= _gathered(known, description["given"])
        resolved = infer_config(known)
    except UsageError as error:
        inside = layers_inside(loaded) if description["class"] is None and not _is_known(loaded) else []
        needed = _how_to_export(path, inside) if inside else str(error)
        return {**description, "layers": inside, "needed": needed}
    arguments = resolved.args.model_dump(mode="json")
    inferred = {name: {"value": arguments[name], "from": how} for name, how in resolved.inferred.items()}
    return {
        **description,
        "class": resolved.class_name,
        "notes": [*loaded.notes, *resolved.notes],
        "inferred": inferred,
        "missing": resolved.missing,
        "unexpected": resolved.unexpected,
        **_of_windows(resolved),
    }


def _of_folder(opened: OpenedCheckpoint) -> dict[str, Any]:
    """Describe a checkpoint folder, whose configuration is always complete."""
    path, resolved = opened.loaded.path, opened.resolved
    size = sum(tensor.nbytes for tensor in opened.loaded.state.values())
    return {
        **_of_tensors(opened.loaded, size),
        "config": str(path),
        "class": resolved.class_name,
        "given": _entries(resolved.args.model_dump(mode="json"), path.name),
        "warnings": list(opened.warnings),
        **_of_windows(resolved),
    }


def _of_tensors(loaded: LoadedCheckpoint, size: int) -> dict[str, Any]:
    return {
        "path": str(loaded.path),
        "sha256": loaded.sha256,
        "bytes": size,
        "tensors": len(loaded.state),
        "parameters": sum(tensor.numel() for tensor in loaded.state.values()),
        "entry": loaded.entry,
        "other_weights": loaded.others,
        "notes": loaded.notes,
        "warnings": loaded.warnings,
        "inferred": {},
        "missing": [],
        "unexpected": [],
        "needed": "",
        "unused": [],
        "template": None,
        "save_as": "",
        "layers": [],
    }


_MOST_LAYERS = 64


def _is_known(loaded: LoadedCheckpoint) -> bool:
    """Return whether the weights alone are those of a supported class, whatever else contradicts them."""
    try:
        gather(loaded.state)
    except UsageError:
        return False
    return True


def layers_inside(loaded: LoadedCheckpoint) -> list[dict[str, Any]]:
    """List the layers of supported classes inside a larger model: path, class, what the weights show and what not.

    Lists of layers that look alike are whole; at most 64 are looked at.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in loaded.state.items()}
    found = []
    for prefix in parts_of(shapes)[:_MOST_LAYERS]:
        inner = {
            name.removeprefix(f"{prefix}."): x for name, x in loaded.state.items() if name.startswith(f"{prefix}.")
        }
        try:
            known = gather(inner)
        except UsageError:  # it looks like such a layer, and is none
            continue
        inferred = {name: x.value for name, x in known.findings.items()}
        template = config_template(known.entry, known.given, inferred, known.hyper_connections)
        missing = [name for name in placeholders(template) if name not in ("class", "hyper_connections")]
        found.append({"path": prefix, "class": known.entry.name, "inferred": inferred, "not_in_weights": missing})
    return found


def _how_to_export(path: Path, layers: list[dict[str, Any]]) -> str:
    """Say which layers were found in a larger model, and how the whole is exported."""
    lines = []
    for layer in layers[:4]:
        sizes = ", ".join(f"{name} {shown(layer['inferred'][name])}" for name in _SHOWN if name in layer["inferred"])
        lines.append(f"{layer['path']} looks like a {layer['class']}{f' ({sizes})' if sizes else ''}.")
    if len(layers) > 4:
        lines[-1] += f" And {len(layers) - 4} more layers."
    missing = ", ".join(dict.fromkeys(name for layer in layers for name in layer["not_in_weights"]))
    lines.append(f"Weights do not show the rest of the model{f', nor {missing}' if missing else ''}.")
    width = next((layer["inferred"]["dim"] for layer in layers if "dim" in layer["inferred"]), "WIDTH")
    lines.append(
        "Export the whole with a function that makes it: localattn export --factory FILE.py:FUNCTION "
        f"--weights {shlex.quote(str(path))} --input 'NAME:float32:[1,128,{width}]' -o model.onnx"
    )
    return "\n".join(lines)


# Sizes of a layer that are shown in one line.
_SHOWN = ("dim", "heads", "dim_head", "inner_dim", "depth", "num_tokens")


def _size(path: Path) -> int:
    """Return the bytes of a checkpoint's files."""
    folder = path if path.is_dir() else path.parent if is_index(path) else None
    files = [path] if folder is None else [file for file in folder.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _of_windows(resolved: Resolved) -> dict[str, Any]:
    family = CLASSES[resolved.class_name].family
    views = family.window_views(resolved.class_name, resolved.args, None)
    return {"window": resolved.args.describe(), "windows": [view.to_dict() for view in views]}


def _entries(values: Any, source: str) -> dict[str, dict[str, Any]]:
    return {name: {"value": value, "from": source} for name, value in values.items()}


def _gathered(known: Gathered, given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Describe the known part of a configuration, which may be incomplete or inconsistent."""
    own = {
        name: {"value": settings[0].value, "from": f"the checkpoint's {settings[0].source}"}
        for name, settings in known.own.used.items()
    }
    inferred = {name: found.value for name, found in known.findings.items()}
    return {
        "class": known.entry.name,
        "given": own | given,
        "unused": [
            {"name": x.name, "value": shown(x.value), "from": x.source, "why": x.why_unused} for x in known.own.unused
        ],
        "inferred": {
            name: {"value": found.value, "from": found.how}
            for name, found in known.findings.items()
            if name not in known.given
        },
        "template": config_template(known.entry, known.given, inferred, known.hyper_connections),
    }
