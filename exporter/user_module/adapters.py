"""Refuse modules whose weights are not all their own: those that PEFT wrapped, or into which it put its layers.

The classes are known by their module's name, so that nothing is imported to see that a module has none of them.
"""

from __future__ import annotations

from torch import nn

from ...core.errors import UsageError

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
            if package == "peft" and not hasattr(module, "merge_and_unload"):
                fix = (
                    f"Merge it into the base's layers: PeftModel.merge_and_unload() returns the plain model; {_SAVE}. "
                )
                fix += "After model.load_adapter(folder), load it by PeftModel.from_pretrained(base, folder) instead."
            kind = f"{owner.__module__}.{owner.__qualname__}"
            why = f"{path or 'It'} is a {kind}; a file of plain layers would lose what it adds."
            raise UsageError(f"The {type(module).__name__} has {what}.", why=why, fix=fix)
