"""Load a checkpoint into the published class itself: the reference of its file, where the package can be imported.

The weights are loaded strictly into `local_attention`'s own class, which then runs in float64. Where that package is
missing, the reference is the formula of the family (`reference.py`), which tests compare with the package. The formula
stays the reference of rows that a mask takes out, for which the package and this project define other values, and of
sequences so long that the package would need gigabytes.
"""

from __future__ import annotations

import importlib
import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..models.arguments import Arguments
from ..models.parts.float64 import InFloat64
from ..options import Sizes

_log = logging.getLogger(__name__)
PACKAGE = "local_attention"
# At most so many scores, of all heads and sequences: the package keeps several tables of them, 256 MiB each.
_MOST_SCORES = 1 << 25
_OPTIONS = ("mask", "attn_bias")


def upstream_module(class_name: str, args: Arguments, state: Mapping[str, Tensor]) -> Callable[[], nn.Module] | None:
    """Return a function that builds the published class with a checkpoint's weights; None where it cannot.

    Args:
        class_name: `package.Class`.
        args: the class's arguments.
        state: the checkpoint's tensors.
    """
    package, _, name = class_name.partition(".")
    if package != PACKAGE:
        return None
    try:
        kind = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        _log.info("the reference is a formula: %s", error)
        return None

    def build() -> nn.Module:
        drawn = random.getstate()  # hyper-connections draw a random stream
        try:
            with torch.random.fork_rng(devices=[]):
                module: nn.Module = kind(**args.model_dump())
        finally:
            random.setstate(drawn)
        # Rotary frequencies that old releases did not save are those that the class makes.
        made = {key: x for key, x in module.state_dict().items() if key.endswith("inv_freq") and key not in state}
        module.load_state_dict({**made, **{key: x.float() for key, x in state.items()}}, strict=True, assign=True)
        return module.requires_grad_(False).eval()

    return build


def fits(args: Any, sizes: Sizes) -> bool:
    """Return whether the published class computes sequences of these sizes in a modest amount of memory."""
    heads = getattr(args, "heads", sizes.heads)
    scores = math.prod((sizes.batch, heads, sizes.seq_len, args.geometry().keys_per_window))
    return scores <= _MOST_SCORES


def run(
    module: nn.Module, inputs: Mapping[str, Tensor], formula: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Run the published class in float64.

    Args:
        module: the class, in any floating-point type.
        inputs: by the file's names, in order.
        formula: computes the outputs by the formula, for rows that the mask takes out.
    """
    given = dict(inputs)
    options = {name: given.pop(name) for name in _OPTIONS if name in given}
    with InFloat64():
        out: Tensor = module(*given.values(), **options)
    mask = options.get("mask")
    if mask is not None and not bool(mask.all()):
        kept = mask[:, None, :, None] if out.ndim == 4 else mask[:, :, None]
        out = torch.where(kept, out, formula()[0])
    return (out,)
