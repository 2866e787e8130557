"""Check the resources of every kernel on every target against `budget.json` and the limits.

python -m localattn.plugins.kernel.budget --write     compile all and write the table; with --target its part of it
python -m localattn.plugins.kernel.budget             compile all and compare
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .aft import AFT_SPECS
from .compile import AnySpec, CompiledKernel, compile_tiles, runs_on
from .ring import ring_set
from .spec import Tile, full_set
from .targets import TARGETS, Target, target
from .tiles import FREE_SHARED_BYTES, OPT_IN_SHARED_BYTES, tile_for

TABLE = Path(__file__).with_name("budget.json")
# Suffix of a kernel's name if ahead-of-time plugins use another tile.
AHEAD_OF_TIME = "@48KB"


def entries(target: Target) -> Iterator[tuple[AnySpec, Tile]]:
    """List the kernels of the table for one target: the full set of the library, fp8, and other tiles of them."""
    specs: list[AnySpec] = [*full_set(), *AFT_SPECS, *ring_set(), *full_set(["fp8"])]
    for spec in (spec for spec in specs if runs_on(spec, target)):
        for tile in dict.fromkeys((tile_for(spec, target), tile_for(spec, target, opt_in=False))):
            yield spec, tile


def entry_name(kernel: CompiledKernel) -> str:
    """Return the name of a kernel's entry in the table."""
    own = kernel.tile == tile_for(kernel.spec, kernel.target)
    return kernel.spec.name if own else kernel.spec.name + AHEAD_OF_TIME


def figures(kernel: CompiledKernel) -> dict[str, Any]:
    """Return a kernel's entry in the table."""
    tile = kernel.tile
    return {
        "tile": [tile.block_queries, tile.block_keys, tile.warps, tile.stages],
        "registers": kernel.registers,
        "spills": kernel.spills,
        "shared_bytes": kernel.shared_bytes,
    }


def largest_shared_bytes(kernel: CompiledKernel) -> int:
    """Return the shared memory that a kernel may use."""
    free = kernel.tile == tile_for(kernel.spec, kernel.target, opt_in=False)
    return FREE_SHARED_BYTES if free else OPT_IN_SHARED_BYTES[kernel.target.matrix_unit]


def beyond_limits(kernel: CompiledKernel) -> str:
    """Return which limit a kernel breaks, in words; empty if none."""
    broken = []
    if kernel.spills:
        broken.append(f"spills {kernel.spills} bytes")
    limit = largest_shared_bytes(kernel)
    if kernel.shared_bytes > limit:
        broken.append(f"takes {kernel.shared_bytes} bytes of shared memory, above {limit}")
    return f"{kernel.spec.name} for {kernel.target.name} {' and '.join(broken)}" if broken else ""


def read_table() -> dict[str, Any]:
    """Read `{"triton": version, "kernels": {target: {kernel: figures}}}`."""
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
    """Compile everything; return 1 if a kernel breaks a limit or differs from the table."""
    parser = argparse.ArgumentParser(prog="python -m localattn.plugins.kernel.budget", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write budget.json")
    parser.add_argument("--target", nargs="+", default=list(TARGETS), help="targets to compile for")
    parser.add_argument("--jobs", type=int, help="processes at a time")
    options = parser.parse_args()

    def show(kernel: CompiledKernel) -> None:
        line = f"{kernel.target.name} {kernel.spec.name} {figures(kernel)} {beyond_limits(kernel)}"
        print(line, file=sys.stderr, flush=True)

    targets = [target(name) for name in options.target]
    wanted = [(spec, chosen, tile) for chosen in targets for spec, tile in entries(chosen)]
    kernels = compile_tiles(wanted, options.jobs, show)
    complaints = [complaint for kernel in kernels if (complaint := beyond_limits(kernel))]
    if options.write:
        table: dict[str, dict[str, dict[str, Any]]] = {}
        for kernel in kernels:
            table.setdefault(kernel.target.name, {})[entry_name(kernel)] = figures(kernel)
        kept = read_table()["kernels"] | table
        write_table({name: kept[name] for name in TARGETS if name in kept})
    else:
        written = read_table()["kernels"]
        complaints += [
            f"{entry_name(kernel)} for {kernel.target.name}: {figures(kernel)}, the table says {entry}"
            for kernel in kernels
            if figures(kernel) != (entry := written.get(kernel.target.name, {}).get(entry_name(kernel)))
        ]
    print("\n".join(complaints) or f"{len(kernels)} kernels within the limits.")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
