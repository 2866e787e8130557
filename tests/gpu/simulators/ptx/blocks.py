"""Some thread blocks in lockstep: registers, operands, control flow.

The blocks of a launch that differ in `ctaid.y` only take the same way through the kernel, so they run together: a
register is an array `[blocks, threads]`. Where threads disagree on a branch, those that do not take it go on alone
until they come to its label; it must be the threads of whole warps, the same in every block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .memory import SHARED_BASE, Array, GlobalMemory, SharedMemory
from .program import Address, Immediate, Instruction, Operand, Program, PtxFault, Register, Vector

Handler = Callable[["Blocks", Instruction], None]
# Handlers by opcode, or by the part of it before some dot; each module of instructions adds its own.
HANDLERS: dict[str, Handler] = {}

NUMPY = {
    "pred": np.dtype(bool),
    **{kind: np.dtype(np.uint16) for kind in ("b16", "u16")},
    **{kind: np.dtype(np.uint32) for kind in ("b32", "u32")},
    **{kind: np.dtype(np.uint64) for kind in ("b64", "u64")},
    "b8": np.dtype(np.uint8),
    "s32": np.dtype(np.int32),
    "s64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}
_STORAGE = {1: np.dtype(bool), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
MOST_STEPS = 2_000_000


def handles(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a function as the meaning of these opcodes."""

    def keep(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(opcodes, function))
        return function

    return keep


@cache
def handler_of(opcode: str) -> Handler:
    """The meaning of an opcode: that of its longest known beginning."""
    name = opcode
    while name not in HANDLERS:
        name, _, rest = name.rpartition(".")
        if not rest:
            raise PtxFault(f"this machine has no {opcode}")
    return HANDLERS[name]


class Blocks:
    """State of the blocks `(x, 0 … count - 1)`.

    Attributes:
        program: what runs.
        memory: tensors.
        shared: of each block.
        threads: a block.
        warp: number of the warp of each thread, `[count, threads]`.
        unready: registers that a product under way will write.
        in_use: registers that it reads.
        active: threads that execute the instruction at hand, `[count, threads]`; None for all.
        executed: how often each opcode was executed, a warp.
        extra: what modules of instructions keep, by their names.
    """

    def __init__(
        self, program: Program, memory: GlobalMemory, arguments: list[int], x: int, count: int, shared_bytes: int
    ) -> None:
        self.program, self.memory = program, memory
        self.count, self.threads = count, program.threads
        # Two warps may write the two bytes of a half at once.
        single = any(x.opcode.startswith("st.shared") and x.type in ("b8", "u8") for x in program.instructions)
        self.shared = SharedMemory(count, shared_bytes, 1 if single else 2)
        self.parameters = dict(zip(program.parameters, arguments, strict=True))
        shape = (count, self.threads)
        thread = np.broadcast_to(np.arange(self.threads, dtype=np.uint32), shape)
        self.block = np.broadcast_to(np.arange(count, dtype=np.uint32)[:, None], shape)
        self.warp = (thread // 32).astype(np.int16)
        self.special = {
            "%tid.x": thread,
            "%ctaid.x": np.full(shape, x, np.uint32),
            "%ctaid.y": self.block,
            "%laneid": thread % 32,
        }
        self.registers: dict[str, Array] = {}
        self.executed: Counter[str] = Counter()
        self.extra: dict[str, Any] = {}
        self.unready: frozenset[str] = frozenset()
        self.in_use: frozenset[str] = frozenset()
        self.active: Array | None = None
        # Threads that run, None for all; and those that wait for them: at which instruction, who ran before.
        self._running: Array | None = None
        self._waiting: list[tuple[int, Array | None]] = []

    @property
    def shape(self) -> tuple[int, int]:
        """Of a register."""
        return self.count, self.threads

    def run(self) -> None:
        """From the first instruction to `ret`."""
        handlers = [handler_of(instruction.opcode) for instruction in self.program.instructions]
        position: int | None = 0
        with np.errstate(all="ignore"):
            for _ in range(MOST_STEPS):
                while self._waiting and position == self._waiting[-1][0]:
                    self._running = self._waiting.pop()[1]
                instruction = self.program.instructions[position]
                self.executed[instruction.opcode] += 1
                try:
                    self.active = self._active(instruction)
                    handlers[position](self, instruction)
                    position = self._next(instruction, position)
                except PtxFault as fault:
                    raise PtxFault(f"{fault}, in `{instruction.text}`") from None
                if position is None:
                    return
        raise PtxFault(f"no end after {MOST_STEPS} instructions")

    def _active(self, instruction: Instruction) -> Array | None:
        if instruction.guard is None:
            return self._running
        guard = self.read(instruction.guard, NUMPY["pred"])
        guard = ~guard if instruction.negated else guard
        return guard if self._running is None else guard & self._running

    def _next(self, instruction: Instruction, position: int) -> int | None:
        """Index of the instruction after this one; None at the end."""
        kind = instruction.opcode.split(".")[0]
        if kind not in ("bra", "ret"):
            return position + 1
        running = np.ones(self.shape, bool) if self._running is None else self._running
        jumping = running if self.active is None else self.active
        if not jumping.any():
            return position + 1
        target = None if kind == "ret" else self.program.labels[str(instruction.operands[0])]
        if (jumping == running).all():
            return target
        left = running & ~jumping
        if target is None or (left != left[:1]).any() or (left != np.repeat(left[:, ::32], 32, axis=1)).any():
            raise PtxFault("threads of a warp, or blocks, disagree on a branch")
        self._waiting.append((target, self._running))
        self._running = left
        return position + 1

    def taking_part(self) -> bool:
        """Whether an instruction that all threads must execute together is executed: by all or by none.

        Raises:
            PtxFault: some threads do and some do not.
        """
        if self.active is not None and self.active.any() != self.active.all():
            raise PtxFault("not all threads take part")
        return self.active is None or bool(self.active.all())

    def mask(self) -> Array:
        """The active threads, `[blocks, threads]`."""
        return np.ones(self.shape, bool) if self.active is None else self.active

    def width(self, operand: Operand) -> int:
        """Bytes of a register; 0 of what is none."""
        value = self.registers.get(operand.name) if isinstance(operand, Register) else None
        return 0 if value is None or value.dtype.kind == "b" else value.dtype.itemsize

    def read(self, operand: Operand, dtype: np.dtype[Any]) -> Array:
        """An operand's value in every thread, `[blocks, threads]`."""
        if isinstance(operand, Register):
            value = self.registers.get(operand.name)
            if value is None and operand.name in self.program.undefined:
                value = self._undefined(operand.name)
            if value is None:
                raise PtxFault(f"{operand.name} is read before it is written")
            if operand.name in self.unready:
                raise PtxFault(f"{operand.name} is the result of a product that was not waited for")
            if value.dtype.kind != "b" and value.dtype.itemsize != dtype.itemsize:
                raise PtxFault(f"{operand.name} has {8 * value.dtype.itemsize} bits, not {8 * dtype.itemsize}")
            return value if value.dtype == dtype else value.view(dtype)
        if isinstance(operand, Immediate):
            return np.broadcast_to(immediate(operand.text, dtype), self.shape)
        if operand in self.special:
            return self.special[str(operand)].view(dtype)
        if operand in self.program.variables:
            return np.full(self.shape, SHARED_BASE, dtype)
        raise PtxFault(f"no value: {operand}")

    def _undefined(self, name: str) -> Array:
        """A value that would be seen if it were used: not a number."""
        storage = _STORAGE[self.program.registers[name]]
        return np.full(self.shape, np.uint64(0x7FBA_7FBA_7FBA_7FBA).astype(storage), storage)

    def read_all(self, operand: Operand, dtype: np.dtype[Any]) -> Array:
        """A vector operand, `[blocks, threads, parts]`; of a single register, one part."""
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        return np.stack([self.read(part, dtype) for part in parts], axis=-1)

    def storage(self, operand: Operand) -> np.dtype[Any]:
        """The type that the bits of a register, or of each of a vector's, are kept in."""
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        first = next((part for part in parts if part != Register("_")), None)
        if not isinstance(first, Register):
            raise PtxFault(f"{first} is no register")
        return _STORAGE[self.program.registers[first.name]]

    def write(self, operand: Operand, value: Array) -> None:
        """Set a register in the active threads; the value has its width."""
        if operand == Register("_"):
            return
        storage = self.storage(operand)
        assert isinstance(operand, Register)
        if operand.name in self.in_use:
            raise PtxFault(f"{operand.name} is a factor of a product that was not waited for")
        if value.dtype.itemsize != storage.itemsize or (value.dtype.kind == "b") != (storage.kind == "b"):
            raise PtxFault(f"{operand.name} holds {storage}, not {value.dtype}")
        new = np.broadcast_to(value, self.shape)
        new = new if new.dtype == storage else np.ascontiguousarray(new).view(storage)
        if self.active is not None:
            old = self.registers.get(operand.name)
            new = np.where(self.active, new, np.zeros((), storage) if old is None else old)
        self.registers[operand.name] = np.ascontiguousarray(new)

    def write_all(self, operand: Operand, values: Array) -> None:
        """Set the registers of a vector to the parts of the last axis, in the active threads."""
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        for index, part in enumerate(parts):
            self.write(part, np.ascontiguousarray(values[..., index]))

    def address(self, operand: Operand) -> Array:
        """An address operand's value in every thread, int64."""
        if not isinstance(operand, Address):
            raise PtxFault(f"{operand} is no address")
        if isinstance(operand.base, Register):
            base = self.registers[operand.base.name].astype(np.int64)
        else:
            base = self.read(operand.base, NUMPY["u32"]).astype(np.int64)
        return base + operand.offset


def immediate(text: str, dtype: np.dtype[Any]) -> Array:
    """A number as PTX writes it, in a given type."""
    if text.startswith("0f"):
        return np.array(int(text[2:], 16), np.uint32).view(dtype)
    number = int(text.removesuffix("U"), 0)
    if dtype.kind == "b":
        return np.array(number != 0)
    bits = 8 * dtype.itemsize
    return np.array(number % (1 << bits), f"u{dtype.itemsize}").view(dtype)


@handles("bra", "ret")
def _nothing(blocks: Blocks, instruction: Instruction) -> None:
    """Only what comes next changes."""
