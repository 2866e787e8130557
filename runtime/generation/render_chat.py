"""Render a chat template in a separate process: a JSON object on stdin, another on stdout.

Run as a script by `chat.py`, and on no other way: it limits this process. It imports nothing of this package.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

MOST_CHARACTERS = 16 << 20
_SECONDS, _BYTES = 10, 1 << 30


def limit() -> None:
    """Limit the time and the memory of this process, if the system supports it."""
    try:
        import resource
    except ImportError:  # Windows: only the caller's time limit applies
        return
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))


def render(request: dict[str, Any]) -> str:
    """Return the text of a conversation.

    Args:
        request: `template`, `messages` and `special`, the names of special tokens.

    Raises:
        ValueError: the template refused the messages, or its text is too long.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Support the tag around a model's text that marks it for training; it has no effect here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message)[:300])

    def tojson(value: object, indent: int | None = None, **others: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    world = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], autoescape=False
    )
    world.filters["tojson"] = tojson
    world.globals["raise_exception"] = raise_exception
    world.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    given = {**request["special"], "messages": request["messages"], "add_generation_prompt": True}
    parts, length = [], 0
    for part in world.from_string(request["template"]).generate(**given, tools=None, documents=None):
        length += len(part)
        if length > MOST_CHARACTERS:
            raise ValueError(f"Its text has more than {MOST_CHARACTERS} characters.")
        parts.append(part)
    return "".join(parts)


def main() -> None:
    """Answer one request."""
    sys.path.pop(0)  # this folder, whose files must not be imported as modules
    answer: dict[str, object]
    try:
        import jinja2.sandbox  # noqa: F401
    except ImportError:
        answer = {"missing": True}
    else:
        request = json.loads(sys.stdin.buffer.read())
        limit()
        try:
            answer = {"text": render(request)}
        except Exception as error:  # a template can fail in any way
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
