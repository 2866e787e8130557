"""Which tile is the fastest on this GPU: every one that fits, against the one of the table.

    python -m benchmarks.gpu.tune [--dtype fp16] [--head-dim 64 128] [--window 64 256 1024] [--output tune.json]

A tile is left out if its kernel spills registers, takes more shared memory than ahead-of-time plugins get, or
computes something else. The rest are timed on the same cases, in turn; the figure is the geometric mean of their times
over those of the table's tile. What wins belongs into `plugins/kernel/tiles.py`, and the budget is written anew then.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from .__main__ import use_this_tree

use_this_tree()

from localattn.core.errors import LocalAttnError  # noqa: E402
from localattn.plugins.kernel.spec import KernelSpec, Tile  # noqa: E402
from localattn.plugins.kernel.targets import Target  # noqa: E402

from .cases import Case  # noqa: E402
from .device import device_of_this_machine  # noqa: E402
from .measure import judge  # noqa: E402

LENGTH = 32768


def tiles() -> Iterator[Tile]:
    """All that are worth a try: 64 to 128 queries, 16 to 128 keys a step, one or two warps for every 32 queries."""
    for queries, keys, warps, stages in product((64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)):
        if queries // warps in (16, 32):
            yield Tile(queries, keys, warps, stages)


def why_skipped(spec: KernelSpec, target: Target, tile: Tile) -> str:
    """Why a tile is no choice, from its compiled kernel; empty if it is one."""
    from localattn.plugins.kernel.budget import beyond_limits
    from localattn.plugins.kernel.compile import compile_kernel

    try:
        return beyond_limits(compile_kernel(spec, target, tile))
    except LocalAttnError as error:
        return f"{error.what} {error.why}"


def cases_for(spec: KernelSpec, windows: list[int]) -> list[Case]:
    """Causal and not, exact and block-local, at each window."""
    kinds = product((True, False), (True, False), windows)
    return [Case(causal, exact, window, LENGTH, spec.head_dim, spec.dtype) for causal, exact, window in kinds]


def times(cases: list[Case], tile: Tile) -> list[float] | str:
    """Milliseconds of each case, or why there are none."""
    from triton.testing import do_bench

    from localattn.plugins.kernel.launch import launch

    from .candidates import random_inputs, reference

    found = []
    for case in cases:
        inputs = random_inputs(case)
        call = (inputs.query, inputs.key, inputs.value, None, None, case.attributes, tile)
        error, agrees = judge(launch(*call), reference(case, inputs), case.dtype)
        if not agrees:
            return f"it differs by {error} in {case.describe()}"
        found.append(float(do_bench(lambda call=call: launch(*call), warmup=10, rep=40, return_mode="median")))
    return found


def tune(spec: KernelSpec, target: Target, windows: list[int]) -> list[dict[str, Any]]:
    """One row a tile, the fastest first."""
    from localattn.plugins.kernel.tiles import tile_for

    cases, today = cases_for(spec, windows), tile_for(spec, target)
    base = times(cases, today)
    if isinstance(base, str):
        raise LocalAttnError(f"The tile of the table is wrong on this GPU: {base}.")
    rows = []
    for tile in dict.fromkeys((today, *tiles())):
        row: dict[str, Any] = {"kernel": spec.name, "tile": asdict(tile), "today": tile == today}
        reason = why_skipped(spec, target, tile)
        measured = reason or times(cases, tile)
        if isinstance(measured, str):
            row["skipped"] = measured
        else:
            ratios = [mine / other for mine, other in zip(measured, base, strict=True)]
            row |= {"ms": measured, "ratio": math.exp(sum(map(math.log, ratios)) / len(ratios))}
        print(f"{spec.name} {tile}: {row.get('ratio') or row['skipped']}", flush=True)
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("ratio", math.inf))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "bf16"))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--window", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--output", type=Path, help="write all rows as JSON")
    options = parser.parse_args()
    try:
        name, _ = device_of_this_machine()
        from localattn.plugins.kernel.launch import device_target

        rows = []
        for head_dim in options.head_dim:
            found = tune(KernelSpec(options.dtype, head_dim), device_target(_device()), options.window)
            print(f"{name}, heads of {head_dim}: {found[0]['tile']} takes {found[0]['ratio']:.3f} of today's time.")
            rows += found
    except LocalAttnError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    if options.output is not None:
        options.output.write_text(json.dumps({"device": name, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def _device() -> Any:
    import torch

    return torch.device("cuda")


if __name__ == "__main__":
    sys.exit(main())
