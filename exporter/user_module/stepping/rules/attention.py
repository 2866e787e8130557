"""Attention with a causal window: the ring of `core.nodes.step` is the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .....core.nodes.step import ring_slots
from ....models.local_attention.adapter import WindowedCore
from ....models.local_attention.step_module import StepAttention
from ..along import CannotStep
from ..plan import At, Call, Execute


def attention(at: At) -> tuple[Any, Execute]:
    """Compute a layer that was replaced."""
    path, core = at.plan.layers[at.given["layer"]]
    assert isinstance(core, WindowedCore)
    if not core.geometry.causal:
        raise CannotStep(f"its attention is not causal (window {core.geometry.window_size}): it sees later positions")
    if at.given["mask"] is not None:
        raise CannotStep("it takes a mask of keys: a call has no padding")
    query, key, value = (at.given[name] for name in ("query", "key", "value"))
    alongs = [at.along(x) for x in (query, key, value)]
    axis = 1 if core.sequence_first else 2
    if any(along is None or along.axis != axis or along.pre for along in alongs):
        raise CannotStep("its queries and keys are not the positions of the input")
    sizes = [size.rest for size in at.sizes(query)]
    batch, heads, head_dim = sizes[0], sizes[2 if core.sequence_first else 1], sizes[3]
    step = StepAttention(core.args, heads, head_dim, at.plan.chunk)
    step.viewpoint.prepare()
    (part,) = list(core.by_length.values())[:1]
    rotary: Any = part.rel_pos
    if step.rel_pos is not None:
        step.rel_pos.register_buffer("inv_freq", rotary.inv_freq.clone())
        step.rel_pos.prepare()
    slots = ring_slots(core.geometry)
    caches = [at.cache((batch, heads, slots, head_dim), torch.float32) for _ in range(2)]
    bias = None if at.given["attn_bias"] is None else at.operand(at.given["attn_bias"], 0)
    name = f"layer_{at.given['layer']}"
    if name in at.plan.modules:
        name += f"_{len(at.plan.modules)}"
    at.plan.modules[name] = (path, step)

    def execute(call: Call) -> Tensor:
        given = [call.values[x] for x in (query, key, value)]
        q, k, v = (x.transpose(1, 2) for x in given) if core.sequence_first else given
        view = step.view(call.position, batch, None if bias is None else bias(call))
        rings = tuple(call.caches[cache.name] for cache in caches)
        out: Tensor
        out, kept = step(torch.cat((q, k), dim=1), v, rings, view)
        for cache, ring in zip(caches, kept, strict=True):
            call.kept[cache.name] = ring
        return out.transpose(1, 2) if core.sequence_first else out

    return at.result(), execute


def dense(at: At) -> tuple[Any, Execute]:
    """Refuse attention without a window."""
    raise CannotStep("it attends to all positions; a step file keeps the keys of a window")
