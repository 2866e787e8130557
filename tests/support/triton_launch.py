"""Launches the kernels of AFT-local and of steps on PyTorch tensors; elsewhere only the plugin library does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localattn.core.errors import UsageError
from localattn.core.nodes.step import StepAttributes, StepVariant
from localattn.plugins.kernel import aft, aft_local, ring, ring_attention
from localattn.plugins.kernel.launch import DTYPES, compiled_in, device_target
from localattn.plugins.kernel.spec import Tile
from localattn.plugins.kernel.tiles import tile_for


def launch_aft(
    gate: Tensor, key: Tensor, value: Tensor, position_bias: Tensor, key_mask: Tensor | None, *, causal: bool
) -> Tensor:
    """AFT-local's gated mean, `[T, B, D]` fp32; shapes and meaning as in `core.nodes.aft`."""
    spec, tile = aft.AftSpec(causal, key_mask is not None), aft.TILE
    gate, key, value, position_bias = (x.contiguous() for x in (gate, key, value, position_bias))
    length, batch, dim = gate.shape
    output = torch.empty_like(gate)
    if not output.numel():
        return output
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    reach = spec.variant.reach(position_bias.shape[1])
    with torch.cuda.device_of(gate):  # type: ignore[no-untyped-call]
        aft_local.aft_local[aft.grid(tile, length, batch, dim)](
            *(gate, key, value, position_bias, mask, length, batch, dim, reach, output),
            **compiled_in(spec, tile),
        )
    return output


def launch_ring(
    variant: StepVariant,
    attributes: StepAttributes,
    inputs: Sequence[Tensor],
    tile: Tile | None = None,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a step or chunk node; shapes and meaning as in `core.nodes.step`.

    Args:
        variant: the op type.
        attributes: of the node.
        inputs: those of the op type, in order.
        tile: how to cut the work; by default as the table says for the tensors' device.
        in_place: the caches of a step are the next ones too.

    Returns:
        Output, next keys, next values.

    Raises:
        UsageError: the kernel does not compute this case.
    """
    named = {name: x.contiguous() for name, x in zip(variant.input_names, inputs, strict=True)}
    query, caches = named["query"], (named["key_cache"], named["value_cache"])
    (batch, heads, tokens, head_dim), (_, kv_heads, slots, _) = query.shape, caches[0].shape
    spec, join = ring.ring_specs_for(variant, DTYPES.get(query.dtype, str(query.dtype)), head_dim)
    sizes = {"batch": batch, "kv_heads": kv_heads, "tokens": tokens, "slots": slots}
    reason = ring.why_ring_unsupported(heads=heads, **sizes)
    if reason:
        raise UsageError("The kernel does not compute this call.", why=f"{reason[0].upper()}{reason[1:]}.")
    if in_place and variant.chunked:
        raise UsageError("Only a step writes its ring in place.", why="A chunk still reads what it would replace.")
    device = device_target(query.device)
    tile = tile or tile_for(spec, device)
    cut = ring.plan(tile, group=heads // kv_heads, chunked=variant.chunked, **sizes)
    biases = {2: ring.SHARED, 3: ring.BY_HEAD, 4: ring.BY_SEQUENCE}[named["score_bias"].dim()]
    scalars = ring.pack_ring_scalars(attributes, cut, tokens=tokens, slots=slots, kv_heads=kv_heads, biases=biases)
    parts = query.new_empty(cut.parts * (head_dim + 2), dtype=torch.float32)
    output = torch.empty_like(query)
    next_key, next_value = caches if in_place else (torch.empty_like(x) for x in caches)
    given = [named.get(name) for name in (*variant.input_names[:7], "query_scale", "key_scale", "sinks")]
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        ring_attention.ring_attention[cut.grid](
            *given, *scalars, parts, output, next_key, next_value, **compiled_in(spec, tile)
        )
        if cut.splits > 1:
            tile = tile_for(join, device)
            ring_attention.join[cut.join_grid](parts, cut.rows, cut.splits, head_dim, output, **compiled_in(join, tile))
    return output, next_key, next_value
