r"""Make every character visible in texts that come from files, servers and libraries.

A name in a file may hold anything: line feeds, escape codes, marks that turn the direction of writing, invisible
characters, and the ticks by which this package says that something is proven. `spelled` makes one visible line of it,
for terminals, logs and pages; `markdown_text` and `markdown_code` make it a part of a Markdown line.

The kinds of characters are those of Unicode's general categories (Unicode Standard, section 4.5).
"""

from __future__ import annotations

import re
import unicodedata

# Ticks and crosses like those of a check's result, which only the printer of results writes; then letters, marks and
# symbols that show nothing: fillers of Hangul, joiners, selectors of variants, the empty Braille.
_UNTRUE = re.compile(
    "[\u2713\u2714\u2705\u2610-\u2612\u2715-\u2718\u274c\u274e\u237b\u221a\u2bbd-\u2bbf\U00010102"
    "\U0001f197\U0001f5f4-\U0001f5f9\U0001f7a9\U0001fbb1"
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
# A letter may have this many marks (accents); more would cover the text around it.
_MOST_MARKS = 3

# Characters that may not reach a terminal within a longer text: controls except tab and line feed, marks that change
# the direction of writing, separators of lines, annotations, tags, and halves of surrogate pairs.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def spelled(text: str) -> str:
    r"""Write a text on one line, with every character visible and without control characters.

    Escapes are those of Python: a line feed becomes `\n`, the escape character `\x1b`. Backslashes stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = _MOST_MARKS  # a mark at the beginning has no letter
    for character in text:
        category = unicodedata.category(character)
        if category == "Mn" or category == "Mc":
            marks += 1
            plain = marks <= _MOST_MARKS
        else:
            marks = 0 if category[0] in "LN" else _MOST_MARKS
            plain = category != "Me"
        if plain and character.isprintable() and not _UNTRUE.match(character):
            shown.append(character)
        else:
            shown.append(ascii(character)[1:-1])
    return "".join(shown)


def steerless(text: str) -> str:
    """Replace control characters in a text of several lines, such as a generated text, by U+FFFD."""
    return _STEERING.sub("\ufffd", text)


# `*` and `_` inside words are common in names of modules and files.
_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\|`*_[]<>#~$"} | {"&": "&amp;"})
# Characters that turn a line that they begin into a list, a heading or a rule.
_BEGINS_BLOCK = re.compile(r"[-+](?= |$)|[-=]+(?= *$)|\d+[.)](?= |$)")
# Addresses and mentions become links without any markup.
_LINK = re.compile(r"(?<=[a-zA-Z])(?=://)|(?<=\bwww)(?=\.)|(?=@)", re.IGNORECASE)


def markdown_text(text: str) -> str:
    """Write a text for Markdown on one line, without markup."""
    escaped = re.sub(" +", " ", spelled(text.strip())).translate(_MARKUP)
    if found := _BEGINS_BLOCK.match(escaped):
        escaped = f"{found[0][:-1]}\\{found[0][-1]}{escaped[found.end() :]}"
    return _LINK.sub(r"\\", escaped)


def markdown_code(text: str) -> str:
    """Write a text for Markdown as code within a line, also within a table."""
    line = spelled(text).replace("|", "\\|") or " "
    runs = [len(run) for run in re.findall("`+", line)]
    fence = "`" * next(size for size in range(1, len(runs) + 2) if size not in runs)
    pad = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{fence}{pad}{line}{pad}{fence}"
