"""What `inspect` says of a checkpoint: told by the weights, configured, assumed, missing, still needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ..models.registry import CLASSES, detect_family
from .config import load_config
from .infer_config import canonical_state, infer_config
from .load import find_config, load_state


def describe_checkpoint(path: Path, config: Path | None = None) -> dict[str, Any]:
    """Facts of a checkpoint as JSON types, also of one whose configuration is incomplete.

    Raises:
        UsageError: the checkpoint or its configuration cannot be read.
    """
    loaded = load_state(path)
    found = find_config(path, config)
    raw = load_config(found) if found is not None else None
    tensors = loaded.state.values()
    description: dict[str, Any] = {
        "path": str(path),
        "sha256": loaded.sha256,
        "bytes": path.stat().st_size,
        "tensors": len(loaded.state),
        "parameters": sum(tensor.numel() for tensor in tensors),
        "config": str(found) if found is not None else None,
        "class": raw.class_name if raw is not None else None,
        "notes": loaded.notes,
        "given": _entries(raw.kwargs, found.name if found is not None else "") if raw is not None else {},
        "inferred": {},
        "missing": [],
        "unexpected": [],
        "needed": "",
        "window": None,
        "windows": [],
    }
    try:
        resolved = infer_config(loaded.state, raw)
    except UsageError as error:
        return {**description, "needed": str(error), "inferred": _inferred(loaded.state, description["given"])}
    family = CLASSES[resolved.class_name].family
    arguments = resolved.args.model_dump(mode="json")
    inferred = {name: {"value": arguments[name], "from": how} for name, how in resolved.inferred.items()}
    return {
        **description,
        "class": resolved.class_name,
        "notes": [*loaded.notes, *resolved.notes],
        "inferred": inferred,
        "missing": resolved.missing,
        "unexpected": resolved.unexpected,
        "window": family.describe_window(resolved.args),
        "windows": [view.to_dict() for view in family.window_views(resolved.class_name, resolved.args)],
    }


def _entries(values: Any, source: str) -> dict[str, dict[str, Any]]:
    return {name: {"value": value, "from": source} for name, value in values.items()}


def _inferred(state: Any, given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Infer what the weights show on their own, where the whole does not come together."""
    canonical, _ = canonical_state(state)
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical.items()}
    known = {name: entry["value"] for name, entry in given.items()}
    try:
        findings = detect_family(shapes).infer_arguments(shapes, known)
    except UsageError:
        return {}
    return {name: {"value": found.value, "from": found.how} for name, found in findings.items()}
