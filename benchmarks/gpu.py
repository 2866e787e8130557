"""The attention kernel on a GPU: right, and how fast beside others. Needs torch, triton and this repository.

    python -m benchmarks.gpu [--quick] [--output gpu.json] [--plot gpu.png]

For every case of the grid each candidate's numbers are compared with a dense fp32 reference; those that agree are
timed (CUDA events, the L2 cache cleared before each call) and set against the roofline. Where TensorRT is installed,
the demo model is built into engines and compared too. Exit codes: 0 all of ours is right, 1 it is not, 3 no GPU here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


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

from localattn.core.errors import LocalAttnError, MissingDependency  # noqa: E402

from .gpu_cases import HEADS, Case, Device, cases, data_sheet, floor_seconds, work  # noqa: E402


def measured_device() -> Device:
    """The bandwidth of a copy and the rate of a large matrix product, where no data sheet is known."""
    import torch
    from triton.testing import do_bench

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source)) / 1e3
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    product = do_bench(lambda: matrix @ matrix) / 1e3
    properties = torch.cuda.get_device_properties(0)
    exponentials = 16 * properties.multi_processor_count * _clock_hz(properties)
    return Device(2 * source.numel() / copy, 2 * 8192**3 / product, exponentials, "measured")


def _clock_hz(properties: Any) -> float:
    """The processor clock; an estimate where PyTorch does not tell."""
    return float(getattr(properties, "clock_rate", 1_500_000)) * 1e3


def device_of_this_machine() -> tuple[str, Device]:
    """Name and limits of the first GPU.

    Raises:
        MissingDependency: there is none that PyTorch can use.
    """
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency(
            "There is no GPU that PyTorch can use.",
            why=f"torch {torch.__version__} finds no CUDA device.",
            fix="Run this where an NVIDIA GPU is, with a CUDA build of torch; --dry-run lists the cases anywhere.",
        )
    properties = torch.cuda.get_device_properties(0)
    name = str(properties.name)
    known = data_sheet(name, properties.multi_processor_count, _clock_hz(properties))
    return name, known or measured_device()


def measure(case: Case, device: Device) -> dict[str, Any]:
    """All candidates on one case."""
    from localattn.core.tolerance import tolerance_for

    from .gpu_candidates import CANDIDATES, random_inputs, reference

    inputs = random_inputs(case)
    expected = reference(case, inputs)
    tolerance = tolerance_for(case.dtype)
    needed = work(case)
    floor, limit = floor_seconds(needed, device)
    results: dict[str, Any] = {}
    for name, candidate in CANDIDATES.items():
        reason = candidate.why_not(case)
        if reason:
            results[name] = {"skipped": reason}
            continue
        try:
            run = candidate.prepare(case, inputs)
            difference = (run().float() - expected).abs()
            error = float(difference.max())
            wrong = bool(
                difference.isnan().any() | (difference > tolerance.atol + tolerance.rtol * expected.abs()).any()
            )
            entry: dict[str, Any] = {"max_error": None if error != error else error, "agrees": not wrong}
            if not wrong:
                entry |= timed(run, needed.operations, floor)
            results[name] = entry
        except Exception as error:  # another's library may fail in any way; ours may not
            results[name] = {"failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    return {**case.as_json(), "floor_ms": floor * 1e3, "limit": limit, "candidates": results}


def timed(run: Any, operations: float, floor: float) -> dict[str, Any]:
    """Median, 10th and 90th percentile in milliseconds, rate, and share of the roofline."""
    from triton.testing import do_bench

    median, low, high = do_bench(run, warmup=25, rep=100, quantiles=[0.5, 0.1, 0.9])
    return {
        "median_ms": median,
        "p10_ms": low,
        "p90_ms": high,
        "tflops": operations / median / 1e9,
        "roofline": floor * 1e3 / median,
    }


def ours_is_wrong(results: list[dict[str, Any]]) -> list[str]:
    """What of ours failed or differed."""
    from .gpu_candidates import CANDIDATES

    return [
        f"{name}, n {result['length']}, w {result['window']}: {entry.get('failed') or 'it differs from the reference'}"
        for result in results
        for name, entry in result["candidates"].items()
        if CANDIDATES[name].ours and not entry.get("agrees")
    ]


def print_case(case: Case, result: dict[str, Any]) -> None:
    """One block of the report on the terminal."""
    print(f"{case.describe()}: floor {result['floor_ms'] * 1e3:.1f} µs by {result['limit']}", flush=True)
    for name, entry in result["candidates"].items():
        if "median_ms" in entry:
            text = f"{entry['median_ms'] * 1e3:9.1f} µs {entry['tflops']:6.1f} TFLOP/s {entry['roofline']:5.0%} of it"
        else:
            text = entry.get("skipped") or entry.get("failed") or f"differs by {entry['max_error']}: not timed"
        print(f"  {name:8} {text}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one window and head size: a minute or two")
    parser.add_argument("--dry-run", action="store_true", help="list the cases and candidates; needs no GPU")
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
        return run(options, grid, name, device)
    except LocalAttnError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)


def dry_run(grid: list[Case]) -> int:
    """List what would be measured."""
    from .gpu_candidates import CANDIDATES

    for case in grid:
        needed = work(case)
        runs = [name for name, candidate in CANDIDATES.items() if not candidate.why_not(case)]
        print(f"{case.describe()}: {needed.operations / 1e9:.2f} GFLOP, {needed.bytes / 1e6:.1f} MB; {', '.join(runs)}")
    print(f"{len(grid)} cases")
    return 0


def run(options: argparse.Namespace, grid: list[Case], name: str, device: Device) -> int:
    """Measure, write, draw."""
    import torch
    import triton

    results = []
    for case in grid:
        result = measure(case, device)
        print_case(case, result)
        results.append(result)
    engines: list[dict[str, Any]] = []
    if not options.no_engines:
        from .gpu_engines import build_and_compare

        engines = build_and_compare()
    document = {
        "name": "gpu",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": {"name": name, **vars(device)},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "setting": {"batch": 1, "heads": HEADS, "layout": "[B, N, H, D]"},
        "cases": results,
        "engines": engines,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"Wrote {options.output}.")
    if importlib.util.find_spec("matplotlib") is None:
        print("No plot: matplotlib is not installed.")
    else:
        from .gpu_plot import draw

        print(f"Drew {draw(document, options.plot)}.")
    complaints = ours_is_wrong(results) + [e["what"] for e in engines if e["status"] == "failed"]
    print("\n".join(complaints) or "Everything of ours agrees with the reference.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
