"""List the compiled kernels, and their common arguments.

One compiled kernel serves every window geometry, scale, layout, length, batch and number of heads: those are
arguments at run time. Compiled in are the element type, the head size, which optional inputs there are, xpos,
softcap and shared_qk.
So the kernels of `WindowedAttention` also serve the grouped nodes with neither softcap nor sinks.
All arguments but the tensors are int32, because TensorRT's ahead-of-time plugins can pass nothing else.
The order is inputs, scalars, output:

===================  =========================================================================
`query, key, value`  pointers, contiguous `[B, H, N, D]`, or `[B, N, H, D]` if `SEQUENCE_FIRST_FLAG`;
                     key and value with `kv_heads` instead of H; in fp8 E4M3 numbers, whose scales are the
                     caller's: those of query and key are factors of `scale_bits`, the value's of the output
`key_mask`           pointer, uint8 or bool `[B, N]`, 0 = hidden; only if `has_mask`
`attn_bias`          pointer, `[H, window_size, K]` of the query's type; only if `has_bias`
`sinks`              pointer, `[H]` of the query's type; only if `has_sinks`
`length`             N
`heads`              H
`kv_heads`           heads of key and value, a divisor of H
`window_size`        w, for nodes that see all keys N; then `look_backward`, `look_forward` in windows
`flags`              sum of the flags below
`scale_bits`         the bits of the fp32 factor of the scores
`softcap_bits`       the bits of the fp32 cap of the scores, 0 without
`xpos_base_bits`     the bits of the fp32 base of the xpos decay; only read if `has_xpos`
`output`             pointer, as query; fp16 where that is fp8
===================  =========================================================================

The launch grid is `(⌈N / block_queries⌉, B·H, 1)`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from ...core.errors import UsageError
from ...core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST, NodeVariant, check_xpos
from ...core.nodes.gpu import (
    NARROWEST_HEAD,
    SERVED,
    SMALLEST_XPOS_BASE,
    WIDEST_FP8_HEAD,
    WIDEST_HEAD,
    KernelAttributes,
    KernelNode,
)

CAUSAL_FLAG, EXACT_FLAG, SEQUENCE_FIRST_FLAG = 1, 2, 4
SCALARS = (
    *("length", "heads", "kv_heads", "window_size", "look_backward", "look_forward", "flags"),
    *("scale_bits", "softcap_bits", "xpos_base_bits"),
)

# How factors of fp32 are multiplied: exactly, as three products of TF32 (about fp32's digits, on tensor cores), or as
# one (the digits of fp16).
Fp32Products = Literal["ieee", "tf32x3", "tf32"]

# The launch grid's second axis, B·H, has at most this many programs.
MAX_BATCH_HEADS = 65535
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = NARROWEST_HEAD, WIDEST_HEAD
LARGEST_TF32X3_HEAD_DIM = 128
_INT32_END = 2**31


@dataclass(frozen=True)
class ElementType:
    """An element type: Triton's name, and bytes per element."""

    triton: str
    size: int


ELEMENT_TYPES = {
    "fp16": ElementType("fp16", 2),
    "bf16": ElementType("bf16", 2),
    "fp32": ElementType("fp32", 4),
    "fp8": ElementType("fp8e4nv", 1),  # E4M3
}
# Element types of the full set, and of steps; fp8 kernels are built only on request or if a model needs them.
FULL_SET_TYPES = ("fp16", "bf16", "fp32")
# Default head sizes of fp8 kernels.
FP8_HEAD_DIMS = (64, 128)
# fp8 products combine 32 numbers at once.
_PADDED_FP8_HEAD = 32


class Options(NamedTuple):
    """What an op type of attention determines about its kernel: optional inputs and computations."""

    mask: bool
    bias: bool
    xpos: bool
    softcap: bool
    sinks: bool


class Flags(NamedTuple):
    """The options that distinguish kernels in the library, in its order; those of `Options` come first."""

    mask: bool = False
    bias: bool = False
    xpos: bool = False
    softcap: bool = False
    sinks: bool = False
    shared_qk: bool = False
    aft: bool = False
    causal: bool = False
    ring: bool = False
    chunked: bool = False
    joins: bool = False


class Arguments:
    """The arguments of a kernel: tensors that it reads, int32 numbers, tensors that it writes."""

    scalars: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]] = ("output",)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in order."""
        raise NotImplementedError

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments in order."""
        return (*self.inputs, *self.scalars, *self.outputs)


@dataclass(frozen=True)
class KernelSpec(Arguments):
    """One compiled kernel.

    Args:
        dtype: element type of query, key, value, bias and output: "fp16", "bf16", "fp32", or "fp8" (E4M3), whose output
            is fp16 and which goes with no input but a key mask.
        head_dim: `D`, 16 to 256; within the kernel it is padded to a power of two.
        has_mask: there is a key mask.
        has_bias: there is an additive bias.
        has_xpos: scores are scaled by the xpos decay.
        has_softcap: scores are capped.
        has_sinks: there is a sink for each head.
        has_shared_qk: a token's score with itself is a constant; only of nodes that do not share heads.
        fp32_products: how fp32 is multiplied; "ieee" for other element types.

    Raises:
        UsageError: another element type, head size or kind of products, or inputs that no node has together.
    """

    node: ClassVar[str] = "attention"
    scalars: ClassVar[tuple[str, ...]] = SCALARS

    dtype: str
    head_dim: int
    has_mask: bool = False
    has_bias: bool = False
    has_xpos: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    has_shared_qk: bool = False
    fp32_products: Fp32Products = "ieee"

    def __post_init__(self) -> None:
        check_type_and_width(self.dtype, self.head_dim)
        if self.dtype == "fp8" and not _fp8_takes(self.head_dim, self.options, shared_qk=self.has_shared_qk):
            raise UsageError(
                f"There is no fp8 attention kernel for head size {self.head_dim} and these inputs.",
                why=f"fp8 kernels support head sizes up to {WIDEST_FP8_HEAD} and a key mask, but no other input.",
                fix="Keep query, key and value of this node in fp16.",
            )
        if self.fp32_products not in _fp32_products(self.dtype, self.head_dim):
            raise UsageError(
                f"There is no attention kernel for {self.dtype}, head size {self.head_dim}, with {self.fp32_products} "
                "products.",
                fix=f"Known: {', '.join(_fp32_products(self.dtype, self.head_dim))}.",
            )
        if self.has_xpos:
            check_xpos(self.head_dim)
        if not self.op_types:
            raise UsageError(
                "There is no attention kernel with these inputs.",
                why="No supported node has this combination of inputs.",
            )

    @property
    def padded_head_dim(self) -> int:
        """The power of two that a row fills in the kernel."""
        return max(1 << (self.head_dim - 1).bit_length(), _PADDED_FP8_HEAD if self.dtype == "fp8" else 1)

    @property
    def output_dtype(self) -> str:
        """Element type of the output."""
        return "fp16" if self.dtype == "fp8" else self.dtype

    @property
    def element_size(self) -> int:
        """Bytes per element."""
        return ELEMENT_TYPES[self.dtype].size

    @property
    def op_types(self) -> tuple[str, ...]:
        """The op types of the nodes it serves."""
        alike = (node for node in SERVED if options_of(node) == self.options)
        return tuple(node.op_type for node in alike if isinstance(node, NodeVariant) or not self.has_shared_qk)

    @property
    def options(self) -> Options:
        """The options that follow from the op type."""
        return Options(self.has_mask, self.has_bias, self.has_xpos, self.has_softcap, self.has_sinks)

    @property
    def name(self) -> str:
        """Name of the compiled kernel: a C identifier, unique among specs."""
        parts = ["localattn", self.dtype, f"d{self.head_dim}"]
        parts += [option for option, there in self.options._asdict().items() if there]
        if self.has_shared_qk:
            parts.append("shared_qk")
        if self.fp32_products != "ieee":
            parts.append(self.fp32_products)
        return "_".join(parts)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in order."""
        optional = (("key_mask", self.has_mask), ("attn_bias", self.has_bias), ("sinks", self.has_sinks))
        return ("query", "key", "value", *(name for name, present in optional if present))

    @property
    def flags(self) -> Flags:
        """The options that distinguish kernels in the library."""
        return Flags(*self.options, shared_qk=self.has_shared_qk)

    @property
    def pointers(self) -> dict[str, str]:
        """Triton's names of the element types of tensors that differ from the query's."""
        others = {"output": ELEMENT_TYPES[self.output_dtype].triton} if self.output_dtype != self.dtype else {}
        return others | ({"key_mask": "u8"} if self.has_mask else {})

    def constants(self, tile: Tile) -> dict[str, Any]:
        """Return what is compiled in, by the names of the kernel's parameters."""
        absent = {name: None for name in ("key_mask", "attn_bias", "sinks") if name not in self.inputs}
        return absent | {
            "HEAD_DIM": self.head_dim,
            "PADDED": self.padded_head_dim,
            "BLOCK_QUERIES": tile.block_queries,
            "BLOCK_KEYS": tile.block_keys,
            "HAS_XPOS": self.has_xpos,
            "HAS_SOFTCAP": self.has_softcap,
            "HAS_SHARED_QK": self.has_shared_qk,
            "FP32_PRODUCTS": self.fp32_products,
        }


def check_type_and_width(dtype: str, head_dim: int, known: Collection[str] = ELEMENT_TYPES) -> None:
    """Refuse an unknown element type, or a head size that no attention kernel supports.

    Raises:
        UsageError: there is no such kernel.
    """
    if dtype not in known:
        raise UsageError(
            f"There is no attention kernel for element type {dtype!r}.",
            fix=f"Known: {', '.join(known)}.",
        )
    if not SMALLEST_HEAD_DIM <= head_dim <= LARGEST_HEAD_DIM:
        raise UsageError(
            f"There is no attention kernel for head size {head_dim}.",
            why=f"Sizes {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM} are supported: a tile holds whole rows in shared "
            "memory.",
            fix="Use the node's ONNX function, which supports any head size.",
        )


def _fp8_takes(head_dim: int, options: Options, *, shared_qk: bool) -> bool:
    """Return whether there is an fp8 kernel with these options: only a mask is supported."""
    return head_dim <= WIDEST_FP8_HEAD and not shared_qk and not any(options._replace(mask=False))


def _fp32_products(dtype: str, head_dim: int) -> tuple[Fp32Products, ...]:
    """Return the available ways to multiply; with wide heads, three TF32 products do not fit in registers."""
    if dtype != "fp32":
        return ("ieee",)
    return ("ieee", "tf32", "tf32x3") if head_dim <= LARGEST_TF32X3_HEAD_DIM else ("ieee", "tf32")


def options_of(node: KernelNode) -> Options:
    """Return `KernelSpec.options` of the kernels that serve an op type."""
    return Options(
        node.has_mask,
        node.has_bias,
        node.has_xpos,
        softcap=getattr(node, "has_softcap", False),
        sinks=getattr(node, "has_sinks", False),
    )


def spec_for(node: KernelNode, dtype: str, head_dim: int, *, shared_qk: bool = False) -> KernelSpec:
    """Return the kernel that serves an op type, with or without shared_qk.

    Raises:
        UsageError: no kernel has this element type or head size.
    """
    return KernelSpec(dtype, head_dim, *options_of(node), has_shared_qk=shared_qk)


# Every combination of options that occurs in nodes.
OPTIONS = tuple(dict.fromkeys(options_of(node) for node in SERVED))

# Head sizes of the full set; others are built only on request or if a model needs them.
HEAD_DIMS = (16, 32, 64, 128, 256)
# Rare options are in the full set only with the head sizes of their models: local-attention's default, Gemma 2's,
# gpt-oss's. No two of them come together there.
RARE_HEAD_DIMS = {"has_xpos": (64,), "has_softcap": (128, 256), "has_sinks": (64,), "has_shared_qk": (64,)}


def full_set(
    dtypes: Iterable[str] = (), head_dims: Iterable[int] = (), fp32_products: Fp32Products = "ieee"
) -> list[KernelSpec]:
    """Return the kernels of every op type in these element types (by default all but fp8) and head sizes.

    Without head sizes, those of the full set; rare options have fewer. `fp32_products` are "ieee" where there are no
    others.

    Raises:
        UsageError: an element type or head size without a kernel.
    """
    asked = tuple(head_dims)
    every = [
        KernelSpec(dtype, head_dim, *options, shared_qk)
        for dtype in (tuple(dtypes) or FULL_SET_TYPES)
        for head_dim in (asked or (FP8_HEAD_DIMS if dtype == "fp8" else HEAD_DIMS))
        for options in OPTIONS
        for shared_qk in (False, True)
        if not (options.xpos and head_dim % 2)  # xpos scales channels in pairs
        if not (shared_qk and (options.softcap or options.sinks))  # only grouped nodes have these
        if dtype != "fp8" or _fp8_takes(head_dim, options, shared_qk=shared_qk)
    ]
    return [multiplied(spec, fp32_products) for spec in every if asked or _in_full_set(spec)]


def multiplied(spec: KernelSpec, fp32_products: Fp32Products) -> KernelSpec:
    """Return a kernel that multiplies fp32 in this way, or the kernel itself if it does not support that."""
    there = fp32_products in _fp32_products(spec.dtype, spec.head_dim)
    return replace(spec, fp32_products=fp32_products) if there else spec


def _in_full_set(spec: KernelSpec) -> bool:
    """Return whether models are likely to need this kernel: at most one rare option, at its listed head sizes."""
    rare = [sizes for option, sizes in RARE_HEAD_DIMS.items() if getattr(spec, option)]
    return len(rare) < 2 and all(spec.head_dim in sizes for sizes in rare)


@dataclass(frozen=True)
class Tile:
    """Describe how the work is split into tiles.

    Args:
        block_queries: queries per program (thread block).
        block_keys: keys per step of its loop.
        warps: warps per program, of 32 threads.
        stages: tiles of keys and values in flight; 1 loads without overlap.
    """

    block_queries: int
    block_keys: int
    warps: int
    stages: int


def grid(tile: Tile, length: int, batch_heads: int) -> tuple[int, int, int]:
    """Return the launch grid for `B·H` sequences of `length` tokens."""
    return (-(-length // tile.block_queries), batch_heads, 1)


def pack_flags(attributes: KernelAttributes) -> int:
    """Return the argument `flags`."""
    return (
        CAUSAL_FLAG * attributes.geometry.causal
        + EXACT_FLAG * attributes.geometry.exact_windowsize
        + SEQUENCE_FIRST_FLAG * (tuple(attributes.perm) == SEQUENCE_FIRST)
    )


def float_bits(value: float) -> int:
    """Return the bits of an fp32 number as a signed integer."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


Size = TypeVar("Size")


def name_scalars(attributes: KernelAttributes, length: Size, heads: Size, kv_heads: Size) -> dict[str, Size | int]:
    """Return the int32 arguments by name, in the order of `SCALARS`; sizes are numbers, or expressions of them."""
    g = attributes.geometry
    return {
        "length": length,
        "heads": heads,
        "kv_heads": kv_heads,
        "window_size": length if g.sees_all else g.window_size,
        "look_backward": g.look_backward,
        "look_forward": g.look_forward,
        "flags": pack_flags(attributes),
        "scale_bits": float_bits(attributes.scale),
        "softcap_bits": float_bits(getattr(attributes, "softcap", 0.0)),
        "xpos_base_bits": float_bits(getattr(attributes, "xpos_scale_base", 0.0)),
    }


def pack_scalars(attributes: KernelAttributes, length: int, heads: int, kv_heads: int | None = None) -> tuple[int, ...]:
    """Return the int32 arguments, in the order of `SCALARS`; as many heads of keys as of queries by default."""
    return tuple(name_scalars(attributes, length, heads, heads if kv_heads is None else kv_heads).values())


def why_unsupported(
    attributes: KernelAttributes, *, batch: int, heads: int, length: int, kv_heads: int | None = None
) -> str:
    """Return why no compiled kernel supports this node at this size; empty if one does.

    The element type and the head size are `KernelSpec`'s to judge.
    """
    g = attributes.geometry
    xpos_base = getattr(attributes, "xpos_scale_base", 0.0)
    if xpos_base and xpos_base < SMALLEST_XPOS_BASE:
        return f"the xpos base is {xpos_base:g}; the minimum is {SMALLEST_XPOS_BASE:g}"
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        return f"{heads} heads of queries cannot share {kv_heads} heads of keys"
    if tuple(attributes.perm) not in (SEQUENCE_FIRST, HEADS_FIRST):
        return f"the layout {list(attributes.perm)} is neither [B, N, H, D] nor [B, H, N, D]"
    if batch * heads > MAX_BATCH_HEADS:
        return f"batch times heads is {batch * heads}; the limit is {MAX_BATCH_HEADS}"
    if g.sees_all:
        return f"length {length} overflows 32-bit positions" if 2 * length >= _INT32_END else ""
    if length + g.keys_per_window + g.window_size >= _INT32_END or g.keys_per_window * g.window_size >= _INT32_END:
        return f"length {length} and {g.keys_per_window} keys a window overflow 32-bit positions"
    return ""
