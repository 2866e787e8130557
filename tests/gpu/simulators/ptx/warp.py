"""Instructions of a warp: shuffles, and 16-bit matrices spread over its registers.

Where a matrix's elements lie is told by "Matrix Fragments for mma.m16n8k16" and "ldmatrix" of the PTX ISA: of every
8 × 8 part, thread `t` of the warp holds row `t / 4`, columns `2·(t mod 4)` and the next, as the halves of a register.
Of a matrix of bytes ("Matrix Fragments for mma.m16n8k32") each such half is two neighbours of a row.
"""

from __future__ import annotations

import re

import numpy as np

from .blocks import NUMPY, Blocks, handles
from .memory import Array
from .program import Instruction, Operand, PtxFault
from .scalar import numbers

LANES = np.arange(32)
# Of an 8 × 8 part: row of each lane; columns of the two halves of its register.
ROW, COLUMNS = LANES // 4, 2 * (LANES % 4)[:, None] + np.arange(2)


def by_warp(values: Array) -> Array:
    """`[blocks, threads, …]` → `[blocks, warps, 32, …]`."""
    return values.reshape(values.shape[0], -1, 32, *values.shape[2:])


def by_thread(values: Array) -> Array:
    """The way back."""
    return values.reshape(values.shape[0], -1, *values.shape[3:])


def halves(registers: Array) -> Array:
    """`[…]` of 32 bits → `[…, 2]` of 16."""
    return np.ascontiguousarray(registers)[..., None].view(np.uint16)


def left_factor(registers: Array, kind: str) -> Array:
    """The 16 × 16 matrix of four registers a thread, `[blocks, warps, 32, 4]`, in fp32; of bytes 16 × 32."""
    matrix = np.empty((*registers.shape[:2], 16, 16), np.uint16)
    values = halves(registers)
    for part, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        matrix[:, :, row + ROW[:, None], column + COLUMNS] = values[:, :, :, part]
    return numbers(matrix, kind)


def _right_factor(registers: Array, kind: str) -> Array:
    """The 16 × 8 matrix of two registers a thread, of bytes 32 × 8."""
    columns = np.empty((*registers.shape[:2], 8, 16), np.uint16)
    values = halves(registers)
    for part in range(2):
        columns[:, :, ROW[:, None], 8 * part + COLUMNS] = values[:, :, :, part]
    return numbers(columns, kind).swapaxes(2, 3)


def left_factor_tf32(registers: Array) -> Array:
    """The 16 × 8 matrix of four registers a thread, one number each ("Matrix Fragments for mma.m16n8k8")."""
    matrix = np.empty((*registers.shape[:2], 16, 8), np.float32)
    for part, (row, column) in enumerate(((0, 0), (8, 0), (0, 4), (8, 4))):
        matrix[:, :, row + ROW, column + LANES % 4] = numbers(registers[:, :, :, part], "tf32")
    return matrix


@handles("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
def _multiply_tf32(blocks: Blocks, instruction: Instruction) -> None:
    """`d = a·b + c` for 16 × 8 and 8 × 8 numbers of TF32, sums in fp32."""
    blocks.taking_part()
    result, a, b, c = instruction.operands
    left = left_factor_tf32(by_warp(blocks.read_all(a, NUMPY["b32"])))
    registers = by_warp(blocks.read_all(b, NUMPY["b32"]))
    right = np.empty((*registers.shape[:2], 8, 8), np.float32)
    for part in range(2):
        right[:, :, 4 * part + LANES % 4, ROW] = numbers(registers[:, :, :, part], "tf32")
    _add_product(blocks, result, left @ right, c)


def _add_product(blocks: Blocks, result: Operand, product: Array, c: Operand) -> None:
    """Write a 16 × 8 product and what it is added to."""
    sums = by_warp(blocks.read_all(c, NUMPY["f32"])).copy()
    for part in range(2):
        sums[..., 2 * part : 2 * part + 2] += product[:, :, 8 * part + ROW[:, None], COLUMNS]
    blocks.write_all(result, by_thread(sums))


@handles("mma.sync.aligned.m16n8k16.row.col.f32", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32")
def _multiply(blocks: Blocks, instruction: Instruction) -> None:
    """`d = a·b + c` for 16 × 16 and 16 × 8 halves, or 16 × 32 and 32 × 8 numbers of E4M3; sums in fp32."""
    blocks.taking_part()
    kind = instruction.opcode.split(".")[-3]
    result, a, b, c = instruction.operands
    left = left_factor(by_warp(blocks.read_all(a, NUMPY["b32"])), kind)
    right = _right_factor(by_warp(blocks.read_all(b, NUMPY["b32"])), kind)
    _add_product(blocks, result, left @ right, c)


@handles("ldmatrix.sync.aligned.m8n8")
def _load_matrices(blocks: Blocks, instruction: Instruction) -> None:
    """One, two or four 8 × 8 matrices of 16 bits; lane `8·i + r` names row `r` of matrix `i`."""
    blocks.taking_part()
    result, source = instruction.operands
    count = int(re.findall(r"\.x(\d)", instruction.opcode)[0])
    address, warp = by_warp(blocks.address(source))[:, :, : 8 * count], by_warp(blocks.warp)[:, :, : 8 * count]
    block = by_warp(blocks.block)[:, :, : 8 * count]
    if (address % 16).any():
        raise PtxFault("a row of a matrix starts at no multiple of 16")
    words = [blocks.shared.load(block.ravel(), (address + 4 * i).ravel(), 4, warp.ravel()) for i in range(4)]
    rows = halves(np.stack(words, axis=-1).reshape(blocks.count, -1, count, 8, 4)).reshape(
        blocks.count, -1, count, 8, 8
    )
    if ".trans." in instruction.opcode:
        rows = rows.swapaxes(-1, -2)
    values = np.ascontiguousarray(rows[:, :, :, ROW[:, None], COLUMNS]).view(np.uint32)[..., 0]
    blocks.write_all(result, by_thread(values.swapaxes(2, 3)))


@handles("stmatrix.sync.aligned.m8n8")
def _store_matrices(blocks: Blocks, instruction: Instruction) -> None:
    """Two or four matrices, as `ldmatrix` reads them."""
    blocks.taking_part()
    target, source = instruction.operands
    count = int(re.findall(r"\.x(\d)", instruction.opcode)[0])
    registers = halves(by_warp(blocks.read_all(source, NUMPY["b32"])))
    rows = np.empty((*registers.shape[:2], count, 8, 8), np.uint16)
    for part in range(count):
        rows[:, :, part, ROW[:, None], COLUMNS] = registers[:, :, :, part]
    if ".trans." in instruction.opcode:
        rows = rows.swapaxes(-1, -2)
    words = np.ascontiguousarray(rows).view(np.uint32).reshape(blocks.count, -1, 8 * count, 4)
    address, warp = by_warp(blocks.address(target))[:, :, : 8 * count], by_warp(blocks.warp)[:, :, : 8 * count]
    block = by_warp(blocks.block)[:, :, : 8 * count]
    for word in range(4):
        data = np.ascontiguousarray(words[..., word].ravel())
        blocks.shared.store(block.ravel(), (address + 4 * word).ravel(), data, warp.ravel())


@handles("shfl.sync")
def _shuffle(blocks: Blocks, instruction: Instruction) -> None:
    """The value of another lane: of a number, or of the own number with some bits turned."""
    blocks.taking_part()
    result, source, lane, clamp, _ = instruction.operands
    mode = instruction.opcode.split(".")[2]
    if mode not in ("bfly", "idx"):
        raise PtxFault(f"a shuffle of the kind {mode}")
    if (blocks.read(clamp, NUMPY["u32"]) != 31).any():
        raise PtxFault("a shuffle within parts of a warp")
    other = by_warp(blocks.read(lane, NUMPY["u32"]))
    if mode == "bfly":
        other = other ^ LANES.astype(np.uint32)
    values = by_warp(blocks.read(source, NUMPY["b32"]))
    blocks.write(result, by_thread(np.take_along_axis(values, other.astype(int), axis=2)))


@handles("redux.sync")
def _reduce(blocks: Blocks, instruction: Instruction) -> None:
    """The least or greatest number of the warp's, to all lanes; NaN counts only where there is nothing else."""
    blocks.taking_part()
    result, source, members = instruction.operands
    kind = instruction.opcode.removeprefix("redux.sync.")
    if kind not in ("min.f32", "max.f32"):
        raise PtxFault(f"a reduction of the kind {kind}")
    if (blocks.read(members, NUMPY["u32"]) != 0xFFFFFFFF).any():
        raise PtxFault("a reduction over parts of a warp")
    values = by_warp(blocks.read(source, NUMPY["f32"]))
    found = (np.fmin if kind == "min.f32" else np.fmax).reduce(values, axis=2, keepdims=True)
    blocks.write(result, by_thread(np.broadcast_to(found, values.shape)))


@handles("elect.sync")
def _elect(blocks: Blocks, instruction: Instruction) -> None:
    """One thread of the warp: the first."""
    mask = by_warp(blocks.mask())
    if (mask != mask[..., :1]).any():
        raise PtxFault("not all threads of a warp take part")
    lane, chosen, _ = instruction.operands
    blocks.write(lane, np.zeros(blocks.shape, np.uint32))
    blocks.write(chosen, np.broadcast_to(LANES == 0, (blocks.count, blocks.threads // 32, 32)).reshape(blocks.shape))
