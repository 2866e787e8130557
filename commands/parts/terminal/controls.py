"""Keep texts from steering the terminal: names in a file from outside are shown, and never obeyed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# The colours of `console.styled`; then control characters of both sets (C0 without tab and line feed, C1), and those
# that change the direction of writing.
_COLOUR = r"\x1b\[(?:0|1|3[0-7])m"
_STEERING = re.compile(rf"{_COLOUR}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Write characters that would steer a terminal as escapes; tabs, line feeds and our own colours stay."""
    return _STEERING.sub(lambda found: found[0] if len(found[0]) > 1 else ascii(found[0])[1:-1], text)


def cell(text: str) -> Text:
    """Return a table's cell that shows a text as it is: brackets in a name are no markup of Rich's."""
    from rich.text import Text

    return Text(harmless(text))
