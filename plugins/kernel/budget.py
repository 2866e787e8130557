"""What every kernel uses on every target: `budget.json`, and the limits it is held to.

python -m localattn.plugins.kernel.budget --write     compile all and write the table
python -m localattn.plugins.kernel.budget             compile all and compare
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from .compile import CompiledKernel, compile_many
from .spec import ELEMENT_TYPES, KernelSpec
from .targets import TARGETS, target

TABLE = Path(__file__).with_name("budget.json")
# A launch may ask for this much dynamic shared memory without opting in.
LARGEST_SHARED_BYTES = 48 << 10
HEAD_DIMS = (16, 32, 64, 128, 256)


def specs() -> Iterator[KernelSpec]:
    """The kernels of the table."""
    for dtype, head_dim, mask, bias in product(ELEMENT_TYPES, HEAD_DIMS, (False, True), (False, True)):
        yield KernelSpec(dtype, head_dim, mask, bias)


def figures(kernel: CompiledKernel) -> dict[str, Any]:
    """A kernel's entry in the table."""
    tile = kernel.tile
    return {
        "tile": [tile.block_queries, tile.block_keys, tile.warps, tile.stages],
        "registers": kernel.registers,
        "spills": kernel.spills,
        "shared_bytes": kernel.shared_bytes,
    }


def beyond_limits(kernel: CompiledKernel) -> str:
    """Which limit a kernel breaks; empty if none."""
    broken = []
    if kernel.spills:
        broken.append(f"spills {kernel.spills} bytes")
    if kernel.shared_bytes > LARGEST_SHARED_BYTES:
        broken.append(f"takes {kernel.shared_bytes} bytes of shared memory, above {LARGEST_SHARED_BYTES}")
    return f"{kernel.spec.name} for {kernel.target.name} {' and '.join(broken)}" if broken else ""


def read_table() -> dict[str, Any]:
    """`{"triton": version, "kernels": {target: {kernel: figures}}}`."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def write_table(kernels: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Write the figures of these kernels, by target and name, one line a kernel."""
    import triton

    blocks = []
    for name, entries in kernels.items():
        lines = ",\n".join(f'   "{kernel}": {json.dumps(entry)}' for kernel, entry in entries.items())
        blocks.append(f'  "{name}": {{\n{lines}\n  }}')
    inside = ",\n".join(blocks)
    text = f'{{\n "triton": "{triton.__version__}",\n "kernels": {{\n{inside}\n }}\n}}\n'
    TABLE.write_text(text, encoding="utf-8")


def main() -> int:
    """Compile everything; 1 if a kernel breaks a limit or differs from the table."""
    parser = argparse.ArgumentParser(prog="python -m localattn.plugins.kernel.budget", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write budget.json")
    parser.add_argument("--target", nargs="+", default=list(TARGETS), help="targets to compile for")
    parser.add_argument("--jobs", type=int, help="processes at a time")
    options = parser.parse_args()

    def show(kernel: CompiledKernel) -> None:
        line = f"{kernel.target.name} {kernel.spec.name} {figures(kernel)} {beyond_limits(kernel)}"
        print(line, file=sys.stderr, flush=True)

    kernels = compile_many(specs(), map(target, options.target), options.jobs, show)
    complaints = [complaint for kernel in kernels if (complaint := beyond_limits(kernel))]
    if options.write:
        table: dict[str, dict[str, dict[str, Any]]] = {}
        for kernel in kernels:
            table.setdefault(kernel.target.name, {})[kernel.spec.name] = figures(kernel)
        write_table(table)
    else:
        written = read_table()["kernels"]
        complaints += [
            f"{kernel.spec.name} for {kernel.target.name}: {figures(kernel)}, the table says {entry}"
            for kernel in kernels
            if figures(kernel) != (entry := written.get(kernel.target.name, {}).get(kernel.spec.name))
        ]
    print("\n".join(complaints) or f"{len(kernels)} kernels within the limits.")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
