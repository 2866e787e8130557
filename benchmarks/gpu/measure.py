"""One case on the GPU: every candidate judged by the dense reference, and timed if it agrees."""

from __future__ import annotations

from typing import Any

from localattn.core.tolerance import tolerance_for

from .cases import Case, Device, floor_seconds, work

Row = dict[str, Any]
# From this length on the kernel is to reach this share of the roofline, as fast as the fastest that computes the same.
LONG, WANTED_SHARE = 32768, 0.6


def measure(case: Case, device: Device) -> Row:
    """All candidates on one case."""
    from .candidates import CANDIDATES, random_inputs, reference

    inputs = random_inputs(case)
    expected = reference(case, inputs)
    needed = work(case)
    floor, limit = floor_seconds(needed, device)
    results: Row = {}
    for name, candidate in CANDIDATES.items():
        reason = candidate.why_not(case)
        if reason:
            results[name] = {"skipped": reason}
            continue
        try:
            run = candidate.prepare(case, inputs)
            error, agrees = judge(run(), expected, case.dtype)
            entry: Row = {"max_error": None if error != error else error, "agrees": agrees}
            if agrees:
                entry |= _timed(run, needed.operations, floor)
            results[name] = entry
        except Exception as error:  # another's library may fail in any way; ours may not
            results[name] = {"failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    return {**case.as_json(), "floor_ms": floor * 1e3, "limit": limit, "candidates": results}


def judge(actual: Any, expected: Any, dtype: str) -> tuple[float, bool]:
    """The largest error, and whether every one is within the tolerance of the type; NaN never is."""
    tolerance, error = tolerance_for(dtype), (actual.float() - expected).abs()
    return float(error.max()), bool((error <= tolerance.atol + tolerance.rtol * expected.abs()).all())


def _timed(run: Any, operations: float, floor: float) -> Row:
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


def ours_is_wrong(results: list[Row]) -> list[str]:
    """What of ours failed or differed."""
    from .candidates import CANDIDATES

    return [
        f"{name}, n {result['length']}, w {result['window']}: {entry.get('failed') or 'it differs from the reference'}"
        for result in results
        for name, entry in result["candidates"].items()
        if CANDIDATES[name].ours and not entry.get("agrees")
    ]


def targets(results: list[Row]) -> Row:
    """How often the kernel is not slower than the fastest other, and reaches its share of the roofline where long."""
    from .candidates import CANDIDATES

    compared = faster = long = reached = 0
    for result in results:
        times = {name: entry["median_ms"] for name, entry in result["candidates"].items() if "median_ms" in entry}
        mine = times.get("kernel")
        others = [time for name, time in times.items() if not CANDIDATES[name].ours]
        if mine is None:
            continue
        if others:
            compared += 1
            faster += mine <= min(others)
        if result["length"] >= LONG:
            long += 1
            reached += result["candidates"]["kernel"]["roofline"] >= WANTED_SHARE
    return {
        "not slower than the fastest other": [faster, compared],
        f"{WANTED_SHARE:.0%} of the roofline from n {LONG} on": [reached, long],
    }


def print_case(case: Case, result: Row) -> None:
    """One block of the report on the terminal."""
    print(f"{case.describe()}: floor {result['floor_ms'] * 1e3:.1f} µs by {result['limit']}", flush=True)
    for name, entry in result["candidates"].items():
        if "median_ms" in entry:
            text = f"{entry['median_ms'] * 1e3:9.1f} µs {entry['tflops']:6.1f} TFLOP/s {entry['roofline']:5.0%} of it"
        else:
            text = entry.get("skipped") or entry.get("failed") or f"differs by {entry['max_error']}: not timed"
        print(f"  {name:8} {text}")
