"""A kernel's launch: a grid of blocks, with the arguments as the CUDA driver takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from . import scalar, tcgen05, transfer, warp, wgmma
from .blocks import Blocks
from .memory import GlobalMemory
from .program import Program, PtxFault

INSTRUCTIONS = (scalar, tcgen05, transfer, warp, wgmma)  # imported for the handlers they register


def launch(
    program: Program,
    memory: GlobalMemory,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    arguments: Sequence[int],
) -> Counter[str]:
    """Run every block; returns how often each opcode was executed, a warp.

    Raises:
        PtxFault: a GPU or its driver would refuse it, or the kernel did what it must not.
    """
    if tuple(block) != (program.threads, 1, 1):
        raise PtxFault(f"{program.entry} needs blocks of {program.threads} threads, not {list(block)}")
    if len(arguments) != len(program.parameters):
        raise PtxFault(f"{program.entry} takes {len(program.parameters)} arguments, not {len(arguments)}")
    if grid[2] != 1:
        raise PtxFault("a grid of three axes")
    executed: Counter[str] = Counter()
    for x in range(grid[0]):
        blocks = Blocks(program, memory, list(arguments), x, grid[1], shared_bytes)
        blocks.run()
        executed.update({opcode: count * grid[1] * program.threads // 32 for opcode, count in blocks.executed.items()})
    return executed
