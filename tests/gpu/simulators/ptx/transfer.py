"""Loads, stores, asynchronous copies and barriers.

An asynchronous copy arrives when it is waited for, not before: a kernel that forgets to wait reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .blocks import NUMPY, Blocks, handles
from .groups import Groups
from .memory import Array
from .program import Address, Instruction, Operand, PtxFault, Vector


@dataclass(frozen=True)
class _Copy:
    """Of some threads: where to, and what."""

    block: Array
    address: Array
    warp: Array
    data: Array


def _copies(blocks: Blocks) -> Groups[_Copy]:
    groups: Groups[_Copy] = blocks.extra.setdefault("copies", Groups())
    return groups


def _parts(operand: Operand) -> int:
    return len(operand.parts) if isinstance(operand, Vector) else 1


@handles("ld.param")
def _load_parameter(blocks: Blocks, instruction: Instruction) -> None:
    result, source = instruction.operands
    assert isinstance(source, Address)
    dtype = NUMPY[instruction.type]
    bits = blocks.program.parameters[str(source.base)]
    if bits != 8 * dtype.itemsize:
        raise PtxFault(f"the parameter has {bits} bits")
    value = blocks.parameters[str(source.base)] % (1 << bits)
    blocks.write(result, np.full(blocks.shape, value, dtype))


@handles("ld.global")
def _load_global(blocks: Blocks, instruction: Instruction) -> None:
    result, source = instruction.operands
    active, dtype = blocks.mask(), NUMPY[instruction.type]
    address = blocks.address(source).astype(np.uint64)[active]
    parts = _parts(result)
    _aligned(address, parts * dtype.itemsize)
    values = np.zeros((*blocks.shape, parts), blocks.storage(result))
    for part in range(parts):
        values[active, part] = blocks.memory.load(address + np.uint64(part * dtype.itemsize), dtype.itemsize)
    blocks.write_all(result, values)


@handles("st.global")
def _store_global(blocks: Blocks, instruction: Instruction) -> None:
    target, source = instruction.operands
    active, dtype = blocks.mask(), NUMPY[instruction.type]
    address = blocks.address(target).astype(np.uint64)[active]
    values = blocks.read_all(source, dtype)[active]
    _aligned(address, values.shape[-1] * dtype.itemsize)
    for part in range(values.shape[-1]):
        blocks.memory.store(address + np.uint64(part * dtype.itemsize), values[:, part])


@handles("ld.shared")
def _load_shared(blocks: Blocks, instruction: Instruction) -> None:
    result, source = instruction.operands
    active, dtype = blocks.mask(), NUMPY[instruction.type]
    address, parts = blocks.address(source)[active], _parts(result)
    _aligned(address, parts * dtype.itemsize)
    values = np.zeros((*blocks.shape, parts), blocks.storage(result))
    for part in range(parts):
        places = blocks.block[active], address + part * dtype.itemsize
        values[active, part] = blocks.shared.load(*places, dtype.itemsize, blocks.warp[active])
    blocks.write_all(result, values)


@handles("st.shared")
def _store_shared(blocks: Blocks, instruction: Instruction) -> None:
    target, source = instruction.operands
    active, dtype = blocks.mask(), NUMPY[instruction.type]
    # A register may be wider than what is stored of it: its lowest bits.
    stored = blocks.storage(source) if dtype.itemsize == 1 else dtype
    address, values = blocks.address(target)[active], blocks.read_all(source, stored)[active].astype(dtype)
    _aligned(address, values.shape[-1] * dtype.itemsize)
    for part in range(values.shape[-1]):
        places = blocks.block[active], address + part * dtype.itemsize
        blocks.shared.store(*places, np.ascontiguousarray(values[:, part]), blocks.warp[active])


def _aligned(address: Array, size: int) -> None:
    if (address.astype(np.int64) % size).any():
        raise PtxFault(f"{size} bytes at an address that is no multiple")


@handles("cp.async")
def _copy(blocks: Blocks, instruction: Instruction) -> None:
    """Copy some bytes and fill the rest with zeros."""
    target, source, size_operand, *count_operand = instruction.operands
    active = blocks.mask()
    size = int(blocks.read(size_operand, NUMPY["u32"])[0, 0])
    count = blocks.read(count_operand[0] if count_operand else size_operand, NUMPY["u32"])[active]
    to = blocks.address(target)[active]
    origin = blocks.address(source).astype(np.uint64)[active]
    _aligned(origin, size)
    words = np.zeros((len(to), size // 4), np.uint32)
    if (count % 4).any() or (count > size).any():
        raise PtxFault("a copy of an odd number of bytes")
    for word in range(size // 4):
        copied = count > 4 * word
        words[copied, word] = blocks.memory.load(origin[copied] + np.uint64(4 * word), 4)
    block, warp = blocks.block[active], blocks.warp[active]
    blocks.shared.promise(block, to, size, warp)
    _copies(blocks).start(_Copy(block, to, warp, words))


@handles("cp.async.commit_group")
def _commit(blocks: Blocks, instruction: Instruction) -> None:
    blocks.taking_part()
    _copies(blocks).commit()


@handles("cp.async.wait_group")
def _wait(blocks: Blocks, instruction: Instruction) -> None:
    """All groups of copies but the latest few have arrived."""
    blocks.taking_part()
    left = int(blocks.read(instruction.operands[0], NUMPY["u32"])[0, 0])
    for copy in _copies(blocks).wait(left):
        for word in range(copy.data.shape[1]):
            data = np.ascontiguousarray(copy.data[:, word])
            blocks.shared.store(copy.block, copy.address + 4 * word, data, copy.warp)


@handles("bar.sync")
def _barrier(blocks: Blocks, instruction: Instruction) -> None:
    if blocks.taking_part():
        blocks.shared.barrier()


@handles("bar.warp.sync", "fence.proxy.async", "wgmma.fence")
def _fence(blocks: Blocks, instruction: Instruction) -> None:
    """Threads of a warp run in lockstep here, and all memory is of one kind."""
    blocks.taking_part()
