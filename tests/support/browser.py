"""A page in headless Chromium, as a phone shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import NamedTuple

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
PHONE = 390
# How wide are page and window, which background is in use, how large are the charts' letters?
_PROBE = """<script>
const root = document.documentElement;
const drawings = [...document.querySelectorAll("svg")];
const scales = drawings.map(drawing => drawing.getBoundingClientRect().width / drawing.viewBox.baseVal.width);
const letters = parseFloat(getComputedStyle(document.querySelector("svg text")).fontSize) * Math.min(...scales);
const outside = [...document.querySelectorAll("svg")].filter(drawing => {
  const frame = drawing.getBoundingClientRect();
  return [...drawing.querySelectorAll("text")].some(text => {
    const box = text.getBoundingClientRect();
    const across = box.left < frame.left - 1 || box.right > frame.right + 1;
    return across || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  });
});
const names = outside.map(drawing => drawing.getAttribute("aria-label")).join(";");
const colour = getComputedStyle(document.body).backgroundColor;
const said = [root.clientWidth, root.scrollWidth, colour, letters, document.title, names];
parent.document.documentElement.setAttribute("data-probe", said.join("|"));
</script>"""


class Shown(NamedTuple):
    """What a browser made of a page: sizes in pixels; `outside` names the drawings with text beyond their frame."""

    window: int
    page: int
    background: str
    letters: float
    title: str
    outside: str


def probed(folder: Path, page: Path, dark: bool) -> str:
    """What the script of a page put into the attribute `data-probe`."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    said = re.search(r'data-probe="([^"]*)"', dom)
    assert said is not None, "the page's script did not run"
    return said[1]


def show(folder: Path, page: str, dark: bool) -> Shown:
    """Lay the page out as a phone does, and look at it."""
    window, width, background, letters, title, outside = asked(folder, page, dark, _PROBE).split("|")
    return Shown(int(window), int(width), background, float(letters), title, outside)


def asked(folder: Path, page: str, dark: bool, probe: str) -> str:
    """What a script says of a page in a frame as wide as a phone: Chromium's windows are 500 pixels at the least."""
    frame = folder / "frame.html"
    content = escape(page.replace("</body>", probe + "</body>"))
    frame.write_text(
        '<!DOCTYPE html><html><head><meta charset="utf-8"><meta name="color-scheme" content="light dark"></head>'
        f'<body><iframe style="width: {PHONE}px; height: 900px; border: 0" srcdoc="{content}"></iframe></body></html>',
        encoding="utf-8",
    )
    return probed(folder, frame, dark)


def assert_fits_a_phone(shown: Shown, dark: bool) -> None:
    assert PHONE - 20 <= shown.window <= PHONE and shown.page == shown.window, "the page is wider than a phone"
    assert shown.background == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    assert shown.letters >= 10, "the charts' letters are too small to read"
    assert shown.outside == "", "a drawing's text is cut off"
