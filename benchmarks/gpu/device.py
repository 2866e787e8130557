"""What the GPU of this machine can do at best: its maker's word, else as measured."""

from __future__ import annotations

from typing import Any

from localattn.core.errors import MissingDependency

from .cases import Device, data_sheet


def device_of_this_machine() -> tuple[str, Device]:
    """Name and limits of the first GPU.

    Raises:
        MissingDependency: there is none that PyTorch can use.
    """
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency(
            "There is no GPU that PyTorch can use.",
            why=f"torch {torch.__version__} finds no CUDA device.",
            fix="Run this where an NVIDIA GPU is, with a CUDA build of torch; --dry-run lists the cases anywhere.",
        )
    properties = torch.cuda.get_device_properties(0)
    name = str(properties.name)
    known = data_sheet(name, properties.multi_processor_count, _clock_hz(properties))
    return name, known or _measured()


def _measured() -> Device:
    """The bandwidth of a copy and the rate of a large matrix product, where no data sheet is known."""
    import torch
    from triton.testing import do_bench

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source)) / 1e3
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    product = do_bench(lambda: matrix @ matrix) / 1e3
    properties = torch.cuda.get_device_properties(0)
    exponentials = 16 * properties.multi_processor_count * _clock_hz(properties)
    return Device(2 * source.numel() / copy, 2 * 8192**3 / product, exponentials, "measured")


def _clock_hz(properties: Any) -> float:
    """The processor clock; an estimate where PyTorch does not tell."""
    return float(getattr(properties, "clock_rate", 1_500_000)) * 1e3
