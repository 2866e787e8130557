"""Define the options for writing results as pages, and write the pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...core.errors import UsageError
from ...core.storage.file_kinds import REPORTS
from .console import note, say_page, suggest
from .paths import OutputPath, output_of

# How a result is written.
ReportFormat = Literal["console", "json", "md", "html"]


_BY_SUFFIX: dict[str, ReportFormat] = {".json": "json", ".md": "md", ".html": "html", ".htm": "html"}

ReportFormatOption = Annotated[
    ReportFormat | None,
    typer.Option(
        "--format",
        help="console, json, md, or html: one page. (Default: by the suffix of --output, else console.)",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the result to this file: .json, .md or .html."),
    OutputPath(*REPORTS),
]


@dataclass(frozen=True)
class Destination:
    """The chosen format and file, which may replace an older one; without a file, stdout."""

    format: ReportFormat
    path: Path | None
    overwrite: bool = False

    def write(self, text: str) -> None:
        """Write the result, whole or not at all."""
        if self.path is None:
            say_page(text)
            return
        from ...core.storage.files import publish
        from ...core.storage.outputs import writing

        with writing(output_of(self.path, REPORTS), overwrite=self.overwrite) as folder:
            staged = folder / self.path.name
            staged.write_text(text, encoding="utf-8")
            publish(staged, self.path)
        note(f"Wrote {self.path}")

    @property
    def shows_console(self) -> bool:
        """Whether stdout shows the result for people: also if it is written to a file, unless that is JSON."""
        return self.format == "console" or (self.path is not None and self.format != "json")


def choose(asked: ReportFormat | None, output: Path | None, force: bool) -> Destination:
    """Choose where the result goes, before the work begins.

    Raises:
        UsageError: the suffix of the file is not that of the format.
        MissingDependency: a page is asked for and Jinja2 is not installed.
    """
    named = "console" if output is None else _BY_SUFFIX.get(output.suffix.lower())
    chosen = asked or named
    if output is not None and chosen != named:
        raise UsageError(
            f"{output} does not have the suffix of a report in {chosen if chosen else 'a known format'}.",
            why="The suffix tells what a file is.",
            fix="Use the suffix .json, .md or .html that fits --format; without --format the suffix chooses the "
            "format.",
        )
    assert chosen is not None
    if chosen == "html":
        from ...reports import require_html

        require_html()
    return Destination(chosen, output, force)


def show(
    destination: Destination,
    kind: str,
    document: Mapping[str, Any],
    console: Callable[[], None],
    following: Sequence[object] = (),
) -> None:
    """Show the result of a command: on the terminal for people, or as JSON, Markdown or a page.

    Args:
        destination: from `choose`.
        kind: a key of `reports.documents.PAGES`.
        document: what `--format json` prints.
        console: prints the result for a terminal.
        following: the command to type next, for people.
    """
    if destination.shows_console:
        console()
    if destination.format == "json":
        destination.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    elif destination.format != "console":
        from ...reports.documents import document_html, document_markdown

        written = document_html if destination.format == "html" else document_markdown
        destination.write(written(kind, document))
    if following and destination.shows_console:
        suggest(*following)
