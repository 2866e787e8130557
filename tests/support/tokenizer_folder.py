"""A tokenizer of bytes with special tokens, and the other files of a Hugging Face folder beside a step file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BOS, EOS, USER, END = 256, 257, 258, 259
VOCABULARY = 264
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<user>{% if message['role'] == 'system' %}system: {% endif %}"
    "{{ message['content'] | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def write(folder: Path, generation: Mapping[str, Any] | None = None, template: str | None = TEMPLATE) -> None:
    """Write the files of a model with `VOCABULARY` tokens, of which each of the first 256 is a byte.

    Args:
        folder: where the step file lies.
        generation: of generation_config.json; None: no such file.
        template: of the chat; None: none.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = letters_of_bytes()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(x, special=True) for x in ("<s>", "</s>", "<user>", "<end>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    names |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


def letters_of_bytes() -> list[str]:
    """Return the printable letter that stands for each byte in a byte-level tokenizer (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
