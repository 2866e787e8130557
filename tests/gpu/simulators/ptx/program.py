"""PTX text, read into instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias


class PtxFault(Exception):
    """The program did what a GPU would fault on, or what this machine does not know."""


@dataclass(frozen=True)
class Register:
    """`%r12`; in a nested scope also a plain name; `_` for a result that nobody wants."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A number as it is written: `16`, `0x10`, `0x10U`, `-1`, `0f3F800000`."""

    text: str


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; the base is a register, a parameter or a variable."""

    base: Register | str
    offset: int


@dataclass(frozen=True)
class Vector:
    """`{%r1, %r2}`."""

    parts: tuple[Register | Immediate, ...]


Operand: TypeAlias = "Register | Immediate | Address | Vector | str"


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: its name with all modifiers, `mad.wide.s32`.
        operands: results first.
        guard: the predicate that decides whether a thread executes it.
        negated: it executes where the predicate is false.
        text: as written.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    text: str

    @property
    def type(self) -> str:
        """The last modifier, `s32`."""
        return self.opcode.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        entry: its name.
        parameters: name → bits, in order.
        threads: threads a block it must be launched with.
        registers: name → bits; 1 for a predicate.
        instructions: in order.
        labels: name → index of the instruction behind it.
        variables: names of the dynamic shared memory.
        undefined: registers that no instruction writes: whoever reads one has no use for the value.
    """

    entry: str
    parameters: dict[str, int]
    threads: int
    registers: dict[str, int]
    instructions: list[Instruction]
    labels: dict[str, int]
    variables: frozenset[str]
    undefined: frozenset[str]


_BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "u32": 32, "u64": 64}


def read_program(text: str) -> Program:
    """The one kernel of a PTX text.

    Raises:
        PtxFault: it is not written as Triton writes it.
    """
    text = re.sub(r"//[^\n]*", "", text)
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\{", text, re.DOTALL)
    if head is None:
        raise PtxFault("there is no kernel in the text")
    entry, parameters, directives = head.groups()
    found = re.search(r"\.reqntid (\d+)", directives)
    if found is None:
        raise PtxFault(f"{entry} does not say how many threads it needs")
    reader = _Reader()
    reader.read(text[head.end() : text.rindex("}")])
    return Program(
        entry=entry,
        parameters={
            name: _BITS[kind] for kind, name in re.findall(r"\.param \.(\w+)[^,]*?(\w+)\s*(?:,|$)", parameters)
        },
        threads=int(found[1]),
        registers=reader.registers,
        instructions=reader.instructions,
        labels=reader.labels,
        variables=frozenset(re.findall(r"\.extern \.shared[^;]*?(\w+)\[\]", text)),
        undefined=frozenset(reader.registers) - {name for x in reader.instructions for name in _first_registers(x)},
    )


def _first_registers(instruction: Instruction) -> set[str]:
    """The registers that an instruction may write: they stand first; two of a vote's operands are results."""
    results = instruction.operands[: 2 if instruction.opcode.startswith("elect") else 1]
    parts = [part for x in results for part in (x.parts if isinstance(x, Vector) else (x,))]
    return {part.name for part in parts if isinstance(part, Register)}


class _Reader:
    """Reads a kernel's body, statement by statement. Names of a nested scope are made unique."""

    def __init__(self) -> None:
        self.registers: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._scopes: list[str] = []
        self._count = 0

    def read(self, body: str) -> None:
        while body := body.lstrip():
            if body[0] == "{":
                self._count += 1
                self._scopes.append(f"@{self._count}")
                body = body[1:]
            elif body[0] == "}":
                self._scopes.pop()
                body = body[1:]
            elif label := re.match(r"([$\w]+):", body):
                self.labels[self._local(label[1])] = len(self.instructions)
                body = body[label.end() :]
            elif body.startswith(".pragma"):
                body = body[body.index(";") + 1 :]
            else:
                statement, _, body = body.partition(";")
                self._statement(" ".join(statement.split()))

    def _local(self, name: str) -> str:
        return name + "".join(self._scopes) if not name.startswith(("%", "$")) else name

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(" ", 2)
            for name in names.split(","):
                self._declare(name.strip(), _BITS[kind[1:]])
            return
        match = re.match(r"(?:@(!?)([%\w]+) )?([a-z][\w.:]*)\s*(.*)", text)
        if match is None:
            raise PtxFault(f"not understood: {text}")
        negated, guard, opcode, operands = match.groups()
        self.instructions.append(
            Instruction(
                opcode=opcode,
                operands=(self._local(operands),) if opcode.startswith("bra") else self._operands(operands),
                guard=None if guard is None else Register(self._name(guard)),
                negated=bool(negated),
                text=text,
            )
        )

    def _declare(self, name: str, bits: int) -> None:
        family = re.fullmatch(r"(%\w+?)<(\d+)>", name)
        if family is None:
            self.registers[self._local(name)] = bits
            return
        for index in range(int(family[2])):
            self.registers[f"{family[1]}{index}"] = bits

    def _name(self, name: str) -> str:
        return self._local(name) if self._local(name) in self.registers else name

    def _operands(self, text: str) -> tuple[Operand, ...]:
        return tuple(self._operand(part) for part in _split(text))

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            parts = self._operands(text[1:-1])
            if not all(isinstance(part, Register | Immediate) for part in parts):
                raise PtxFault(f"not understood: {text}")
            return Vector(parts)  # type: ignore[arg-type]
        if text[0] == "[":
            base, _, offset = (part.strip() for part in text[1:-1].partition("+"))
            return Address(Register(base) if base in self.registers else base, int(offset or "0", 0))
        if self._name(text) in self.registers or text == "_":
            return Register(self._name(text))
        if re.fullmatch(r"-?\d\w*", text):
            return Immediate(text)
        return text


def _split(text: str) -> list[str]:
    """Operands between commas outside of braces; `a|b` are two."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,|\s][^,|]*", text)
    return [part.strip() for part in parts]
