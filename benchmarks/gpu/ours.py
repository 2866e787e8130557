"""The kernel's three ways to a GPU: by Triton in PyTorch, and as the plugins hold it, as PTX and as machine code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from localattn.core.nodes.attention import NodeAttributes
from localattn.plugins.kernel.compile import CompiledKernel, compile_kernel
from localattn.plugins.kernel.launch import device_target, launch, spec_of
from localattn.plugins.kernel.spec import KernelSpec, pack_scalars
from localattn.plugins.kernel.targets import Target

from .driver import Arguments, Driver

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Call:
    """One call of the attention node.

    Args:
        attributes: window, scale and layout.
        query: contiguous, in that layout; key and value alike.
        key: as query.
        value: as query.
        key_mask: bool `[B, N]`.
        attn_bias: `[H, window_size, K]` of the query's type.
    """

    attributes: NodeAttributes
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None = None
    attn_bias: Tensor | None = None


def by_triton(call: Call) -> Run:
    """As PyTorch runs it."""
    tensors = call.query, call.key, call.value, call.key_mask, call.attn_bias
    return lambda: launch(*tensors, call.attributes)


def by_driver(image: str) -> Callable[[Call], Run]:
    """As the plugins launch it: from "ptx" or "cubin" through the CUDA driver, in their order of arguments."""

    def prepare(call: Call) -> Run:
        driver, kernel, function = _loaded(
            image,
            spec_of(call.query, call.key_mask, call.attn_bias, call.attributes),
            device_target(call.query.device),
        )
        output = torch.empty_like(call.query)
        given = (call.query, call.key, call.value, call.key_mask, call.attn_bias)
        addresses = [x.data_ptr() for x in given if x is not None]
        batch, heads, length = (call.query.shape[axis] for axis in call.attributes.perm[:3])
        scalars = pack_scalars(call.attributes, length, heads)
        arguments = Arguments.pack(addresses, scalars, output.data_ptr())

        def run() -> Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            driver.launch(function, kernel, arguments, length, batch * heads, stream)
            return output

        return run

    return prepare


@cache
def _loaded(image: str, spec: KernelSpec, target: Target) -> tuple[Driver, CompiledKernel, Any]:
    kernel = compile_kernel(spec, target)
    driver = Driver()
    return driver, kernel, driver.load(kernel.ptx.encode() if image == "ptx" else kernel.cubin, kernel.entry)


# Name → what prepares a call; `benchmarks.gpu.check` proves each, `benchmarks.gpu` measures each.
WAYS: dict[str, Callable[[Call], Run]] = {
    "kernel": by_triton,
    "ptx": by_driver("ptx"),
    "cubin": by_driver("cubin"),
}
