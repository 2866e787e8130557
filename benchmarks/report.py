"""Results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .cases.node import OURS, ratio

console = Console()
if not console.is_terminal:
    console = Console(width=120)


def print_node(result: dict[str, Any]) -> None:
    """One table a length, one row a candidate."""
    for size in result["sizes"]:
        title = (
            f"n = {size['length']}: limit {size['limit_ms']:.2f} ms by {size['bound']}, at {size['peak_gflops']:.0f} "
            f"GFLOP/s and {size['copy_gb_s']:.0f} GB/s (a square product: {size['square_gflops']:.0f} GFLOP/s); "
            f"up to {size['samples']} samples"
        )
        if size["others_cpu"] is not None:
            title += f", others took {size['others_cpu']:.0%} of the processors"
        table = new_table(
            title, "candidate", "median ms", "p10–p90", "× limit", *(f"{name} takes" for name in OURS), "peak MiB"
        )
        for name, entry in size["candidates"].items():
            label = result["labels"][name]
            if "skipped" in entry:
                table.add_row(label, "skipped:", escape(entry["skipped"][:40]))
                continue
            table.add_row(
                label,
                f"{entry['median_ms']:.1f}",
                f"{entry['p10_ms']:.1f}–{entry['p90_ms']:.1f}",
                f"{entry['median_ms'] / size['limit_ms']:.1f}",
                *(_share(ratio(size, ours, name)) if ours != name else "" for ours in OURS),
                f"{entry['peak_mib']:.0f}",
            )
        console.print(table)
    print_targets(result)


def _share(ratio: float) -> str:
    """One time over another, as a share of it."""
    return f"1/{1 / ratio:.1f}" if ratio == ratio else "–"


def print_hugging_face(result: dict[str, Any]) -> None:
    """One row a candidate and length."""

    def figures(entry: dict[str, Any]) -> tuple[str, ...]:
        times = (f"{entry['cpu_s']:.2f}", f"{entry['wall_s']:.2f}")
        return *times, f"{entry['peak_mib']:,}", f"{entry.get('differs_by', 0):.1g}"

    columns = ("processor s", "seconds", "peak MiB", "differs by")
    _print_candidates(result, "length", columns, figures)


def print_decoder(result: dict[str, Any]) -> None:
    """One row a candidate and context."""

    def figures(entry: dict[str, Any]) -> tuple[str, ...]:
        times = (f"{entry[key]:.1f}" for key in ("first_s", "token_ms", "token_cpu_ms"))
        over = f"{entry['over_rate']:.2f}" if "over_rate" in entry else ""
        differs = f"{entry['differs_by']:.1g}" if "differs_by" in entry else ""
        return *times, over, f"{entry['peak_mib']:,}", differs

    columns = ("prompt s", "ms a token", "processor ms", "over bytes", "peak MiB", "differs")
    _print_candidates(result, "context", columns, figures)


def _print_candidates(
    result: dict[str, Any], size: str, columns: Sequence[str], figures: Callable[[dict[str, Any]], tuple[str, ...]]
) -> None:
    """One row a candidate and size of `hugging_face.candidates`; without figures, why there are none."""
    table = new_table(result["model"], "candidate", size, *columns)
    for row in result["sizes"]:
        for name, label in result["labels"].items():
            entry = row["candidates"].get(name, {"skipped": "not measured"})
            why_not = entry.get("skipped") or entry.get("failed")
            cells = figures(entry) if "peak_mib" in entry else (escape(str(why_not)),)
            table.add_row(label, f"{row[size]:,}", *cells)
        table.add_section()
    console.print(table)
    print_targets(result)


def print_export(result: dict[str, Any]) -> None:
    """One row a step."""
    title = f"Export of {result['checkpoint']} ({result['class_name']})"
    table = new_table(title, "step", "seconds", "peak MiB", "after imports / weights")
    for step, seconds in result["seconds"].items():
        memory = result["steps"][step]
        table.add_row(step, f"{seconds:.2f}", f"{memory['peak_mib']:.0f}", f"{memory['peak_over_weights']:.2f}")
    table.add_section()
    total = (result["total_seconds"], result["peak_mib"], result["peak_over_weights"])
    table.add_row("total", f"{total[0]:.2f}", f"{total[1]:.0f}", f"{total[2]:.2f}")
    console.print(table)
    console.print(
        f"file {result['file_bytes'] / 2**20:.2f} MiB, {result['file_over_weights']:.3f}× the weights in fp32; "
        f"peak {result['peak_mib']:.0f} MiB, {result['libraries_mib']:.0f} of it resident after imports"
    )
    print_targets(result)
    console.print("checks: " + ", ".join(f"{name} {status}" for name, status in result["checks"].items()))


def print_generate(result: dict[str, Any]) -> None:
    """One row a candidate and context."""
    table = new_table(
        f"A token of {result['checkpoint']}; limit {result['limit']['median_ms']:.3f} ms",
        "candidate",
        "context",
        "median ms",
        "p10–p90",
        "tokens/s",
        "peak MiB",
        "max difference",
    )
    for name, label in result["labels"].items():
        for size in result["sizes"]:
            entry = size["candidates"][name]
            table.add_row(
                label,
                f"{size['length']:,}",
                f"{entry['median_ms']:.3g}",
                f"{entry['p10_ms']:.3g}–{entry['p90_ms']:.3g}",
                f"{1e3 / entry['median_ms']:,.3g}",
                f"{entry['peak_mib']:.0f}",
                f"{entry['max_difference']:.1g}",
            )
        table.add_section()
    console.print(table)
    own = result["as_it_is"]
    console.print(
        f"as it is, context {own['length']}: {own['step']['median_ms']:.3f} ms a token, upstream's cached generation "
        f"{own['cached']['median_ms']:.3f}, the weights' products {own['products']['median_ms']:.3f}"
    )
    print_targets(result)


def print_model(result: dict[str, Any]) -> None:
    """Where one run's time goes, then the calls."""
    ways = result["parts_ms"]
    table = new_table(f"{result['checkpoint']}, {result['seq_len']} tokens, one run by operator, ms", "part", *ways)
    for name, part in (("linear layers", "linear"), ("streams' products", "streams"), ("attention nodes", "attention")):
        table.add_row(name, *(_ms(parts[part]) for parts in ways.values()))
    table.add_section()
    for operator in dict.fromkeys(name for parts in ways.values() for name in parts["others"]):
        table.add_row(operator, *(_ms(parts["others"].get(operator, 0.0)) for parts in ways.values()))
    table.add_section()
    table.add_row("all", *(_ms(parts["total"]) for parts in ways.values()))
    console.print(table)
    calls = new_table("Calls", "candidate", "median ms", "p10–p90")
    for name, entry in result["candidates"].items():
        calls.add_row(name, f"{entry['median_ms']:.1f}", f"{entry['p10_ms']:.1f}–{entry['p90_ms']:.1f}")
    console.print(calls)
    for name, reason in result.get("failed", {}).items():
        console.print(f"[red]failed[/]  {name}: {escape(reason)}")
    print_targets(result)


def _ms(value: float) -> str:
    return f"{value:.2f}" if value else ""


def print_startup(result: dict[str, Any]) -> None:
    """One row a command."""
    table = new_table(f"Start-up, {result['samples']} samples", "command", "median ms", "p10–p90")
    for name, entry in result["commands"].items():
        table.add_row(name, f"{entry['median_ms']:.0f}", f"{entry['p10_ms']:.0f}–{entry['p90_ms']:.0f}")
    console.print(table)
    print_targets(result)
    console.print("never imported: " + ", ".join(result["never_imported"]))


def print_getting_started(result: dict[str, Any]) -> None:
    """One row a command."""
    table = new_table("From git clone to a checked bundle", "command", "seconds")
    for entry in result["commands"]:
        table.add_row(escape(entry["command"]), f"{entry['seconds']:.1f}")
    table.add_section()
    table.add_row("all", f"{result['seconds']:.1f}")
    console.print(table)
    print_targets(result)
    console.print(f"load of the machine at the end: {result['load_average']}")
    console.print(f"not measured: {', '.join(result['not_measured'])}", markup=False)


def print_targets(result: dict[str, Any]) -> None:
    """Print what was asked of a result, if anything was, and whether it is met."""
    for target in result.get("targets", ()):
        verdict = "[green]met[/]" if target["met"] else "[red]missed[/]"
        console.print(f"{verdict}  {target['what']}: {target['value']:.3f}, at most {target['limit']:.3f}")


def new_table(title: str, *columns: str) -> Table:
    """Make a table whose first column is of texts, the others of numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table
