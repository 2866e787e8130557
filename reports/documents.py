"""Choose the page for each command's JSON, and write it as Markdown or HTML.

A page is made only from the JSON that a command prints, so Markdown, HTML and JSON cannot say different things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from .markdown import page_markdown
from .page import Page, render

Document = Mapping[str, Any]


@dataclass(frozen=True)
class DocumentKind:
    """The functions that make the page and the charts of one kind of document, as `module:function`."""

    page: str
    charts: str


KINDS = {
    "parity": DocumentKind("parity_page:parity_page", "parity_charts:parity_charts"),
    "bisect": DocumentKind("bisect_page:bisect_page", "bisect_page:bisect_charts"),
    "onnx": DocumentKind("inspect_pages:onnx_page", "inspect_charts:inspect_charts"),
    "engine": DocumentKind("inspect_pages:engine_page", "inspect_charts:inspect_charts"),
    "checkpoint": DocumentKind("inspect_pages:checkpoint_page", "inspect_charts:inspect_charts"),
}


def document_markdown(kind: str, document: Document) -> str:
    """Write the document as Markdown; needs nothing beyond Python."""
    return page_markdown(_page(kind, document))


def document_html(kind: str, document: Document) -> str:
    """Write the document as an HTML page; needs Jinja2."""
    page, charts = _page(kind, document), _function(KINDS[kind].charts)(document)
    sections = tuple(replace(section, charts=charts.get(section.title, ())) for section in page.sections)
    return render(replace(page, sections=sections))


def _page(kind: str, document: Document) -> Page:
    page: Page = _function(KINDS[kind].page)(document)
    return page


def _function(place: str) -> Callable[[Document], Any]:
    # Charts need a package that Markdown does not, so they are imported when they are drawn.
    module, name = place.split(":")
    function: Callable[[Document], Any] = getattr(import_module(f".{module}", __package__), name)
    return function
