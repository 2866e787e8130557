"""Limit how deeply a text in JSON, TOML or YAML nests, before it is parsed.

`tomllib` copies the whole path of a key for each of its parts: 50,000 parts in 100 kB take 9.9 GB. PyYAML compares
every bracket with all that are open.
"""

from __future__ import annotations

import re

# Levels of tables and lists, and parts of a dotted key; a configuration has three.
DEEPEST = 32

_PART = r"""(?:[\w\-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')[ \t]*"""
_DOTTED = re.compile(rf"(?<![\w\-]){_PART}(?:\.[ \t]*{_PART}){{{DEEPEST}}}")


def check_nesting(text: str) -> None:
    """Refuse a text that nests more than `DEEPEST` levels, in time linear in its length.

    Brackets and dots in quoted text count too: that works for every format, and no real configuration has so many.

    Raises:
        ValueError: it nests deeper.
    """
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
        if depth > DEEPEST:
            raise ValueError(f"It nests more than {DEEPEST} levels deep.")
    if _DOTTED.search(text):
        raise ValueError(f"One of its keys has more than {DEEPEST} parts.")
