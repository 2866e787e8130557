"""Choose the page for each command's JSON, and write it as Markdown or HTML.

A page is made only from the JSON that a command prints, so Markdown, HTML and JSON cannot say different things.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .bisect_page import bisect_page
from .inspect_pages import checkpoint_page, engine_page, onnx_page
from .markdown import page_markdown
from .page import render
from .parity_page import parity_page

Document = Mapping[str, Any]

PAGES = {
    "parity": parity_page,
    "bisect": bisect_page,
    "onnx": onnx_page,
    "engine": engine_page,
    "checkpoint": checkpoint_page,
}


def document_markdown(kind: str, document: Document) -> str:
    """Write the document as Markdown; needs nothing beyond Python."""
    return page_markdown(PAGES[kind](document))


def document_html(kind: str, document: Document) -> str:
    """Write the document as an HTML page; needs Jinja2."""
    from .charts import CHARTS  # needs a package that Markdown does not

    page, charts = PAGES[kind](document), CHARTS[kind](document)
    sections = tuple(replace(section, charts=charts.get(section.title, ())) for section in page.sections)
    return render(replace(page, sections=sections))
