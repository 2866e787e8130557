"""Write a benchmark as Markdown, for an issue or a wiki."""

from __future__ import annotations

from ...core.documents.bench_report import BenchReport
from ..table import escape_markdown, markdown
from .tables import facts, profile_tables, profile_text, tables


def bench_markdown(report: BenchReport) -> str:
    """Write the benchmark as Markdown."""
    parts = ["## Benchmark\n"]
    parts += [f"> **Warning:** {escape_markdown(line)}\n" for line in report.warnings]
    parts += [markdown(table) for table in tables(report) if table.rows]
    for profile in report.profiles:
        parts.append(f"## Profile of {escape_markdown(profile.label)}\n\n{escape_markdown(profile_text(profile))}\n")
        parts += [markdown(table) for table in profile_tables(profile)]
    parts.append("\n".join(f"- {name}: {escape_markdown(value)}" for name, value in facts(report)) + "\n")
    return "\n".join(parts)
