"""Format a conversation for a chat model, by the template in its folder.

The template is a program from outside. It runs in Jinja's immutable sandbox, which gives it values and no objects of
Python, in a process of its own (`render_chat.py`) with limits of time and memory: the sandbox bounds neither.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.error_texts import argument
from ...core.errors import MissingDependency, UsageError
from .defaults import FolderDefaults

_SCRIPT = Path(__file__).with_name("render_chat.py")
_SECONDS = 30


def render_chat(defaults: FolderDefaults, messages: Sequence[Mapping[str, str]], *, seconds: float = _SECONDS) -> str:
    """Return the text of a conversation, up to where the model continues.

    Args:
        defaults: of the model's folder, with the template.
        messages: each with `role` ("system", "user" or "assistant") and `content`.
        seconds: the longest that the template may take.

    Raises:
        UsageError: there is no template, or it failed, refused the messages, or exceeded its limits.
        MissingDependency: jinja2 is not installed.
    """
    if defaults.template is None:
        raise UsageError(
            "The folder has no chat template.",
            why="A template is in chat_template.jinja, or is chat_template in tokenizer_config.json.",
            fix=f"Leave {argument('chat')} out, and write the prompt in the model's own format.",
        )
    request = {"template": defaults.template, "messages": list(messages), "special": dict(defaults.special)}
    try:
        done = subprocess.run(
            [sys.executable, str(_SCRIPT)], input=json.dumps(request).encode(), capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(f"It took more than {seconds:g} seconds.") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise _failed("It exceeded its limits of time and memory.") from None
    if answer.get("missing"):
        raise MissingDependency("A chat template needs jinja2.", fix="pip install 'localattn[transformers]'")
    if "error" in answer:
        raise _failed(str(answer["error"]), told=any(message["role"] == "system" for message in messages))
    text = str(answer["text"])
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _failed(f"Character {error.start} of its text is a lone surrogate.") from error
    return text


def _failed(why: str, *, told: bool = False) -> UsageError:
    fix = f"Write the prompt without {argument('chat')}."
    if told:  # many templates do not support a system message
        fix = f"Leave {argument('system')} out, or write the prompt without {argument('chat')}."
    return UsageError("The model's chat template cannot be used.", why=why, fix=fix)
