"""Write a benchmark as a page: the figures' tables, and charts of how they are spread."""

from __future__ import annotations

from dataclasses import replace

from ...core.documents.bench_report import BenchReport, BenchRow, Profile
from ..figures import digits, size
from ..page import Chart, Page, Section, render
from ..svg.bars import COLOURS, Bar, Series, bars, histogram, intervals, lines
from .tables import (
    comparison_table,
    comparison_text,
    cost_table,
    latency_table,
    profile_tables,
    profile_text,
    speed,
    summary_rows,
)

_MIB = 1 << 20


def bench_page(report: BenchReport) -> str:
    """Write the benchmark as an HTML page."""
    sections = [_latency(report)]
    if any(row.ratio for row in report.rows):
        sections.append(_comparison(report))
    sections.append(_cost(report))
    sections += [_profile(profile) for profile in report.profiles]
    return render(
        Page(
            title="Benchmark of " + ", ".join(dict.fromkeys(row.model for row in report.rows)),
            lead=_lead(report),
            verdict=_headline(report),
            mark="good" if _headline(report) else "",
            properties=tuple(summary_rows(report)),
            warnings=tuple(report.warnings),
            sections=tuple(sections),
        )
    )


def _fastest(report: BenchReport) -> BenchRow:
    return min(report.rows, key=lambda row: row.latency.mean)


def _headline(report: BenchReport) -> str:
    """Return `2.1 × faster` where the fastest candidate is faster than the first; else ""."""
    ratio = _fastest(report).ratio
    return speed(ratio.value) if ratio is not None and ratio.verdict == "faster" else ""


def _lead(report: BenchReport) -> str:
    first = report.rows[0]
    fastest = _fastest(report)
    name, value = _middle(fastest)
    sentence = f"{fastest.label} takes {digits(value, 'ms')} a call ({name})"
    if fastest.tokens_per_s is not None:
        sentence += f", {digits(fastest.tokens_per_s)} tokens a second"
    if fastest is first or fastest.ratio is None:
        return sentence + "."
    return f"{sentence}. {comparison_text(fastest.label, fastest.ratio)}"


def _middle(row: BenchRow) -> tuple[str, float]:
    """Return the median if it was asked for, else the lowest percentile that was, with its name."""
    percentiles = row.latency.percentiles
    name = "p50" if "p50" in percentiles else next(iter(percentiles))
    return name, percentiles[name]


def _latency(report: BenchReport) -> Section:
    drawn = []
    for row in report.rows:
        name, value = _middle(row)
        highest = list(row.latency.percentiles)[-1]
        drawn.append(Bar(row.label, value, row.latency.min, row.latency.percentiles[highest], digits(value, "ms")))
    caption = f"{name} a call; the thin line goes from the fastest call to {highest}."
    series = [Series(row.label, tuple(enumerate(row.rounds_ms, 1))) for row in report.rows[:COLOURS]]
    rounds = lines(series, "Median of each round", "round", "ms a call")
    charts = [Chart(bars(drawn, "Latency", "ms"), caption), Chart(rounds, _ROUNDS)]
    charts += [_calls(row, index % COLOURS) for index, row in enumerate(report.rows)]
    return Section("Latency and throughput", charts=lambda: charts, tables=(replace(latency_table(report), title=""),))


def _calls(row: BenchRow, colour: int) -> Chart:
    """Draw how long the calls of a candidate took."""
    found = row.histogram
    drawing = histogram(found.edges, found.counts, f"Calls of {row.label}", "ms a call", colour)
    beyond = f", of which the slowest {found.beyond:,} are beyond the right edge" if found.beyond else ""
    return Chart(drawing, f"{row.label}: {row.calls:,} calls{beyond}.")


_ROUNDS = (
    "Median of each round. If all lines move together, the machine changed; if one moves alone, the candidate did."
)


def _comparison(report: BenchReport) -> Section:
    drawn = [
        Bar(row.label, row.ratio.value, row.ratio.low, row.ratio.high, f"{digits(row.ratio.value)}×")
        for row in report.rows
        if row.ratio is not None
    ]
    sentences = [comparison_text(row.label, row.ratio) for row in report.rows if row.ratio is not None]
    chart = Chart(
        intervals(drawn, "Time relative to the other"), "Time relative to the candidate that each is compared with."
    )
    return Section("Compared", tuple(sentences), lambda: [chart], (replace(comparison_table(report), title=""),))


def _cost(report: BenchReport) -> Section:
    charts = []
    measured = [row for row in report.rows if row.memory.peak is not None]
    if measured:
        drawn = [Bar(row.label, (row.memory.peak or 0) / _MIB, text=size(row.memory.peak)) for row in measured]
        charts.append(Chart(bars(drawn, "Peak memory", "MiB"), "Peak memory beyond what the engine's library needs."))
    loads = [Bar(row.label, row.load_ms, text=digits(row.load_ms, "ms")) for row in report.rows]
    charts.append(Chart(bars(loads, "Load time", "ms"), "Time to load the model, in a fresh process."))
    return Section("Loading and memory", charts=lambda: charts, tables=(replace(cost_table(report), title=""),))


def _profile(profile: Profile) -> Section:
    charts = []
    for title, shares in (("By kind of module", profile.patterns), ("By operator", profile.operators)):
        drawn = [Bar(part.name, 100 * part.share, text=f"{100 * part.share:.1f} %") for part in shares[:10]]
        charts.append(Chart(bars(drawn, title, "%", colour=0), f"{title}: share of the time of all nodes."))
    return Section(
        f"Profile of {profile.label}", (profile_text(profile),), lambda: charts, tuple(profile_tables(profile))
    )
