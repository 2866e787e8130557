"""The ways to compute windowed attention on a GPU that are measured against each other.

Each prepares a call that takes nothing and returns `[1, n, H, d]`. A candidate that is not installed, or that has no
such window, says so; one whose numbers differ from the reference is reported and not timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import HEADS, Case
from .ours import WAYS, Call, Run

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Above this a dense mask is gigabytes.
_LONGEST_DENSE = 16384


@dataclass(frozen=True)
class Inputs:
    """Query, key and value `[1, n, H, d]`, contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor

    def heads_first(self) -> list[Tensor]:
        """`[1, H, n, d]`, contiguous too: layout is not held against a candidate."""
        return [x.transpose(1, 2).contiguous() for x in (self.query, self.key, self.value)]


@dataclass(frozen=True)
class Candidate:
    """One way to compute it.

    Args:
        label: as tables and figures call it.
        prepare: everything up to the call that is measured.
        why_not: why it cannot compute a case; empty if it can.
        ours: it is the kernel.
    """

    label: str
    prepare: Callable[[Case, Inputs], Run]
    why_not: Callable[[Case], str]
    ours: bool = False


def random_inputs(case: Case, device: str = "cuda") -> Inputs:
    """Normal values of size 1."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, case.length, HEADS, case.head_dim)
    dtype = DTYPES[case.dtype]
    return Inputs(*(torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3)))


def visible(case: Case, query: Tensor, key: Tensor) -> Tensor:
    """Whether positions `query` see positions `key`; the same as `core.geometry`, on tensors."""
    g = case.geometry
    start = query // g.window_size * g.window_size
    if case.exact:
        first, end = query - g.backward_reach, query + g.forward_reach + 1
    else:
        first, end = start - g.backward_reach, start + g.window_size + g.forward_reach
    if case.causal:
        end = query + 1
    return (key >= first) & (key < end)


def reference(case: Case, inputs: Inputs, rows: int = 2048) -> Tensor:
    """Dense fp32 attention, some rows at a time."""
    query, key, value = (x.transpose(1, 2).float() for x in (inputs.query, inputs.key, inputs.value))
    position = torch.arange(case.length, device=query.device)
    parts = []
    for start in range(0, case.length, rows):
        t = position[start : start + rows]
        low = max(0, start - 2 * case.window)
        high = min(case.length, start + rows + 2 * case.window)
        hidden = ~visible(case, t[:, None], position[None, low:high])
        scores = query[:, :, start : start + rows] @ key[:, :, low:high].transpose(-1, -2)
        scores = (scores * case.attributes.scale).masked_fill_(hidden, -torch.inf)
        parts.append(scores.softmax(-1) @ value[:, :, low:high])
    return torch.cat(parts, dim=2).transpose(1, 2)


def _ours(way: str) -> Callable[[Case, Inputs], Run]:
    """The kernel in one of its ways."""
    return lambda case, inputs: WAYS[way](Call(case.attributes, inputs.query, inputs.key, inputs.value))


def _flex(case: Case, inputs: Inputs) -> Run:
    """PyTorch's FlexAttention with a block mask, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = inputs.heads_first()

    def rule(_batch: Tensor, _head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return visible(case, t, s)

    torch._dynamo.reset()  # each length is compiled; after a few of one function it would go on without
    mask = create_block_mask(rule, None, None, case.length, case.length, device=query.device, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    scale = case.attributes.scale
    return lambda: compiled(query, key, value, block_mask=mask, scale=scale).transpose(1, 2)


def _sdpa(case: Case, inputs: Inputs) -> Run:
    """PyTorch's fused attention with a dense mask, ready made."""
    query, key, value = inputs.heads_first()
    position = torch.arange(case.length, device=query.device)
    mask = visible(case, position[:, None], position[None, :])
    scale = case.attributes.scale
    return lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def _flash(case: Case, inputs: Inputs) -> Run:
    """FlashAttention's window."""
    from flash_attn import flash_attn_func

    g = case.geometry
    options = {
        "softmax_scale": case.attributes.scale,
        "causal": case.causal,
        "window_size": (g.backward_reach, 0 if case.causal else g.forward_reach),
    }
    return lambda: flash_attn_func(inputs.query, inputs.key, inputs.value, **options)


def _cudnn(case: Case, inputs: Inputs) -> Run:
    """cuDNN's sliding window: keys `t - left < s ≤ t + right`."""
    import cudnn

    kinds = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    g = case.geometry
    graph = cudnn.pygraph(
        io_data_type=kinds[inputs.query.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    tensors = [x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value)]  # dimensions B, H, N, D
    described = [graph.tensor_like(x) for x in tensors]
    result, _ = graph.sdpa(
        name="window",
        q=described[0],
        k=described[1],
        v=described[2],
        is_inference=True,
        attn_scale=case.attributes.scale,
        diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound=g.backward_reach + 1,
        diagonal_band_right_bound=0 if case.causal else g.forward_reach,
    )
    output = torch.empty_like(inputs.query)
    strided = output.transpose(1, 2)
    result.set_output(True).set_dim(list(strided.shape)).set_stride(list(strided.stride()))
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(graph.get_workspace_size(), device=output.device, dtype=torch.uint8)
    bindings: dict[Any, Tensor] = {**dict(zip(described, tensors, strict=True)), result: strided}

    def run() -> Tensor:
        graph.execute(bindings, workspace)
        return output

    return run


def _always(_case: Case) -> str:
    return ""


def _exact_only(package: str, install: str) -> Callable[[Case], str]:
    """For libraries whose windows are distances."""

    def why_not(case: Case) -> str:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install {install})"
        return "" if case.exact else "it has no block-local window"

    return why_not


def _dense(case: Case) -> str:
    return "" if case.length <= _LONGEST_DENSE else f"a dense mask of {case.length}² entries"


CANDIDATES = {
    "kernel": Candidate("localattn kernel", _ours("kernel"), _always, ours=True),
    "ptx": Candidate("the plugins' PTX", _ours("ptx"), _always, ours=True),
    "cubin": Candidate("the plugins' cubin", _ours("cubin"), _always, ours=True),
    "flex": Candidate("FlexAttention", _flex, _always),
    "cudnn": Candidate("cuDNN sliding window", _cudnn, _exact_only("cudnn", "nvidia-cudnn-frontend")),
    "flash": Candidate("FlashAttention", _flash, _exact_only("flash_attn", "flash-attn")),
    "sdpa": Candidate("SDPA, dense mask", _sdpa, _dense),
}
