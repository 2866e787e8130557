"""Know the tensors of adapters (LoRA and other kinds of PEFT) by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...core.errors import UsageError
from .inference import bounded

# Parts of names that only tensors of adapters have.
OF_ADAPTERS = re.compile(
    r"\blora_|\.lora\.|\bbase_layer\.|\bmodules_to_save\.|\boriginal_module\.|\bia3_|\bprompt_(?:embeddings|encoder)\b"
    r"|\b(?:oft|boft|hada|lokr|vera|fourierft|randlora|hra|road|adaption|adamss|beft|bone|c3a|deft|delora|frod|glora"
    r"|gralora|hira|lily|ln_tuning|miss|osf|peanut|psoft|pvera|shira|supertuning|tinylora|trainable_tokens|unilora"
    r"|vblora|waveft|shadow|xlora)_|\bpoly_(?:lora|router)"
)


def refuse_adapters(names: Iterable[str]) -> None:
    """Refuse a state dict that has tensors of an adapter.

    Raises:
        UsageError: it has; the text says how to merge it.
    """
    found = [name for name in names if OF_ADAPTERS.search(name)]
    if found:
        raise UsageError(
            f"The checkpoint has {len(found)} tensors of an adapter (LoRA or another kind of PEFT): "
            f"{bounded(found, 3)}.",
            why="What the model adds or multiplies by them would be lost.",
            fix="Merge it where the model is made, model = model.merge_and_unload(), and save that: "
            "torch.save(model.state_dict(), 'weights.pt'), or model.save_pretrained(folder) of a Hugging Face model.",
        )
