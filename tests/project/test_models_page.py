"""docs/models.md: its table is made of the types that tests export."""

from __future__ import annotations

from pathlib import Path

from ..support.models.hugging_face import CASES, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_table_of_types_is_that_of_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.split("<!-- types: begin -->\n")[1].split("<!-- types: end -->")[0].strip() == table()
    assert len({case.name for case in CASES}) == len(CASES) > 25
