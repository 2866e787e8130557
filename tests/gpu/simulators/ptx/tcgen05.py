"""Products in tensor memory: `tcgen05`, Blackwell; and the barriers in shared memory that tell when they are done.

Tensor memory has 128 lanes of 512 columns of 32 bits; an address is `lane << 16 | column`. Warp `w` reaches lanes
`32·(w mod 4)` and the next 31. A product of 64 rows uses the first 16 lanes of each warp, one of 128 rows all lanes.
Descriptors of shared memory are those of `wgmma`, but for the swizzle in bits 61–63. The instruction descriptor: bits
4–5 type of the sums, 7–9 and 10–12 of the factors, 15 and 16 whether their rows run along the outer axis, 17–22 columns
divided by 8, 24–28 rows by 16 (see "Tensor Memory" and "Instruction descriptor" of the PTX ISA, section 9.7.16).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .blocks import NUMPY, Blocks, handles
from .memory import Array
from .program import Address, Instruction, Operand, PtxFault, Vector
from .scalar import numbers
from .warp import by_thread, by_warp, halves
from .wgmma import DEPTH, DEPTH_E4M3, DEPTH_TF32, read_matrix, uniform

LANES, COLUMNS = 128, 512
_WIDTHS = {2: 128, 4: 64, 6: 32}
# Of the factors, by the kind of the product.
_KINDS = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3"}}
_DEPTHS = {"f16": DEPTH, "tf32": DEPTH_TF32, "f8f6f4": DEPTH_E4M3}
_FP32_SUMS = 1


@dataclass
class _Product:
    """A product that was started.

    Attributes:
        half: whether its result lies in the upper 16 lanes of each warp.
        columns: of its result.
        barriers: addresses of those that tell of its end.
    """

    half: int
    columns: range
    barriers: set[int] = field(default_factory=set)


@dataclass
class TensorMemory:
    """Of some blocks.

    Attributes:
        words: `[blocks, LANES, COLUMNS]`; NaN at first.
        allocated: columns.
        products: started, and not waited for.
        phases: address of a barrier → how often it was completed.
    """

    words: Array
    allocated: int = 0
    products: list[_Product] = field(default_factory=list)
    phases: dict[int, int] = field(default_factory=dict)

    def allot(self, columns: range) -> None:
        """Fault if these were not allocated."""
        if columns.stop > self.allocated:
            raise PtxFault(f"tensor memory: column {columns.stop - 1} of {self.allocated}")

    def need(self, half: int, columns: range) -> None:
        """Fault if these were not allocated, or are the result of a product that may not have ended."""
        self.allot(columns)
        if any(half == other.half and set(columns) & set(other.columns) for other in self.products):
            raise PtxFault("tensor memory: a product is read or overwritten that was not waited for")


def _memory(blocks: Blocks) -> TensorMemory:
    empty = np.full((blocks.count, LANES, COLUMNS), 0x7FFFFFFF, np.uint32)
    memory = blocks.extra.setdefault("tensor memory", TensorMemory(empty))
    assert isinstance(memory, TensorMemory)
    return memory


def _one_thread(blocks: Blocks) -> int | None:
    """The one thread of each block that executes it; None if none does."""
    active = blocks.active
    if active is None or (active.sum(axis=1) > 1).any() or (active != active[:1]).any():
        raise PtxFault("more than one thread starts it")
    return int(active[0].argmax()) if active.any() else None


def _columns(address: int, count: int) -> range:
    return range(address & 0xFFFF, (address & 0xFFFF) + count)


@handles("tcgen05.alloc")
def _allocate(blocks: Blocks, instruction: Instruction) -> None:
    """Columns of tensor memory; their address goes to shared memory."""
    target, count = instruction.operands
    memory, active = _memory(blocks), blocks.active
    if memory.allocated or active is None or (active.sum(axis=1) != 32).any():
        raise PtxFault("one warp allocates, once")
    memory.allocated = int(blocks.read(count, NUMPY["u32"])[0, 0])
    first = np.arange(blocks.count), blocks.address(target)[:, 0]
    blocks.shared.store(*first, np.zeros(blocks.count, np.uint32), blocks.warp[active].reshape(blocks.count, 32)[:, 0])


@handles("tcgen05.dealloc")
def _free(blocks: Blocks, instruction: Instruction) -> None:
    _, count = instruction.operands
    memory = _memory(blocks)
    if memory.products or memory.allocated != int(blocks.read(count, NUMPY["u32"])[0, 0]):
        raise PtxFault("tensor memory is freed that is in use, or was not allocated")
    memory.allocated = 0


@handles("tcgen05.relinquish_alloc_permit", "tcgen05.wait::ld", "tcgen05.wait::st")
def _order(blocks: Blocks, instruction: Instruction) -> None:
    """Loads and stores of tensor memory are complete at once here."""


def _rows(blocks: Blocks, address: Array) -> Array:
    """The first of the 16 lanes that each warp names, `[blocks, warps]`."""
    lane = by_warp(address)[:, :, 0] >> 16
    reach = 32 * (np.arange(lane.shape[1]) % 4)
    if not np.isin(lane - reach, (0, 16)).all():
        raise PtxFault("a warp reaches for lanes of tensor memory that are another's")
    return lane


def _halves_of_a_warp(blocks: Blocks, operand: Address, half: Array, count: int) -> tuple[Array, Array, Array]:
    """Block, lane and column `[blocks, warps, 32, count]` of shape 16x32bx2: threads 16–31 take columns further on."""
    address = blocks.address(operand)
    rows = _rows(blocks, address)
    lane = rows[:, :, None, None] + (np.arange(32) % 16)[:, None]
    start = by_warp(address & 0xFFFF)[..., None] + (np.arange(32) // 16 * int(half[0, 0]))[:, None]
    column = start + np.arange(count)
    _memory(blocks).need(int(rows[0, 0]) % 32 // 16, range(int(column.min()), int(column.max()) + 1))
    block = np.arange(blocks.count)[:, None, None, None]
    return np.broadcast_arrays(block, lane, column)  # type: ignore[return-value]


def _whole_warps(blocks: Blocks, operand: Address, count: int) -> tuple[Array, Array, Array]:
    """Block, lane and column `[blocks, warps, 32, count]` of shape 32x32b: a lane for each thread."""
    address = blocks.address(operand)
    rows = _rows(blocks, address)
    if (rows % 32).any():
        raise PtxFault("a warp reaches for lanes of tensor memory that are another's")
    column = by_warp(address & 0xFFFF)[..., None] + np.arange(count)
    for half in range(2):
        _memory(blocks).need(half, range(int(column.min()), int(column.max()) + 1))
    block = np.arange(blocks.count)[:, None, None, None]
    return np.broadcast_arrays(block, rows[:, :, None, None] + np.arange(32)[:, None], column)  # type: ignore[return-value]


@handles("tcgen05.ld.sync.aligned.16x32bx2", "tcgen05.ld.sync.aligned.32x32b")
def _load(blocks: Blocks, instruction: Instruction) -> None:
    blocks.taking_part()
    result, source, *half = instruction.operands
    assert isinstance(source, Address) and isinstance(result, Vector)
    places = _places(blocks, source, half, len(result.parts))
    blocks.write_all(result, by_thread(_memory(blocks).words[places]))


@handles("tcgen05.st.sync.aligned.16x32bx2", "tcgen05.st.sync.aligned.32x32b")
def _store(blocks: Blocks, instruction: Instruction) -> None:
    if not blocks.taking_part():
        return
    target, *half, source = instruction.operands
    assert isinstance(target, Address) and isinstance(source, Vector)
    places = _places(blocks, target, half, len(source.parts))
    _memory(blocks).words[places] = by_warp(blocks.read_all(source, NUMPY["b32"]))


def _places(blocks: Blocks, operand: Address, half: list[Operand], count: int) -> tuple[Array, Array, Array]:
    """Where a load or store reaches; its second half starts where the operand `half` says, if there is one."""
    if half:
        return _halves_of_a_warp(blocks, operand, blocks.read(half[0], NUMPY["u32"]), count)
    return _whole_warps(blocks, operand, count)


def _lanes(rows: int) -> Array:
    """Lane of each row of a product."""
    row = np.arange(rows)
    return row // 16 * 32 + row % 16 if rows == 64 else row


@handles(*(f"tcgen05.mma.cta_group::1.kind::{kind}" for kind in _KINDS))
def _multiply(blocks: Blocks, instruction: Instruction) -> None:
    """`d = a·b + d`, or `a·b`: d in tensor memory, a there or in shared memory, b in shared memory."""
    thread = _one_thread(blocks)
    if thread is None:
        return
    result, a, b, shape, add = instruction.operands
    memory = _memory(blocks)
    form = int(blocks.read(shape, NUMPY["u32"])[0, thread])
    rows, size = (form >> 24 & 31) * 16, (form >> 17 & 63) * 8
    kind = instruction.opcode.rpartition("::")[2]
    depth = _DEPTHS[kind]
    kinds = [_KINDS[kind][form >> shift & 7] for shift in (7, 10)]
    if form >> 4 & 3 != _FP32_SUMS or form >> 13 & 3:
        raise PtxFault("a product of another form")
    lanes = _lanes(rows)
    if isinstance(a, Address):
        if kind != "f16":
            raise PtxFault(f"a factor of {kind} in tensor memory")
        left = _from_tensor_memory(blocks, int(blocks.address(a)[0, thread]), lanes)
    else:
        left = _from_shared(blocks, blocks.read(a, NUMPY["b64"])[:, thread], rows, form >> 15 & 1, depth)
    right = _from_shared(blocks, blocks.read(b, NUMPY["b64"])[:, thread], size, form >> 16 & 1, depth)
    product = numbers(left, kinds[0]) @ numbers(right, kinds[1]).swapaxes(1, 2)
    address = int(blocks.address(result)[0, thread])
    columns = _columns(address, size)
    memory.allot(columns)  # no more: products of one thread follow each other
    places = slice(None), lanes[:, None] + (address >> 16), np.arange(columns.start, columns.stop)
    if blocks.read(add, NUMPY["pred"])[:, thread].all():
        product = product + memory.words[places].view(np.float32)
    memory.words[places] = product.view(np.uint32)
    memory.products.append(_Product(address >> 20 & 1, columns))


def _from_tensor_memory(blocks: Blocks, address: int, lanes: Array) -> Array:
    """The left factor `[blocks, rows, DEPTH]`, two halves a column."""
    columns = _columns(address, DEPTH // 2)
    memory = _memory(blocks)
    memory.need(address >> 20 & 1, columns)
    words = memory.words[:, lanes[:, None] + (address >> 16), np.arange(columns.start, columns.stop)]
    return halves(words).reshape(blocks.count, len(lanes), DEPTH)


def _from_shared(blocks: Blocks, descriptor: Array, size: int, along_outer: int, depth: int) -> Array:
    width = _WIDTHS[int(descriptor[0] >> np.uint64(61))]
    return read_matrix(blocks, descriptor, size, width, not along_outer, depth)


@handles("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64")
def _announce(blocks: Blocks, instruction: Instruction) -> None:
    """The barrier is completed once all products started so far have ended: at once, here."""
    thread = _one_thread(blocks)
    if thread is None:
        return
    address = int(blocks.read(instruction.operands[0].base, NUMPY["u32"])[0, thread])  # type: ignore[union-attr]
    memory = _memory(blocks)
    _known(memory, address)
    memory.phases[address] += 1
    for product in memory.products:
        product.barriers.add(address)


@handles("mbarrier.init")
def _begin(blocks: Blocks, instruction: Instruction) -> None:
    """A barrier that one arrival completes."""
    thread = _one_thread(blocks)
    if thread is None:
        return
    target, count = instruction.operands
    if int(blocks.read(count, NUMPY["u32"])[0, 0]) != 1:
        raise PtxFault("a barrier of several arrivals")
    _memory(blocks).phases[int(blocks.address(target)[0, thread])] = 0


@handles("mbarrier.inval")
def _end(blocks: Blocks, instruction: Instruction) -> None:
    thread = _one_thread(blocks)
    if thread is not None:
        address = int(blocks.address(instruction.operands[0])[0, thread])
        _known(_memory(blocks), address)
        del _memory(blocks).phases[address]


@handles("mbarrier.try_wait.parity")
def _wait(blocks: Blocks, instruction: Instruction) -> None:
    """Whether the phase of this parity is over."""
    blocks.taking_part()
    result, barrier, parity = instruction.operands
    address = int(uniform(blocks.address(barrier), "a barrier")[0])
    memory = _memory(blocks)
    _known(memory, address)
    over = memory.phases[address] % 2 != int(blocks.read(parity, NUMPY["u32"])[0, 0])
    if not over:
        raise PtxFault("it would wait for ever: nothing was announced to this barrier")
    memory.products = [product for product in memory.products if address not in product.barriers]
    blocks.write(result, np.full(blocks.shape, over))


def _known(memory: TensorMemory, address: int) -> None:
    if address not in memory.phases:
        raise PtxFault("a barrier that was not initialised")
