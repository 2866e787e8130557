"""Choose the page for each command's JSON, and write it as Markdown or HTML.

A page is made only from the JSON that a command prints, so Markdown, HTML and JSON cannot say different things.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.spelling import markdown_text
from .bisect_page import bisect_page
from .inspect_pages import checkpoint_page, engine_page, onnx_page
from .page import render
from .parity_page import parity_page
from .table import markdown

Document = Mapping[str, Any]

PAGES = {
    "parity": parity_page,
    "bisect": bisect_page,
    "onnx": onnx_page,
    "engine": engine_page,
    "checkpoint": checkpoint_page,
}


def document_markdown(kind: str, document: Document) -> str:
    """Write the document as Markdown, for an issue or a wiki, without charts; needs nothing beyond Python."""
    page = PAGES[kind](document)
    verdict = f"**{markdown_text(page.verdict)}** " if page.verdict else ""
    parts = [f"# {markdown_text(page.title)}\n", f"{verdict}{markdown_text(page.lead)}\n"]
    parts += [f"> **{markdown_text(page.warnings_title)}:** {markdown_text(line)}\n" for line in page.warnings]
    for section in page.sections:
        parts += [f"## {markdown_text(section.title)}\n", *(f"{markdown_text(line)}\n" for line in section.text)]
        # A table without rows adds nothing to its section.
        parts += [markdown(table) for table in section.tables if table.rows]
    lines = [f"- {markdown_text(name)}: {markdown_text(value)}" for name, value in page.properties]
    return "\n".join([*parts, "\n".join(lines) + "\n"] if lines else parts)


def document_html(kind: str, document: Document) -> str:
    """Write the document as an HTML page; needs Jinja2."""
    return render(PAGES[kind](document))
