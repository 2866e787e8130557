"""List the GPUs that kernels are compiled for: compute capability, PTX version, devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...core.errors import UsageError
from ...core.nodes.gpu import OLDEST_WITH_FP8

# Which of the tensor core instructions Triton uses: mma (also on sm_120), wgmma, tcgen05.
MatrixUnit = Literal["mma", "wgmma", "tcgen05"]


@dataclass(frozen=True)
class Target:
    """One compute capability.

    Args:
        capability: 87 for compute capability 8.7.
        ptx_version: version of the PTX text, 80 for 8.0; the oldest that has the instructions used, so that
            the oldest drivers take it (CUDA 12.0 takes 8.0, 12.8 takes 8.7, 13.0 takes 9.0).
        matrix_unit: the tensor core instructions the kernel uses there.
        devices: well-known devices, for messages.
    """

    capability: int
    ptx_version: int
    matrix_unit: MatrixUnit
    devices: str

    @property
    def name(self) -> str:
        """`sm_87`."""
        return f"sm_{self.capability}"

    @property
    def portable_ptx(self) -> bool:
        """Whether its PTX also runs on later devices, which PTX with wgmma or tcgen05 does not."""
        return self.capability < 90


TARGETS = {
    target.name: target
    for target in (
        Target(80, 80, "mma", "A100, A30"),
        Target(86, 80, "mma", "RTX 30 series, A2, A10, A40"),
        Target(87, 80, "mma", "Jetson Orin"),
        Target(89, 80, "mma", "RTX 40 series, L4, L40"),
        Target(90, 80, "wgmma", "H100, H200, GH200"),
        Target(100, 86, "tcgen05", "B200, GB200"),
        Target(103, 88, "tcgen05", "B300, GB300"),
        Target(110, 90, "tcgen05", "Jetson Thor"),
        Target(120, 87, "mma", "RTX 50 series, RTX PRO Blackwell"),
        Target(121, 88, "mma", "DGX Spark (GB10)"),
    )
}

# The oldest: its PTX runs on all later devices.
OLDEST = min(TARGETS.values(), key=lambda target: target.capability)
# The oldest target with fp8 matrix products, and the PTX version that has them for mma (drivers of CUDA 12.4).
OLDEST_OF_FP8, FP8_PTX_VERSION = TARGETS[f"sm_{OLDEST_WITH_FP8}"], 84

# Targets that are not supported, with the reason.
REFUSED = {
    "sm_75": "Triton cannot use its tensor cores: the kernel needs all 255 registers and spills 1 to 4 kB per thread.",
}


def target(name: str) -> Target:
    """Return the target called `sm_87`, or `87`, or `8.7`.

    Raises:
        UsageError: none is called so, or the kernel does not run there.
    """
    plain = "sm_" + name.strip().lower().removeprefix("sm_").removeprefix("sm").replace(".", "")
    if plain in TARGETS:
        return TARGETS[plain]
    known = ", ".join(f"{known.name} ({known.devices})" for known in TARGETS.values())
    if plain in REFUSED:
        raise UsageError(f"The kernel is not compiled for {plain}.", why=REFUSED[plain], fix=f"Known: {known}.")
    raise UsageError(f"There is no GPU target {name!r}.", fix=f"Known: {known}.")
