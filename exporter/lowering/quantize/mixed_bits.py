"""Choose which kinds of linear layers get 8 bits instead of 4, by measuring each.

All layers are rounded to 4 bits in the model itself, and its distance from its unrounded outputs is measured. Then one
kind after another, for example all `v_proj`, takes its 8 bits: it keeps them if the distance falls by a far larger part
than the weights grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .blocks import Blocks
from .calibration import Calibration, kind_of

# A kind gets 8 bits if the saved part of the distance is at least this many times the growth of the weights.
_WORTH = 4.0
# The largest allowed growth of the weights.
_GROWTH = 0.1


@dataclass(frozen=True)
class Rounded:
    """A layer's matrix in 4 and in 8 bits."""

    four: Blocks
    eight: Blocks


@dataclass(frozen=True)
class Effect:
    """The effect of 8 bits for one kind of layers.

    Args:
        kind: its path with `*` in place of numbers.
        distance: of the model with all layers in 4 bits but these.
        growth: the part by which all weights grow.
    """

    kind: str
    distance: float
    growth: float


def choose(calibration: Calibration, layers: Mapping[str, Rounded], *, logits: bool) -> tuple[float, list[Effect]]:
    """Measure each kind of layers; return the distance with 4 bits only, and the kinds that should get 8, best first.

    The model's weights are the given ones again afterwards.

    Args:
        calibration: the model.
        layers: by path.
        logits: as of `Calibration.distance`.
    """
    kept = {path: calibration.layers[path].weight for path in layers}
    wanted = calibration.outputs()
    whole = sum(layer.four.nbytes for layer in layers.values())
    kinds: dict[str, list[str]] = {}
    for path in layers:
        kinds.setdefault(kind_of(path), []).append(path)
    try:
        for path, layer in layers.items():
            _set(calibration, path, layer.four)
        alone = calibration.distance(wanted, logits=logits)
        effects = []
        for kind, paths in kinds.items():
            for path in paths:
                _set(calibration, path, layers[path].eight)
            growth = sum(layers[path].eight.nbytes - layers[path].four.nbytes for path in paths) / whole
            effects.append(Effect(kind, calibration.distance(wanted, logits=logits), growth))
            for path in paths:
                _set(calibration, path, layers[path].four)
    finally:
        for path, weight in kept.items():
            calibration.layers[path].weight = weight
    if alone <= 0:
        return alone, []
    worth = [effect for effect in effects if (alone - effect.distance) / alone > _WORTH * effect.growth]
    worth.sort(key=lambda effect: (alone - effect.distance) / effect.growth, reverse=True)
    chosen: list[Effect] = []
    for effect in worth:
        if sum(each.growth for each in chosen) + effect.growth <= _GROWTH:
            chosen.append(effect)
    return alone, chosen


def _set(calibration: Calibration, path: str, blocks: Blocks) -> None:
    weight = torch.from_numpy(np.ascontiguousarray(blocks.matrix().T))
    calibration.layers[path].weight = torch.nn.Parameter(weight, requires_grad=False)
