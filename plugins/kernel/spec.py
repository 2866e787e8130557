"""Which compiled kernels there are, and the arguments every one of them takes.

One compiled kernel serves every window geometry, scale, layout, length, batch and number of heads: those are
arguments at run time. Compiled in are the element type, the head size and which optional inputs there are.
All arguments but the tensors are int32, because TensorRT's ahead-of-time plugins can pass nothing else.
The order is inputs, scalars, output:

===================  =========================================================================
`query, key, value`  pointers, contiguous `[B, H, N, D]`, or `[B, N, H, D]` if `SEQUENCE_FIRST_FLAG`
`key_mask`           pointer, uint8 or bool `[B, N]`, 0 = hidden; only if `has_mask`
`attn_bias`          pointer, `[H, window_size, K]` of the query's type; only if `has_bias`
`length`             N
`heads`              H
`window_size`        w; then `look_backward`, `look_forward` in windows
`flags`              sum of the flags below
`scale_bits`         the bits of the fp32 factor of the scores
`output`             pointer, as query
===================  =========================================================================

The launch grid is `(⌈N / block_queries⌉, B·H, 1)`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...core.errors import UsageError
from ...core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST, NodeAttributes, NodeVariant, variant_for

CAUSAL_FLAG, EXACT_FLAG, SHARED_QK_FLAG, SEQUENCE_FIRST_FLAG = 1, 2, 4, 8
SCALARS = ("length", "heads", "window_size", "look_backward", "look_forward", "flags", "scale_bits")

# The launch grid's second axis holds at most this many programs: B·H.
MAX_BATCH_HEADS = 65535
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256
_INT32_END = 2**31


@dataclass(frozen=True)
class ElementType:
    """An element type: Triton's name of it, and bytes an element."""

    triton: str
    size: int


ELEMENT_TYPES = {"fp16": ElementType("fp16", 2), "bf16": ElementType("bf16", 2), "fp32": ElementType("fp32", 4)}


@dataclass(frozen=True)
class KernelSpec:
    """One compiled kernel.

    Args:
        dtype: element type of query, key, value, bias and output: "fp16", "bf16" or "fp32".
        head_dim: `D`, 16 to 256; within the kernel it is padded to a power of two.
        has_mask: there is a key mask.
        has_bias: there is an additive bias.

    Raises:
        UsageError: another element type or head size.
    """

    dtype: str
    head_dim: int
    has_mask: bool = False
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_TYPES:
            raise UsageError(
                f"There is no attention kernel for element type {self.dtype!r}.",
                fix=f"Known: {', '.join(ELEMENT_TYPES)}.",
            )
        if not SMALLEST_HEAD_DIM <= self.head_dim <= LARGEST_HEAD_DIM:
            raise UsageError(
                f"There is no attention kernel for heads {self.head_dim} wide.",
                why=f"It takes {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}: a tile holds whole rows in shared memory.",
                fix="Leave the attention node to its function definition, which takes any width.",
            )

    @property
    def padded_head_dim(self) -> int:
        """The power of two that a row fills in the kernel."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def element_size(self) -> int:
        """Bytes an element."""
        return ELEMENT_TYPES[self.dtype].size

    @property
    def variant(self) -> NodeVariant:
        """The node it serves."""
        return variant_for(has_mask=self.has_mask, has_bias=self.has_bias, has_xpos=False)

    @property
    def op_type(self) -> str:
        """The node's op type."""
        return self.variant.op_type

    @property
    def name(self) -> str:
        """Name of the compiled kernel: a C identifier, unique among specs."""
        return f"localattn_{self.dtype}_d{self.head_dim}" + "_mask" * self.has_mask + "_bias" * self.has_bias

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments in order."""
        return (*self.variant.input_names, *SCALARS, "output")


@dataclass(frozen=True)
class Tile:
    """How the work is cut.

    Args:
        block_queries: queries a program (a thread block).
        block_keys: keys a step of its loop.
        warps: warps a program, of 32 threads.
        stages: tiles of keys and values in flight; 1 loads without overlap.
    """

    block_queries: int
    block_keys: int
    warps: int
    stages: int


def grid(tile: Tile, length: int, batch_heads: int) -> tuple[int, int, int]:
    """The launch grid for `B·H` sequences of `length` tokens."""
    return (-(-length // tile.block_queries), batch_heads, 1)


def pack_flags(attributes: NodeAttributes) -> int:
    """The argument `flags`."""
    return (
        CAUSAL_FLAG * attributes.geometry.causal
        + EXACT_FLAG * attributes.geometry.exact_windowsize
        + SHARED_QK_FLAG * attributes.shared_qk
        + SEQUENCE_FIRST_FLAG * (tuple(attributes.perm) == SEQUENCE_FIRST)
    )


def scale_bits(scale: float) -> int:
    """The argument `scale_bits`: the fp32 value's bits as a signed integer."""
    bits: int = struct.unpack("<i", struct.pack("<f", scale))[0]
    return bits


def pack_scalars(attributes: NodeAttributes, length: int, heads: int) -> tuple[int, ...]:
    """The int32 arguments, in the order of `SCALARS`."""
    g = attributes.geometry
    return (
        length,
        heads,
        g.window_size,
        g.look_backward,
        g.look_forward,
        pack_flags(attributes),
        scale_bits(attributes.scale),
    )


def why_unsupported(attributes: NodeAttributes, *, batch: int, heads: int, length: int) -> str:
    """Why no compiled kernel computes this node at this size; empty if one does.

    The element type and the head size are `KernelSpec`'s to judge.
    """
    g = attributes.geometry
    if attributes.xpos_scale_base:
        return "xpos is not in the kernel"
    if tuple(attributes.perm) not in (SEQUENCE_FIRST, HEADS_FIRST):
        return f"the layout {list(attributes.perm)} is neither [B, N, H, D] nor [B, H, N, D]"
    if batch * heads > MAX_BATCH_HEADS:
        return f"batch times heads is {batch * heads}, above {MAX_BATCH_HEADS}"
    if length + g.keys_per_window + g.window_size >= _INT32_END or g.keys_per_window * g.window_size >= _INT32_END:
        return f"length {length} and {g.keys_per_window} keys a window overflow 32-bit positions"
    return ""
