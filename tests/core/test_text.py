"""The text that ships: fixed by its digest, in parts that share no sentence, of many scripts."""

from __future__ import annotations

import hashlib
import unicodedata

import pytest

from localattn.core.text.read import PARTS, Part, passages, raw

# A change of the text changes every figure that is measured on it: say so in the changelog.
SHA256 = {
    "calibration": "f5aeceb9c648e12651b40adb72b6892cd3bd0a956ce3ee1c4ae1da0cbb672060",
    "judgement": "e4261fd8f8a7a65964eb38b7be1824fc3fe4dd16e6914cc19e093574a7f59b75",
    "ranking": "6bf636ad34560391445fa4f7fb0f22f01dff8dc6f3dce695f0c189f8a13e7e5a",
}
SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "CJK", "HIRAGANA", "HANGUL", "THAI")


@pytest.mark.parametrize("part", PARTS)
def test_the_text_is_the_one_that_was_measured_on(part: Part) -> None:
    assert hashlib.sha256(raw(part)).hexdigest() == SHA256[part]


def test_it_is_some_60_kilobytes() -> None:
    assert 55_000 < sum(len(raw(part)) for part in PARTS) < 70_000
    assert len(passages("ranking")) > 100


@pytest.mark.parametrize("part", PARTS)
def test_scripts(part: Part) -> None:
    names = {unicodedata.name(letter, "").split(" ")[0].split("-")[0] for letter in raw(part).decode()}
    assert set(SCRIPTS) <= names
    if part != "ranking":
        assert any(ord(letter) >= 0x1F300 for letter in raw(part).decode()), "no emoji"
        assert any(passage.name.startswith("code") for passage in passages(part))


def test_parts_share_no_line() -> None:
    """Short lines, such as a brace, are in any code."""
    lines = {part: {line.strip() for line in raw(part).decode().splitlines()} for part in PARTS}
    for one in PARTS:
        for other in PARTS:
            if one < other:
                assert not {line for line in lines[one] & lines[other] if len(line) > 25}


def test_every_passage_has_a_name_and_words() -> None:
    for part in PARTS:
        assert all(passage.name and passage.text.strip() for passage in passages(part))
