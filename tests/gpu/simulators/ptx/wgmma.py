"""Products of a warpgroup (four warps), whose right factor lies in shared memory: `wgmma`, Hopper.

The 64-bit descriptor of a matrix: bits 0–13 its address, 16–29 the leading and 32–45 the stride offset, each divided
by 16; 62–63 the swizzle. Rows of as many bytes as the swizzle is wide (128, 64 or 32) lie in groups of eight, one after
the other; 16-byte pieces are permuted within a row by its number: bits 4–6 of an address are xored with bits 7–9 (see
"Asynchronous Warpgroup Level Matrix Shared Memory Layout" of the PTX ISA).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .blocks import NUMPY, Blocks, handles
from .groups import Groups
from .memory import Array
from .program import Immediate, Instruction, Operand, PtxFault, Register, Vector
from .scalar import numbers
from .warp import COLUMNS, ROW, by_thread, by_warp, left_factor, left_factor_tf32

DEPTH = 16  # of a product of halves, in elements
DEPTH_TF32, DEPTH_E4M3 = 8, 32
# Swizzle of a descriptor → bytes of a row.
_WIDTHS = {1: 128, 2: 64, 3: 32}


def swizzled(address: Array, width: int) -> Array:
    """Where a byte lies whose address would be this in rows of `width` bytes."""
    return address ^ ((address >> 7) & (width // 16 - 1)) << 4


def offsets(
    outer: Array, inner: Array, width: int, leading: int, stride: int, inner_is_contiguous: bool, size: int = 2
) -> Array:
    """Offsets in bytes of elements `(outer, inner)`; inner is the axis that products sum over.

    Args:
        outer: rows of the left or columns of the right factor.
        inner: index of the sum.
        width: bytes of a row in memory.
        leading: the descriptor's leading offset, in bytes.
        stride: its stride offset.
        inner_is_contiguous: rows in memory run along the inner axis ("K-major"), not the outer one.
        size: bytes an element; those of four lie only so.
    """
    if inner_is_contiguous:
        return outer // 8 * stride + outer % 8 * width + size * inner
    if size == 4:
        raise PtxFault("a matrix of TF32 whose rows do not run along the sum")
    row = width // size
    return outer // row * leading + inner // 8 * stride + inner % 8 * width + outer % row * size


def read_matrix(
    blocks: Blocks, descriptor: Array, size: int, width: int, inner_is_contiguous: bool, depth: int = DEPTH
) -> Array:
    """The matrix `[blocks, size, depth]` of bits that a descriptor a block names; elements fill 32 bytes of a row."""
    outer, inner = np.meshgrid(np.arange(size), np.arange(depth), indexing="ij")
    element = 2 * DEPTH // depth
    start, leading, stride = ((descriptor >> shift & 0x3FFF).astype(np.int64) << 4 for shift in (0, 16, 32))
    address = np.stack(
        [
            swizzled(base + offsets(outer, inner, width, int(lead), int(step), inner_is_contiguous, element), width)
            for base, lead, step in zip(start, leading, stride, strict=True)
        ]
    )
    block = np.broadcast_to(np.arange(blocks.count)[:, None, None], address.shape)
    # Read by no warp: what any warp wrote must have been made visible by a barrier.
    warp = np.full(address.size, -2, np.int16)
    return blocks.shared.load(block.ravel(), address.ravel(), element, warp).reshape(address.shape)


def uniform(values: Array, what: str) -> Any:
    """The one value of all threads of a block, `[blocks]`."""
    if (values != values[:, :1]).any():
        raise PtxFault(f"threads disagree on {what}")
    return values[:, 0]


@handles("wgmma.mma_async.sync.aligned")
def _multiply(blocks: Blocks, instruction: Instruction) -> None:
    """`d = a·b + d`, or `a·b`, in fp32: 64 × 16 halves from registers, 16 × n from shared memory.

    Of TF32 they are 8 numbers deep, of E4M3 32.
    """
    blocks.taking_part()
    result, a, b, add, scale_a, scale_b, *transposed = instruction.operands
    if not isinstance(a, Vector) or [scale_a, scale_b] != [Immediate("1")] * 2:
        raise PtxFault("a product of another form")
    kind = instruction.type
    depth = {"tf32": DEPTH_TF32, "e4m3": DEPTH_E4M3}.get(kind, DEPTH)
    size = int(re.findall(rf"m64n(\d+)k{depth}\b", instruction.opcode)[0])
    registers = by_warp(blocks.read_all(a, NUMPY["b32"]))
    left = left_factor_tf32(registers) if kind == "tf32" else left_factor(registers, kind)
    descriptor = uniform(blocks.read(b, NUMPY["b64"]), "a matrix")
    width = _WIDTHS[int(descriptor[0] >> np.uint64(62))]
    along_sum = transposed in ([], [Immediate("0")])
    right = numbers(read_matrix(blocks, descriptor, size, width, along_sum, depth), kind)
    product = left @ right.swapaxes(1, 2)[:, None]
    sums = np.zeros((*product.shape[:2], 32, size // 2), np.float32)
    blocks.unready = blocks.unready - _names(result)  # one product may follow another into the same sums
    if uniform(blocks.read(add, NUMPY["pred"]), "a sum").all():
        sums = by_warp(blocks.read_all(result, NUMPY["f32"])).copy()
    for part in range(size // 4):
        row, column = part % 2 * 8, part // 2 * 8
        sums[..., 2 * part : 2 * part + 2] += product[:, :, row + ROW[:, None], column + COLUMNS]
    blocks.write_all(result, by_thread(sums))
    _products(blocks).start((_names(result), _names(a)))
    _hold(blocks)


Names = frozenset[str]


def _names(operand: Operand) -> Names:
    parts = operand.parts if isinstance(operand, Vector) else ()
    return frozenset(part.name for part in parts if isinstance(part, Register))


def _products(blocks: Blocks) -> Groups[tuple[Names, Names]]:
    """Results and factors of the products that were started."""
    groups: Groups[tuple[Names, Names]] = blocks.extra.setdefault("products", Groups())
    return groups


def _hold(blocks: Blocks) -> None:
    """Registers of products under way: results must not be read, factors not be overwritten."""
    running = _products(blocks)
    blocks.unready = frozenset().union(*(results for results, _ in running))
    blocks.in_use = frozenset().union(*(factors for _, factors in running))


@handles("wgmma.commit_group")
def _commit(blocks: Blocks, instruction: Instruction) -> None:
    blocks.taking_part()
    _products(blocks).commit()


@handles("wgmma.wait_group")
def _wait(blocks: Blocks, instruction: Instruction) -> None:
    """All groups of products but the latest few have ended."""
    blocks.taking_part()
    left = int(blocks.read(instruction.operands[0], NUMPY["u32"])[0, 0])
    _products(blocks).wait(left)
    _hold(blocks)
