"""List the compiled kernels of the AFT-local nodes, and their common arguments.

All tensors are fp32, but the mask. One kernel serves every length, batch, number of channels and reach of the biases.
The order is inputs, scalars, output; shapes are those of `core.nodes.aft`:

=======================  ==========================================================
`gate, key, value`       pointers, contiguous `[T, B, D]`
`position_bias`          pointer, contiguous `[T, R]`
`key_mask`               pointer, uint8 or bool `[B, T]`, 0 = hidden; only if `has_mask`
`length, batch, dim`     T, B, D
`reach`                  how far the biases reach
`output`                 pointer, as gate
=======================  ==========================================================

The launch grid is `(⌈T / block_queries⌉, B·⌈D / block_channels⌉, 1)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...core.nodes.aft import AftVariant
from .spec import Arguments, Flags, Tile

# Keys of the tile are channels here.
TILE = Tile(32, 32, 4, 1)
SCALARS = ("length", "batch", "dim", "reach")


@dataclass(frozen=True)
class AftSpec(Arguments):
    """One compiled kernel of an AFT-local node.

    Args:
        causal: a query sees no later key.
        has_mask: there is a key mask.
    """

    scalars: ClassVar[tuple[str, ...]] = SCALARS

    causal: bool
    has_mask: bool
    node: str = field(default="gated_mean", init=False)
    dtype: str = field(default="fp32", init=False)
    head_dim: int = field(default=0, init=False)  # it has no heads

    @property
    def variant(self) -> AftVariant:
        """The op type it serves."""
        return AftVariant(causal=self.causal, has_mask=self.has_mask)

    @property
    def op_types(self) -> tuple[str, ...]:
        """The op types it serves."""
        return (self.variant.op_type,)

    @property
    def name(self) -> str:
        """Name of the compiled kernel: a C identifier, unique among specs."""
        return "localattn_aft" + "_causal" * self.causal + "_mask" * self.has_mask

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in order."""
        return self.variant.input_names

    @property
    def flags(self) -> Flags:
        """As `KernelSpec.flags`."""
        return Flags(mask=self.has_mask, aft=True, causal=self.causal)

    @property
    def pointers(self) -> dict[str, str]:
        """As `KernelSpec.pointers`."""
        return {"key_mask": "u8"} if self.has_mask else {}

    def constants(self, tile: Tile) -> dict[str, Any]:
        """Return what is compiled in, by the names of the kernel's parameters."""
        absent: dict[str, Any] = {} if self.has_mask else {"key_mask": None}
        sizes = {"BLOCK_QUERIES": tile.block_queries, "BLOCK_CHANNELS": tile.block_keys, "CAUSAL": self.causal}
        return absent | sizes


AFT_SPECS = tuple(AftSpec(causal, has_mask) for causal in (False, True) for has_mask in (False, True))


def grid(tile: Tile, length: int, batch: int, dim: int) -> tuple[int, int, int]:
    """Return the launch grid for `B` sequences of `T` positions with `D` channels."""
    return -(-length // tile.block_queries), batch * -(-dim // tile.block_keys), 1
