"""Find where the tokens come from on which a checkpoint's file is judged, and its weights are rounded."""

from __future__ import annotations

from pathlib import Path

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.reading import read_plain
from ...core.text.read import Part, Passage, passages_of
from ...runtime.text_inputs.tokens import Tokens, open_tokens
from .source_model import SourceModel

# The most bytes of a user's text: calibration reads a few thousand tokens.
_MOST_BYTES = 16 << 20


def tokens_of(checkpoint: Path, source: SourceModel, part: Part = "judgement") -> Tokens | None:
    """Return where the tokens of a checkpoint come from; None where it takes none.

    A tokenizer may lie in the folder, or next to the file.

    Args:
        checkpoint: the file or folder; of a live model a name without any.
        source: the model.
        part: which part of the shipped text.
    """
    return open_tokens(_folders(checkpoint), source.token_limit, getattr(source.args, "config", None), part)


def tokens_of_text(checkpoint: Path, source: SourceModel, text: Path) -> Tokens | None:
    """Return the tokens of a user's text; None where the model takes none.

    Args:
        checkpoint: as of `tokens_of`.
        source: the model.
        text: a file of UTF-8.

    Raises:
        UsageError: it cannot be read, or the model has no tokenizer for it.
    """
    found = open_tokens(
        _folders(checkpoint), source.token_limit, getattr(source.args, "config", None), _passages_of_file(text)
    )
    if found is not None and not found.is_text:
        raise UsageError(
            f"{argument('calibration')} cannot be used: the text {text} has no tokenizer.",
            why=f"{found.why_no_text[:1].upper()}{found.why_no_text[1:]}.",
            fix="Put tokenizer.json beside the weights, or give an .npz with tokens.",
        )
    return found


def _folders(checkpoint: Path) -> list[Path]:
    return [] if not checkpoint.exists() else [checkpoint if checkpoint.is_dir() else checkpoint.parent]


def _passages_of_file(path: Path) -> tuple[Passage, ...]:
    """Read a user's text.

    Raises:
        UsageError: it cannot be read, is too large, or holds no text.
    """
    try:
        raw = read_plain(path, _MOST_BYTES)
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
        text = raw.decode("utf-8-sig")
        if not text.strip():
            raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"Cannot read {path}.", why=why, fix="Give a text in UTF-8.") from error
    return passages_of(text)
