"""Make the tables of a benchmark, as every format shows them, and write them as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.documents.bench_report import BUSY, CONFIDENCE, OTHERS, BenchReport, BenchRow, Profile, Ratio, Share
from ...core.spelling import markdown_text
from ..figures import digits, percent, size
from ..table import Column, Table, markdown, numbers, texts

_NAME = Column("candidate", number=False, wrap=True)


def bench_markdown(report: BenchReport) -> str:
    """Write the benchmark as Markdown, for an issue or a wiki."""
    parts = ["## Benchmark\n"]
    parts += [f"> **Warning:** {markdown_text(line)}\n" for line in report.warnings]
    parts += [markdown(table) for table in tables(report) if table.rows]
    for profile in report.profiles:
        parts.append(f"## Profile of {markdown_text(profile.label)}\n\n{markdown_text(profile_text(profile))}\n")
        parts += [markdown(table) for table in profile_tables(profile)]
    parts.append("\n".join(f"- {name}: {markdown_text(value)}" for name, value in summary_rows(report)) + "\n")
    return "\n".join(parts)


def tables(report: BenchReport) -> list[Table]:
    """Make all tables, in reading order."""
    return [latency_table(report), comparison_table(report), cost_table(report)]


def latency_table(report: BenchReport) -> Table:
    """Make the table of milliseconds per call, and throughput."""
    names = list(report.rows[0].latency.percentiles)
    heads = [*names, "mean", "std", "min", "runs/s", "tokens/s"]
    rows = []
    for row in report.rows:
        figures = [*row.latency.percentiles.values(), row.latency.mean, row.latency.std, row.latency.min]
        rows.append((row.label, *map(digits, figures), digits(row.runs_per_s), digits(row.tokens_per_s)))
    return Table("Latency and throughput", (_NAME, *numbers(*heads)), tuple(rows), (_timed(report),))


def comparison_table(report: BenchReport) -> Table:
    """Make the table of times relative to the first model, with the interval."""
    heads = (_NAME, *numbers("time", f"{CONFIDENCE:.0%} interval"), *texts("", "against"))
    rows = [
        (row.label, f"{digits(row.ratio.value)}×", interval(row.ratio), row.ratio.verdict, row.ratio.against)
        for row in report.rows
        if row.ratio is not None
    ]
    note = (
        "Below 1× is faster. Each round gives one ratio, so a slowdown of both cancels out. The value is the "
        "median of the ratios, with the interval of the sign test."
    )
    return Table("Compared", heads, tuple(rows), (note,))


def cost_table(report: BenchReport) -> Table:
    """Make the table of what runs where, load times, memory, and how busy the machine was."""
    heads = ("load ms", "first run ms", "memory loaded", "memory peak", "calls", "other programs", "busy")
    rows = [
        (
            row.label,
            runs_on(row),
            *(digits(row.load_ms), digits(row.first_run_ms)),
            *(size(row.memory.loaded), size(row.memory.peak)),
            f"{row.calls:,}",
            percent(row.others),
            percent(row.busy),
        )
        for row in report.rows
    ]
    note = (
        "Memory is the process's resident memory beyond Python and the engine's library, after loading and at the "
        "peak; GPU memory is not included. Loading does not include importing the engine. Busy: the "
        f"share of the rounds in which other programs took more than {OTHERS:.0%} of the processors; above {BUSY:.0%} "
        "there is no verdict."
    )
    columns = (_NAME, *texts("runs on"), *numbers(*heads))
    return Table("Loading and memory", columns, tuple(rows), (note,))


def profile_tables(profile: Profile) -> list[Table]:
    """Make the tables of where one candidate's time goes."""
    nodes = Table(
        "Slowest nodes",
        (*texts("node", "operator", "module"), *numbers("ms", "share")),
        tuple((n.name, n.operator, n.module, digits(n.ms), percent(n.share)) for n in profile.nodes),
    )
    return [
        _shares("By kind of module", "module (* stands for the layer)", profile.patterns),
        _shares("By operator", "operator", profile.operators),
        _shares("By module", "module", profile.modules),
        nodes,
    ]


def profile_text(profile: Profile) -> str:
    """Say what the tables of a profile show."""
    known = "" if profile.named > 0.9995 else f" {percent(profile.named)} of the time has a known module."
    return (
        f"Means over {profile.runs} profiled runs of {digits(profile.run_ms, 'ms')}, of which nodes took "
        f"{digits(profile.node_ms, 'ms')}. Profiling slows a run: compare shares, not times.{known}"
    )


def interval(ratio: Ratio) -> str:
    """Write an interval, `0.91× to 0.95×`; a dash with too few rounds or on a busy machine."""
    if ratio.low is None or ratio.high is None:
        return "–"
    return f"{digits(ratio.low)}× to {digits(ratio.high)}×"


def comparison_text(label: str, ratio: Ratio) -> str:
    """Write the result of a comparison as a sentence."""
    times = f"{digits(ratio.value)}× the time of {ratio.against}"
    if ratio.busy:
        return (
            f"{label} took {times}, while other programs kept the machine busy: no verdict. "
            "Measure again on a quiet machine."
        )
    if ratio.low is None or ratio.high is None:
        return f"{label} took {times}; there were too few rounds for an interval."
    if ratio.verdict in ("faster", "slower"):
        least, most = (ratio.high, ratio.low) if ratio.value < 1 else (ratio.low, ratio.high)
        return f"{label} is {speed(ratio.value)} than {ratio.against} ({speed(least)} to {speed(most)})."
    return f"No difference is shown between {label} and {ratio.against}: {digits(ratio.value)}× ({interval(ratio)})."


def speed(value: float) -> str:
    """Write a ratio of times in words: `2.1 × faster` for 0.48, `1.3 × slower` for 1.3, `4.2 % faster` for 0.96."""
    factor, word = (1 / value, "faster") if value < 1 else (value, "slower")
    return f"{factor:.1f} × {word}" if factor >= 1.1 else f"{100 * (factor - 1):.1f} % {word}"


def runs_on(row: BenchRow) -> str:
    """Write engine, provider, threads and sizes of a row."""
    parts = [f"{row.backend} {row.provider}", *(["compiled kernel"] if row.plugin else [])]
    if row.threads is not None:
        parts.append(f"{row.threads} thread{'s' if row.threads != 1 else ''}")
    if row.batch is not None and row.seq_len is not None:
        parts.append(f"{row.batch}×{row.seq_len}")
    if row.cuda_graph:
        parts.append("CUDA graph")
    if not row.bound:
        parts.append("inputs copied")
    return ", ".join(parts)


def summary_rows(report: BenchReport) -> list[tuple[str, str]]:
    """List where, when and how the benchmark was measured."""
    machine, settings = report.machine, report.settings
    return [
        ("Machine", f"{machine.cpu}, {machine.cores} cores, {machine.architecture}, {machine.system}"),
        ("Measured", report.created),
        ("Versions", ", ".join([f"Python {machine.python}", *(f"{n} {v}" for n, v in report.versions.items())])),
        ("Inputs", settings.input_source),
        (
            "Settings",
            f"{settings.rounds} rounds, at least {settings.duration:g} s and {settings.iterations} calls each "
            f"after {settings.warmup_ms:g} ms of warm-up, seed {settings.seed}",
        ),
    ]


def _timed(report: BenchReport) -> str:
    bound = {row.bound for row in report.rows}
    inside = {
        True: "the engine's work on buffers it already holds",
        False: "a whole call, with checking and copying its inputs and outputs",
    }
    if len(bound) == 1:
        return f"Milliseconds a call: {inside[bound.pop()]}. One call at a time."
    return f"Milliseconds a call: {inside[True]}; rows marked “inputs copied” show {inside[False]}. One call at a time."


def _shares(title: str, head: str, shares: Sequence[Share]) -> Table:
    columns = (*texts(head), *numbers("ms", "share", "nodes"))
    return Table(title, columns, tuple((s.name, digits(s.ms), percent(s.share), str(s.nodes)) for s in shares))
