"""Name the files that belong to a model in a folder, and that those who run its exported file need."""

from __future__ import annotations

# As transformers writes them.
ACCOMPANYING_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "preprocessor_config.json",
)
