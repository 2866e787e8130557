"""The attention kernel on a GPU: right, and how fast beside others. Needs torch, triton and this repository.

    python -m benchmarks.gpu [--quick] [--minutes 9] [--output gpu.json] [--plot gpu.png]

First the kernel is checked with every option, as PyTorch runs it and as the plugins hold it (PTX and machine code,
through the CUDA driver). Then, for every case of the grid, each candidate's numbers are compared with a dense fp32
reference; those that agree are timed (CUDA events, the L2 cache cleared before each call) and set against the roofline.
Where TensorRT is installed, the demo model is built into engines and compared too. The document is written after every
case; a run that was stopped, or that ran out of `--minutes`, is taken up by the next.
Exit codes: 0 all of ours is right, 1 it is not, 3 no GPU here.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def use_this_tree() -> None:
    """Make `import localattn` find this tree where it was never installed."""
    if importlib.util.find_spec("localattn") is None:
        spec = importlib.util.spec_from_file_location(
            "localattn", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["localattn"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


use_this_tree()

from localattn.core.errors import LocalAttnError  # noqa: E402

from .cases import HEADS, Case, Device, cases, work  # noqa: E402
from .device import device_of_this_machine  # noqa: E402
from .measure import measure, ours_is_wrong, print_case, targets  # noqa: E402
from .store import Store  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one window and head size: a minute or two")
    parser.add_argument("--dry-run", action="store_true", help="list the cases and candidates; needs no GPU")
    parser.add_argument("--minutes", type=float, help="start no further case after so many; run again to go on")
    parser.add_argument("--fresh", action="store_true", help="forget what the document holds")
    parser.add_argument("--no-engines", action="store_true", help="leave TensorRT out")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "gpu.png")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    grid = cases(options.quick)
    if options.dry_run:
        return dry_run(grid)
    try:
        name, device = device_of_this_machine()
    except LocalAttnError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    store = Store(options.output, describe_run(name, device))
    if not options.fresh and (report := store.read()):
        print(report)
    return run(options, grid, device, store)


def describe_run(name: str, device: Device) -> dict[str, Any]:
    """Of this machine."""
    import torch
    import triton

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": {"name": name, **vars(device)},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "setting": {"batch": 1, "heads": HEADS, "layout": "[B, N, H, D]"},
    }


def dry_run(grid: list[Case]) -> int:
    """List what would be measured."""
    from .candidates import CANDIDATES
    from .check import checks

    print(f"{len(list(checks()))} checks of numbers")
    for case in grid:
        needed = work(case)
        runs = [name for name, candidate in CANDIDATES.items() if not candidate.why_not(case)]
        print(f"{case.describe()}: {needed.operations / 1e9:.2f} GFLOP, {needed.bytes / 1e6:.1f} MB; {', '.join(runs)}")
    print(f"{len(grid)} cases")
    return 0


def run(options: argparse.Namespace, grid: list[Case], device: Device, store: Store) -> int:
    """Check, measure, build engines, draw; each as far as it is not in the document yet."""
    started = time.monotonic()
    if "checks" not in store.rest:
        store.rest["checks"] = check_numbers()
        store.write()
    missing = store.missing(grid)
    for done, case in enumerate(missing):
        if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            print(f"{len(missing) - done} of {len(grid)} cases are left: run again to go on.")
            break
        store.rows[case] = measure(case, device)
        store.write()
        print_case(case, store.rows[case])
    if not options.no_engines and "engines" not in store.rest:
        from .engines import build_and_compare

        store.rest["engines"] = build_and_compare()
        store.write()
    print(f"Wrote {options.output}.")
    draw(options.plot, store)
    return judge(store)


def check_numbers() -> list[dict[str, Any]]:
    """The kernel with every option, in each of its ways."""
    from .check import checks, run_check

    results = [run_check(check) for check in checks()]
    right = sum(result["agrees"] for result in results)
    print(f"Numbers: {right} of {len(results)} calls agree with the float64 reference, in each way.", flush=True)
    return results


def draw(path: Path, store: Store) -> None:
    """The plot, where matplotlib is there and something was measured."""
    if importlib.util.find_spec("matplotlib") is None:
        print("No plot: matplotlib is not installed.")
    elif store.rows:
        from .plot import draw as draw_plot

        print(f"Drew {draw_plot(store.document(), path)}.")


def judge(store: Store) -> int:
    """Say how often the targets are met, and what of ours is wrong; 1 if something is."""
    results = list(store.rows.values())
    for target, (met, among) in targets(results).items():
        print(f"{target}: {met} of {among}")
    complaints = [f"{x['what']}: {x['errors']}" for x in store.rest.get("checks", []) if not x["agrees"]]
    complaints += ours_is_wrong(results)
    complaints += [e["what"] for e in store.rest.get("engines", []) if e["status"] == "failed"]
    print("\n".join(complaints) or "Everything of ours agrees with the reference.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
