"""List the compiled kernels of the step and chunk nodes, and their common arguments.

A node is `core.nodes.step`'s. All heads of queries that share a head of keys, and all tokens of a call, are rows of one
product: `rows = H / KV · C`. Where few programs would have many keys each, the keys are cut into `splits`; each split
leaves the parts of its rows, and a second kernel joins them, in the same order at every call.

With `V` keys that are attended to (`R` of a step, `R + C` of a chunk), the order is inputs, scalars, outputs:

==========================  ====================================================================
`query`                     pointer, contiguous `[B, H, C, D]`
`key, value`                pointers, `[B, KV, C, D]`
`key_cache, value_cache`    pointers, `[B, KV, R, D]`
`score_bias`                pointer, fp32 `[C, V]`, `[H, C, V]` or `[B, 1, C, V]`, as `biases` says
`write_index`               pointer, int64 `[B, KV, 1, 3]` of a step, `[R]` of a chunk
`query_scale`               pointer, fp32 `[C, D]`; only of a chunk with `has_xpos`
`key_scale`                 pointer, fp32 `[V, D]`; only if `has_xpos`
`sinks`                     pointer, `[H]` of the query's type; only if `has_sinks`
`tokens, slots`             C, R
`kv_heads, group`           KV, H / KV
`biases`                    0: shared by all, 1: one a head of keys, 2: one a sequence
`span, splits`              keys of a split, a multiple of `SPAN_UNIT`; how many splits there are
`scale_bits, softcap_bits`  the bits of the fp32 factor of the scores, and of their cap
`parts`                     pointer, fp32 `[B, KV, splits, rows, D + 2]`: sums, then total and maximum; only written
                            if there are several splits
`output`                    pointer, as query; only written if there is one split
`next_key, next_value`      pointers, as the caches; those of a step may be the caches themselves
==========================  ====================================================================

Its launch grid is `(⌈rows / block_queries⌉ · splits, B·KV, 1)`. The kernel that joins takes `parts`, then `rows`,
`splits`, `dim`, then `output`; its grid is `(rows, B·KV, 1)`.

In bf16 files the caches are fp32, and so are new keys and values; all of them hold bf16 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ...core.errors import UsageError
from ...core.nodes.gpu import RINGS, RINGS_BY_OP_TYPE, WIDEST_FP32_RING_HEAD
from ...core.nodes.step import StepAttributes, StepVariant
from .spec import FULL_SET_TYPES, MAX_BATCH_HEADS, Arguments, Flags, Tile, check_type_and_width, float_bits

SCALARS = ("tokens", "slots", "kv_heads", "group", "biases", "span", "splits", "scale_bits", "softcap_bits")
SHARED, BY_HEAD, BY_SEQUENCE = range(3)
# Head sizes of the full set: those of models that generate token by token.
RING_HEAD_DIMS = (64, 128)
# The number of keys in a split is a multiple of this.
SPAN_UNIT = 64
# Enough for two programs on each multiprocessor of an H200; smaller devices run more of them in turn.
PROGRAMS = 264
# A split has at least this many keys, and fewer keys are not split, because joining needs another launch.
LEAST_SPAN, SPLIT_FROM = 256, 1024
_INT32_END = 2**31


@dataclass(frozen=True)
class RingSpec(Arguments):
    """One compiled kernel of a step or chunk node.

    Args:
        node: "step" or "chunk".
        dtype: element type of query and output: "fp16", "bf16" or "fp32".
        head_dim: `D`, 16 to 256.
        has_xpos: keys, and a chunk's queries, have scales.
        has_softcap: scores are capped.
        has_sinks: there is a sink for each head.

    Raises:
        UsageError: another element type or head size, or what no node has together.
    """

    scalars: ClassVar[tuple[str, ...]] = SCALARS
    outputs: ClassVar[tuple[str, ...]] = ("parts", "output", "next_key", "next_value")

    node: Literal["step", "chunk"]
    dtype: str
    head_dim: int
    has_xpos: bool = False
    has_softcap: bool = False
    has_sinks: bool = False

    def __post_init__(self) -> None:
        check_type_and_width(self.dtype, self.head_dim, FULL_SET_TYPES)
        if self.dtype == "fp32" and self.head_dim > WIDEST_FP32_RING_HEAD:
            raise UsageError(
                f"There is no {self.node} kernel for fp32 heads of size {self.head_dim}.",
                why=f"Up to {WIDEST_FP32_RING_HEAD} are supported: wider heads do not fit in registers.",
                fix="Use the node's ONNX function, which supports any head size.",
            )
        if not self.op_types:
            raise UsageError(
                f"There is no {self.node} kernel with these inputs.",
                why="No supported node has this combination of inputs.",
            )

    @property
    def chunked(self) -> bool:
        """Whether it takes several tokens."""
        return self.node == "chunk"

    @property
    def padded_head_dim(self) -> int:
        """The power of two that a row fills in the kernel."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def cache_dtype(self) -> str:
        """Element type of keys, values and caches."""
        return "fp16" if self.dtype == "fp16" else "fp32"

    @property
    def op_types(self) -> tuple[str, ...]:
        """The op types of the nodes it serves."""
        return tuple(
            node.op_type
            for node in RINGS
            if node.chunked == self.chunked
            and node.has_xpos == self.has_xpos
            and node.has_softcap == self.has_softcap
            and node.has_sinks == self.has_sinks
        )

    @property
    def name(self) -> str:
        """Name of the compiled kernel: a C identifier, unique among specs."""
        options = "_xpos" * self.has_xpos + "_softcap" * self.has_softcap + "_sinks" * self.has_sinks
        return f"localattn_{self.node}_{self.dtype}_d{self.head_dim}{options}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in order."""
        return RINGS_BY_OP_TYPE[self.op_types[0]].input_names

    @property
    def pointers(self) -> dict[str, str]:
        """Triton's names of the element types of tensors that differ from the query's."""
        keys_and_values = ("key", "value", "key_cache", "value_cache", "next_key", "next_value")
        types = dict.fromkeys(keys_and_values, self.cache_dtype)
        types |= dict.fromkeys(("score_bias", "query_scale", "key_scale", "parts"), "fp32")
        types["write_index"] = "i64"
        return {name: type_ for name, type_ in types.items() if name in self.arguments}

    @property
    def flags(self) -> Flags:
        """As `KernelSpec.flags`."""
        return Flags(
            xpos=self.has_xpos, softcap=self.has_softcap, sinks=self.has_sinks, ring=True, chunked=self.chunked
        )

    def constants(self, tile: Tile) -> dict[str, Any]:
        """Return what is compiled in, by the names of the kernel's parameters."""
        absent = {name: None for name in ("query_scale", "key_scale", "sinks") if name not in self.inputs}
        return absent | {
            "HEAD_DIM": self.head_dim,
            "PADDED": self.padded_head_dim,
            "BLOCK_ROWS": tile.block_queries,
            "BLOCK_KEYS": tile.block_keys,
            "CHUNKED": self.chunked,
            "HAS_SOFTCAP": self.has_softcap,
        }


@dataclass(frozen=True)
class JoinSpec(Arguments):
    """The kernel that joins the splits of a step or chunk node, of any head size and number of rows.

    Args:
        dtype: element type of the output.
    """

    scalars: ClassVar[tuple[str, ...]] = ("rows", "splits", "dim")

    dtype: str
    node: str = field(default="join", init=False)
    head_dim: int = field(default=0, init=False)  # any

    @property
    def op_types(self) -> tuple[str, ...]:
        """The op types of the nodes it serves."""
        return tuple(variant.op_type for variant in RINGS)

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"localattn_join_{self.dtype}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in order."""
        return ("parts",)

    @property
    def pointers(self) -> dict[str, str]:
        """As `RingSpec.pointers`."""
        return {"parts": "fp32"}

    @property
    def flags(self) -> Flags:
        """As `KernelSpec.flags`."""
        return Flags(ring=True, joins=True)

    def constants(self, tile: Tile) -> dict[str, Any]:
        """Return what is compiled in, by the names of the kernel's parameters."""
        return {"BLOCK_SPLITS": tile.block_keys, "BLOCK_CHANNELS": 256}


def ring_specs_for(variant: StepVariant, dtype: str, head_dim: int) -> tuple[RingSpec, JoinSpec]:
    """Return the kernels that serve an op type.

    Raises:
        UsageError: no kernel has this element type or head size.
    """
    node: Literal["step", "chunk"] = "chunk" if variant.chunked else "step"
    spec = RingSpec(node, dtype, head_dim, variant.has_xpos, variant.has_softcap, variant.has_sinks)
    return spec, JoinSpec(dtype)


def ring_set(dtypes: Iterable[str] = (), head_dims: Iterable[int] = ()) -> list[RingSpec | JoinSpec]:
    """Return the kernels of every op type in these element types and head sizes.

    Without head sizes, those of the full set, which has no xpos, softcap or sinks: such kernels are built for a model.

    Raises:
        UsageError: an element type or head size without a kernel.
    """
    asked = tuple(head_dims)
    found: dict[RingSpec | JoinSpec, None] = {}
    for dtype in tuple(dtypes) or FULL_SET_TYPES:
        if dtype not in FULL_SET_TYPES:
            continue
        for head_dim in asked or RING_HEAD_DIMS:
            if dtype == "fp32" and head_dim > WIDEST_FP32_RING_HEAD:
                continue
            for variant in RINGS:
                rare = variant.has_xpos or variant.has_softcap or variant.has_sinks
                if (asked or not rare) and not (variant.has_xpos and head_dim % 2):
                    found |= dict.fromkeys(ring_specs_for(variant, dtype, head_dim))
    return list(found)


@dataclass(frozen=True)
class Plan:
    """Describe how a call is split: rows per head of keys, keys, keys per split, splits, parallel programs."""

    rows: int
    keys: int
    span: int
    splits: int
    grid: tuple[int, int, int]

    @property
    def join_grid(self) -> tuple[int, int, int]:
        """The launch grid of the kernel that joins."""
        return (self.rows, self.grid[1], 1)

    @property
    def parts(self) -> int:
        """The number of partial rows; 0 without splits."""
        return self.rows * self.splits * self.grid[1] if self.splits > 1 else 0


def plan(tile: Tile, *, batch: int, kv_heads: int, group: int, tokens: int, slots: int, chunked: bool) -> Plan:
    """Return how a call is split; this depends only on sizes, so that every device adds in the same order."""
    rows, keys = group * tokens, slots + chunked * tokens
    blocks = -(-rows // tile.block_queries)
    most = keys // LEAST_SPAN if keys >= SPLIT_FROM else 1
    splits = min(-(-PROGRAMS // (blocks * batch * kv_heads)), most)
    span = -(-keys // (splits * SPAN_UNIT)) * SPAN_UNIT
    splits = -(-keys // span)
    return Plan(rows, keys, span, splits, (blocks * splits, batch * kv_heads, 1))


def pack_ring_scalars(
    attributes: StepAttributes, cut: Plan, *, tokens: int, slots: int, kv_heads: int, biases: int
) -> tuple[int, ...]:
    """Return the int32 arguments, in the order of `SCALARS`."""
    bits = (float_bits(attributes.scale), float_bits(attributes.softcap))
    return (tokens, slots, kv_heads, cut.rows // tokens, biases, cut.span, cut.splits, *bits)


def why_ring_unsupported(*, batch: int, heads: int, kv_heads: int, tokens: int, slots: int) -> str:
    """Return why no compiled kernel supports a node of this size; empty if one does."""
    if kv_heads < 1 or heads % kv_heads:
        return f"{heads} heads of queries cannot share {kv_heads} heads of keys"
    if batch * kv_heads > MAX_BATCH_HEADS:
        return f"batch times heads of keys is {batch * kv_heads}; the limit is {MAX_BATCH_HEADS}"
    if (slots + tokens) * max(tokens, heads // kv_heads) + SPAN_UNIT >= _INT32_END:
        return f"{tokens} tokens and {slots} slots overflow 32-bit positions"
    return ""
