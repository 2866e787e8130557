"""Refuse modules whose weights are not all their own: those that PEFT wrapped, or into which it put its layers.

The classes are known by their module's name, so that nothing is imported to see that a module has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ...core.errors import UsageError
from ..models.hugging_face.folder import NEVER_MERGED

# Package → what it puts into a module, and what to do.
_MERGE = "Merge it first: model = model.merge_and_unload(), then export the model that this returns"
_SAVE = "model.save_pretrained(folder) saves it for localattn export"
_PACKAGES = {
    "peft": ("an adapter of PEFT", f"{_MERGE}; {_SAVE}."),
    "adapters": ("an adapter of adapter-transformers", f"Merge it first: model.merge_adapter(name); {_SAVE}."),
    "loralib": ("a layer of loralib", "Merge it first: model.eval() merges, then copy the weights into plain layers."),
    "bitsandbytes": ("a layer quantised by bitsandbytes", "Export the original weights."),
    "auto_gptq": ("a layer quantised by GPTQ", "Export the original weights."),
    "gptqmodel": ("a layer quantised by GPTQ", "Export the original weights."),
    "awq": ("a layer quantised by AWQ", "Export the original weights."),
}


def refuse_adapters(module: object) -> None:
    """Refuse a module that an adapter is part of.

    Raises:
        UsageError: it is one; the text says how to merge it.
    """
    if not isinstance(module, nn.Module):
        return
    for path, part in module.named_modules():
        for owner in type(part).__mro__:
            package = owner.__module__.partition(".")[0]
            if package not in _PACKAGES:
                continue
            what, fix = _PACKAGES[package]
            if package == "peft":
                fix = _how_to_merge(module)
            kind = f"{owner.__module__}.{owner.__qualname__}"
            why = f"{path or 'It'} is a {kind}; a file of plain layers would lose what it adds."
            raise UsageError(f"The {type(module).__name__} has {what}.", why=why, fix=fix)


def _how_to_merge(module: nn.Module) -> str:
    """Say what to do about an adapter of PEFT, which depends on its kind and on what holds it."""
    never = next((kind for kind in _kinds(module) if kind in NEVER_MERGED), None)
    if never is not None:
        return f"{never} cannot be merged into the weights: load the base again, and export it without the adapter."
    if hasattr(module, "merge_and_unload"):
        return _PACKAGES["peft"][1]
    return (
        f"Merge it into the base's layers: PeftModel.merge_and_unload() returns the plain model; {_SAVE}. After "
        "model.load_adapter(folder), load it by PeftModel.from_pretrained(base, folder) instead."
    )


def _kinds(module: nn.Module) -> Iterator[str]:
    """Yield the kinds of PEFT that the parts of a module have, as PEFT names them."""
    for part in module.modules():
        configs = getattr(part, "peft_config", None)
        for config in configs.values() if isinstance(configs, Mapping) else ():
            kind = getattr(config, "peft_type", "")
            yield str(getattr(kind, "value", kind))
