"""Describe an engine to build, and the GPUs it can be built for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .....core.error_texts import argument
from .....core.errors import UsageError
from ..device import Device
from ..library import TensorRTLibrary

# Users' names of GPU series, and their compute capabilities.
SERIES = {"rtx20": 75, "rtx30": 86, "rtx40": 89, "rtx50": 120}

# The default targets of TensorRT-RTX without a GPU: the desktop GPUs it is made for.
DEFAULT_TARGETS = (86, 89, 120)


def capability(target: str) -> int:
    """Return the compute capability of a target: "rtx40", "sm_89", "sm89", "8.9" and "89" are 89.

    Raises:
        UsageError: it is none of these.
    """
    text = target.strip().lower()
    if text in SERIES:
        return SERIES[text]
    digits = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", text)
    if digits is None:
        raise UsageError(
            f"There is no GPU target {target!r}.",
            fix=f"Known: {', '.join(SERIES)}, or a compute capability as sm_89 or 8.9.",
        )
    return 10 * int(digits[1]) + int(digits[2])


def resolve_targets(opened: TensorRTLibrary, wanted: Sequence[str], device: Device | None) -> list[int]:
    """Return the compute capabilities to build for.

    Args:
        opened: the library that builds.
        wanted: the targets that the user named; none for the default.
        device: the GPU here; None without one.

    Raises:
        UsageError: the library cannot build for one of them here.
    """
    named = list(dict.fromkeys(capability(target) for target in wanted))
    if not opened.has("builds_without_gpu"):
        assert device is not None, "the caller has looked for it"
        if any(target != device.capability for target in named):
            others = ", ".join(f"sm_{target}" for target in named)
            raise UsageError(
                f"TensorRT cannot build for {others} here.",
                why=f"It builds for the GPU it runs on, which is {device.describe()}.",
                fix=f"Build on the target device, or use {argument('backend', 'tensorrt-rtx')} for an RTX GPU.",
            )
        return [device.capability]
    if not named:
        named = [device.capability] if device is not None else list(DEFAULT_TARGETS)
    listed = (re.fullmatch(r"SM(\d+)", name) for name in opened.trt.ComputeCapability.__members__)
    known = sorted(int(match[1]) for match in listed if match)
    unknown = [f"sm_{target}" for target in named if target not in known]
    if unknown:
        raise UsageError(
            f"{opened.library.name} {opened.version} does not build for {', '.join(unknown)}.",
            fix=f"It builds for {', '.join(f'sm_{target}' for target in known)}.",
        )
    return named
