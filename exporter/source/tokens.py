"""Find where the tokens come from on which a checkpoint's file is judged, and its weights are rounded."""

from __future__ import annotations

from pathlib import Path

from ...core.text.read import Part
from ...runtime.text_inputs.tokens import Tokens, open_tokens
from .source_model import SourceModel


def tokens_of(checkpoint: Path, source: SourceModel, part: Part = "judgement") -> Tokens | None:
    """Return where the tokens of a checkpoint come from; None where it takes none.

    A tokenizer may lie in the folder, or next to the file.

    Args:
        checkpoint: the file or folder; of a live model a name without any.
        source: the model.
        part: which part of the shipped text.
    """
    folders = [] if not checkpoint.exists() else [checkpoint if checkpoint.is_dir() else checkpoint.parent]
    return open_tokens(folders, source.token_limit, getattr(source.args, "config", None), part)
