"""Text on the page for browsers: which tokenizers and chat templates its libraries read, and what the page is told.

The page reads tokenizer.json with npm's @huggingface/tokenizers and chat templates with @huggingface/jinja, which ship
with this package (`web_text/libraries.json`). What they do not read is refused when the bundle is made. Some texts
travel with the tokens that they have here; the page compares before it starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import LocalAttnError, UsageError
from ...core.storage.reading import read_plain
from ..generation.defaults import TOKENIZER_CONFIG, FolderDefaults, read_defaults
from ..generation.tokenizer import TOKENIZER, FolderTokenizer

# The page's folder for text, with the libraries.
HOME = "text"
FILES = Path(__file__).with_name("web_text")
_MOST_BYTES = 128 << 20
# What @huggingface/tokenizers 0.2.0 reads, by the entry of tokenizer.json.
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "model": ("BPE", "WordPiece", "Unigram"),
    "normalizer": (
        *("BertNormalizer", "Precompiled", "Sequence", "Replace", "NFC", "NFD", "NFKC", "NFKD", "Strip"),
        *("StripAccents", "Lowercase", "Prepend"),
    ),
    "pre_tokenizer": (
        *("BertPreTokenizer", "Sequence", "Whitespace", "WhitespaceSplit", "Metaspace", "ByteLevel", "Split"),
        *("Punctuation", "Digits", "Replace", "FixedLength"),
    ),
    "post_processor": ("TemplateProcessing", "ByteLevel", "BertProcessing", "RobertaProcessing", "Sequence"),
    "decoder": (
        *("ByteLevel", "WordPiece", "Metaspace", "BPEDecoder", "CTC", "Sequence", "Replace", "Fuse", "Strip"),
        "ByteFallback",
    ),
}
# The tags that @huggingface/jinja 0.5.11 reads.
_TAGS = {
    *("if", "elif", "else", "endif", "for", "endfor", "set", "endset", "macro", "endmacro", "call", "endcall"),
    *("filter", "endfilter", "break", "continue", "generation", "endgeneration"),
}
_TAG = re.compile(r"\{%[-+]?\s*(\w+)")
_SAMPLES = (
    "Why do tides come twice a day?",
    "def read(path):\n    return [line for line in open(path)]\t# 1,234.5",
    "  Größe: naïve café, 日本語 🙂 — don't, WE'LL  ",
)
_INSTEAD = "Leave the tokenizer out of the model's folder: the page then takes numbers of tokens."


def page_text(folder: Path) -> dict[str, Any] | None:
    """Return what the page is told of a model's text; None where there is no tokenizer.

    Args:
        folder: the model's.

    Raises:
        UsageError: a part of the tokenizer or of the chat template that the page's libraries do not read.
    """
    if not (folder / TOKENIZER).is_file():
        return None
    try:
        document = json.loads(read_plain(folder / TOKENIZER, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder / TOKENIZER} cannot be read.", why=f"{error}.") from error
    for entry, kind in _kinds(document if isinstance(document, dict) else {}):
        if kind not in _KNOWN[entry]:
            raise UsageError(
                f"{folder / TOKENIZER} cannot go on a web page.",
                why=f"Its {entry.replace('_', '-')} {kind} is none that @huggingface/tokenizers reads.",
                fix=_INSTEAD,
            )
    defaults = read_defaults(folder, None)
    for tag in _TAG.findall(defaults.template or ""):
        if tag not in _TAGS:
            raise UsageError(
                f"The chat template in {folder} cannot go on a web page.",
                why=f"@huggingface/jinja does not read its tag {tag!r}.",
                fix="Write the template without it, or remove it: the page then continues plain text.",
            )
    return {
        "tokenizer": f"model/{TOKENIZER}",
        "config": f"model/{TOKENIZER_CONFIG}" if (folder / TOKENIZER_CONFIG).is_file() else None,
        "template": defaults.template,
        "special": dict(defaults.special),
        "stop": sorted(_stops(document, defaults)),
        "checks": _checks(folder),
    }


def _kinds(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kinds of parts that a tokenizer has, with the entry each is in; those of a sequence too."""

    def parts(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield str(part.get("type"))
            for name in ("normalizers", "pretokenizers", "processors", "decoders"):
                for inner in part.get(name) or ():
                    yield from parts(inner)

    for entry in _KNOWN:
        for kind in parts(document.get(entry)):
            yield entry, kind


def _stops(document: Mapping[str, Any], defaults: FolderDefaults) -> set[int]:
    """Return the tokens that end a text: those that the folder says, else its end-of-text token."""
    if defaults.stop:
        return {int(token) for token in defaults.stop}
    end = defaults.special.get("eos_token")
    return {token["id"] for token in document.get("added_tokens") or () if token.get("content") == end}


def _checks(folder: Path) -> list[dict[str, Any]]:
    """Return texts with their tokens; none where the tokenizer's package is not installed."""
    try:
        tokenizer = FolderTokenizer.open(folder)
    except LocalAttnError:
        return []
    if tokenizer is None:
        return []
    return [{"text": text, "ids": tokenizer.encode(text)} for text in _SAMPLES]
