"""Run the kernel on PyTorch tensors: on a GPU through Triton's compiler, on the CPU in its interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.errors import UsageError
from ...core.nodes.gpu import KernelAttributes
from . import windowed_attention as source
from .compile import AnySpec
from .spec import KernelSpec, Tile, grid, pack_scalars, why_unsupported
from .targets import TARGETS, Target
from .tiles import tile_for

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    attn_bias: Tensor | None,
    attributes: KernelAttributes,
    tile: Tile | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute windowed attention; shapes and meaning as in `core.nodes.attention` and `core.nodes.grouped`.

    Args:
        query: fp16, bf16, fp32 or fp8 (E4M3) in the layout of `attributes.perm`; copied if not contiguous.
        key: as query, with heads that divide those of the queries.
        value: as key.
        key_mask: bool or uint8 `[B, N]`.
        attn_bias: `[H, window_size, K]`; converted to the query's type.
        attributes: window, scale and layout.
        tile: how to cut the work; by default as the table says for the tensors' device.
        sinks: `[H]`; converted to the query's type.

    Returns:
        A contiguous tensor of the query's shape and type; fp16 where that is fp8.

    Raises:
        UsageError: the kernel does not compute this case.
    """
    spec = spec_of(query, key_mask, attn_bias, attributes, sinks)
    batch, heads, length = (query.shape[axis] for axis in attributes.perm[:3])
    kv_heads = key.shape[attributes.perm[1]]
    reason = why_unsupported(attributes, batch=batch, heads=heads, length=length, kv_heads=kv_heads)
    if reason:
        raise UsageError("The attention kernel does not support this case.", why=f"{reason[0].upper()}{reason[1:]}.")
    query, key, value = (x.contiguous() for x in (query, key, value))
    output = torch.empty_like(query, dtype=torch.float16 if spec.output_dtype == "fp16" else None)
    if not output.numel():
        return output
    tile = tile or tile_for(spec, device_target(query.device))
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    bias, sinks = (None if x is None else x.to(query.dtype).contiguous() for x in (attn_bias, sinks))
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        source.windowed_attention[grid(tile, length, batch * heads)](
            query,
            key,
            value,
            mask,
            bias,
            sinks,
            *pack_scalars(attributes, length, heads, kv_heads),
            output,
            **compiled_in(spec, tile),
        )
    return output


def compiled_in(spec: AnySpec, tile: Tile) -> dict[str, Any]:
    """Return the compile-time parameters of a launch; absent tensors are given as None."""
    constants = {name: value for name, value in spec.constants(tile).items() if value is not None}
    return {**constants, "num_warps": tile.warps, "num_stages": tile.stages}


def spec_of(
    query: Tensor,
    key_mask: Tensor | None,
    attn_bias: Tensor | None,
    attributes: KernelAttributes,
    sinks: Tensor | None = None,
) -> KernelSpec:
    """Return the kernel that serves a node with these inputs.

    Raises:
        UsageError: no kernel has this element type or head size.
    """
    dtype = (DTYPES | {torch.float8_e4m3fn: "fp8"}).get(query.dtype, str(query.dtype).removeprefix("torch."))
    return KernelSpec(
        dtype,
        query.shape[-1],
        has_mask=key_mask is not None,
        has_bias=attn_bias is not None,
        has_xpos=bool(getattr(attributes, "xpos_scale_base", 0.0)),
        has_softcap=bool(getattr(attributes, "softcap", 0.0)),
        has_sinks=sinks is not None,
        has_shared_qk=getattr(attributes, "shared_qk", False),
    )


def device_target(device: torch.device) -> Target:
    """Return the target of a device; the CPU counts as sm_80.

    A capability that is not in the table belongs to the next lower one.

    Raises:
        UsageError: the GPU is older than all of them.
    """
    if device.type != "cuda":
        return TARGETS["sm_80"]
    major, minor = torch.cuda.get_device_capability(device)
    older = [target for target in TARGETS.values() if target.capability <= 10 * major + minor]
    if not older:
        raise UsageError(f"The attention kernel needs sm_80 or later; this GPU is sm_{major}{minor}.")
    return max(older, key=lambda target: target.capability)
