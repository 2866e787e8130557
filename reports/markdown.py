"""Write a page as Markdown: the same text and tables, without the charts."""

from __future__ import annotations

from .page import Page, Section
from .table import escape_markdown, markdown


def page_markdown(page: Page) -> str:
    """Write a page as Markdown, for an issue or a wiki."""
    verdict = f"**{escape_markdown(page.verdict)}** " if page.verdict else ""
    parts = [f"# {escape_markdown(page.title)}\n", f"{verdict}{escape_markdown(page.lead)}\n"]
    parts += [f"> **{escape_markdown(page.warnings_title)}:** {escape_markdown(line)}\n" for line in page.warnings]
    for section in page.sections:
        parts += _section(section)
    if page.facts:
        parts.append(
            "\n".join(f"- {escape_markdown(name)}: {escape_markdown(value)}" for name, value in page.facts) + "\n"
        )
    return "\n".join(parts)


def _section(section: Section) -> list[str]:
    parts = [f"## {escape_markdown(section.title)}\n"]
    parts += [f"{escape_markdown(line)}\n" for line in section.text]
    # A table without rows adds nothing to its section.
    return parts + [markdown(table) for table in section.tables if table.rows]
