"""The table of thinned grids names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..thinning import GRIDS

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_is_there(grid: str) -> None:
    file, _, function = grid.partition("::")
    assert f"def {function}(" in (TESTS / file).read_text(encoding="utf-8")
    assert GRIDS[grid] > 1
