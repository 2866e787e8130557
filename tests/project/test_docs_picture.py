"""docs/images/design.svg in a browser: every text inside its box, readable in light and in dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.browser import needs_browser, probed

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "design.svg"
# For each text: does a box hold it, and the two colours.
_PROBE = """<script>
const boxes = [...document.querySelectorAll("rect")].reverse();
const said = [...document.querySelectorAll("text")].map(text => {
  const a = text.getBoundingClientRect();
  const box = boxes.find(box => {
    const b = box.getBoundingClientRect();
    return a.left > b.left + 2 && a.right < b.right - 2 && a.top >= b.top && a.bottom <= b.bottom;
  });
  return [text.textContent, getComputedStyle(text).fill, box ? getComputedStyle(box).fill : "", box?.className.baseVal];
});
document.documentElement.setAttribute("data-probe", JSON.stringify(said));
</script>"""


def look(folder: Path, dark: bool) -> list[list[str]]:
    import html
    import json

    page = folder / "page.html"
    head = '<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><body>'
    page.write_text(head + PICTURE.read_text(encoding="utf-8") + _PROBE, encoding="utf-8")
    found: list[list[str]] = json.loads(html.unescape(probed(folder, page, dark)))
    return found


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2, of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_lie_in_their_boxes_and_can_be_read(tmp_path: Path, dark: bool) -> None:
    texts = look(tmp_path, dark)
    assert len(texts) > 30
    for text, colour, background, kind in texts:
        assert background, f"{text!r} is cut off"
        ink, paper = sorted((luminance(colour), luminance(background)))
        assert (paper + 0.05) / (ink + 0.05) >= 4.5, f"{text!r} on {kind}: too little contrast"
    page = luminance(next(background for _, _, background, kind in texts if kind == "page"))
    assert page < 0.05 if dark else page > 0.9
