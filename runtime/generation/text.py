"""Text in, text out: a prompt's tokens, how many may follow, and the text that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.error_texts import argument, shown
from ...core.errors import UsageError
from ...core.spelling import spelled
from .chat import render_chat
from .defaults import FolderDefaults, read_defaults
from .generator import ENDED, Generator
from .tokenizer import FolderTokenizer

if TYPE_CHECKING:
    Message = Mapping[str, str]

# Number of tokens where neither the caller nor the folder says; fewer if the model's positions end.
DEFAULT_TOKENS = 256
# A model with a vocabulary of this size reads and writes bytes.
BYTES = 256


@dataclass(frozen=True, repr=False)
class Generated:
    """What a model wrote after a prompt.

    Args:
        text: it as text; "" of a model that has neither a tokenizer nor bytes.
        tokens: it as tokens, with the one that ended it.
        prompt: the prompt as tokens.
        finish: why it ended: "stop" (a token or a string), "time", "length".
    """

    text: str
    tokens: list[int]
    prompt: list[int]
    finish: str

    def __str__(self) -> str:
        """Return the text, or the tokens of a model without."""
        return self.text or ",".join(map(str, self.tokens))

    def __repr__(self) -> str:
        """Return it in one line."""
        return f"<Generated: {spelled(shown(str(self)))}, {len(self.tokens)} tokens, {self.finish}>"


def generate_text(
    path: Path,
    prompt: str | Sequence[int] | Sequence[Message],
    generator: Generator,
    *,
    chat: bool = False,
    system: str | None = None,
    max_tokens: int | None = None,
    do_sample: bool | None = None,
    seed: int = 0,
    **sampling: float | None,
) -> Generated:
    """Continue a prompt as the model's folder says: tokenizer, chat template, end of text, sampling.

    Args:
        path: the step file.
        prompt: text, tokens, or the messages of a conversation (`role` and `content`).
        generator: of the file.
        chat: whether the prompt is a message of a conversation.
        system: the system message of it.
        max_tokens: the most tokens; None for as many as the folder says, else 256.
        do_sample: whether tokens are drawn; None for as the folder says.
        seed: of the draws.
        sampling: `temperature`, `top_k`, `top_p`, `repetition_penalty`; None for as the folder says.

    Raises:
        UsageError: the prompt does not fit the model, or there is no tokenizer or no chat template for it.
        MissingDependency: the tokenizer's package is not installed.
    """
    is_ids = not isinstance(prompt, str) and all(not isinstance(x, Mapping) for x in prompt)
    tokenizer = FolderTokenizer.open(path.parent)
    folder = read_defaults(path.parent, tokenizer)
    if is_ids:
        ids = [int(token) for token in prompt]  # type: ignore[arg-type]
    elif tokenizer is not None:
        ids = encoded(prompt, tokenizer, folder, system, chat=chat)  # type: ignore[arg-type]
    elif isinstance(prompt, str) and generator.vocabulary == BYTES and not chat:
        ids = list(prompt.encode())
    else:
        raise no_text(generator.vocabulary)
    if not ids and folder.bos is not None:
        ids = [folder.bos]
    if tokenizer is not None:
        check_rows(ids, tokenizer, generator.vocabulary)
    settings = folder.settings(do_sample, **sampling) | {"seed": seed, **folder.ending(tokenizer)}
    limit = default_limit(generator, folder, len(ids)) if max_tokens is None else max_tokens
    stream = generator.generate([ids] * generator.batch, limit, **settings)
    tokens: list[int] = []
    for row in stream:
        if row[0] == ENDED:
            break
        tokens.append(int(row[0]))
        if stream.finish[0]:
            break
    told = tokens[:-1] if tokens and tokens[-1] in settings["stop"] else tokens
    text = ""
    if tokenizer is not None:
        text = tokenizer.decode(told)
    elif generator.vocabulary == BYTES:
        text = bytes(told).decode("utf-8", "replace")
    return Generated(text, tokens, ids, stream.finish[0] or "length")


def encoded(
    prompt: str | Sequence[Message],
    tokenizer: FolderTokenizer,
    folder: FolderDefaults,
    system: str | None = None,
    *,
    chat: bool,
) -> list[int]:
    """Return the tokens of a text; with `chat`, or of messages, those of a conversation.

    Raises:
        UsageError: there is no chat template, or it refuses the messages.
    """
    if isinstance(prompt, str):
        if not chat:
            return tokenizer.encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    begin = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.encode(render_chat(folder, [*begin, *prompt]), special=False)


def no_text(vocabulary: int) -> UsageError:
    """Return the error for a text that the model cannot read."""
    return UsageError(
        "The prompt is text, and the model does not read bytes.",
        why=f"It has {vocabulary} tokens, and there is no tokenizer.json in its folder.",
        fix=f"Copy the model's tokenizer.json into that folder, or give token numbers: "
        f"{argument('prompt_ids', (1, 2, 3))}",
    )


def default_limit(generator: Generator, folder: FolderDefaults, prompt: int) -> int:
    """Return how many tokens to generate after a prompt of this length by default.

    As many as the folder says, else `DEFAULT_TOKENS`, but no more than the model has positions; at least 1, so that a
    prompt that fills them is refused and not answered by nothing.
    """
    said = folder.most_tokens(prompt)
    limit = DEFAULT_TOKENS if said is None else said
    room = generator.room(prompt)
    return limit if room is None else min(limit, max(room, 1))


def check_rows(ids: Sequence[int], tokenizer: FolderTokenizer, vocabulary: int) -> None:
    """Refuse a prompt with a token outside the model's vocabulary; a tokenizer may have more tokens than the model.

    Raises:
        UsageError: there is one.
    """
    outside = next((token for token in ids if token >= vocabulary), None)
    if outside is not None:
        name = tokenizer.name(outside)
        named = "" if name is None else f" ({shown(name)})"
        raise UsageError(
            f"The prompt has the token {outside}{named}, which the model does not know.",
            why=f"The model has the tokens 0 to {vocabulary - 1}, and tokenizer.json {tokenizer.size} tokens.",
            fix="Remove the text of this token from the prompt, or copy the model's own tokenizer.json into the "
            "model's folder.",
        )
