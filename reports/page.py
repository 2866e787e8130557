"""Define one self-contained HTML page: title, properties, sections of text, tables and charts.

It has no script and loads nothing from elsewhere; colours follow the reader's light or dark setting; tables that are
too wide for a phone scroll by themselves. Every text is escaped by the template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.spelling import spelled
from .table import Mark, Table

if TYPE_CHECKING:
    from markupsafe import Markup

_TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Chart:
    """A drawing, with a caption that says what it shows."""

    drawing: Markup
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, then text, charts and tables, each of which may be absent.

    Charts are drawn by a function, for HTML alone.
    """

    title: str
    text: tuple[str, ...] = ()
    charts: Callable[[], Sequence[Chart]] = tuple
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Args:
        title: its heading.
        lead: a sentence below it, the result.
        verdict: the result in a word or two, where there is one.
        mark: whether the verdict is `good`, `bad` or `unsure`.
        properties: names and values in small print (what, where, when).
        warnings: what a reader must know before trusting the rest.
        warnings_title: the words before each warning.
        sections: the rest.
    """

    title: str
    lead: str = ""
    verdict: str = ""
    mark: Mark = ""
    properties: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    warnings_title: str = "Before you rely on the figures"
    sections: tuple[Section, ...] = field(default=())


def render(page: Page) -> str:
    """Write a page as HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(page=page)


def _shown(value: object) -> object:
    """Spell out what a page writes; drawings are markup, whose texts are spelled out already."""
    return spelled(value) if type(value) is str else value
