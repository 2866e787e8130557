"""Pages have one wrap width."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The changelog is a list to search, and the reference of commands is generated.
UNCHECKED = {"CHANGELOG.md", "docs/commands.md"}
PAGES = sorted(
    name
    for folder in (".", "docs", "examples", "tests")
    for path in (ROOT / folder).glob("*.md" if folder in (".", "docs") else "**/*.md")
    if (name := path.relative_to(ROOT).as_posix()) not in UNCHECKED and "node_modules" not in name
)
WIDTH = 100
# Tables that programs write stand between such comments.
GENERATED = re.compile(
    r"<!-- (?:table\.py \w+: begin|matrix) -->.*?<!-- (?:table\.py \w+: end|end of matrix) -->", re.S
)


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines of a page outside of code, comments and generated tables, with their numbers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = GENERATED.sub(lambda found: "\n" * found[0].count("\n"), text)
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        yield number, "" if fenced or line.lstrip().startswith(("```", "<")) else line


def test_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/design.md", "examples/browser/README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_lines_have_one_width(page: str) -> None:
    """Tables, headings and lines with a link, which cannot be broken, are as wide as they need."""
    wide = [
        number
        for number, line in prose(page)
        if len(line) > WIDTH and not line.startswith(("|", "#")) and "](" not in line
    ]
    assert wide == []
