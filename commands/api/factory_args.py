"""Write the arguments of a caller's factory as the command line takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def as_json(args: str | Mapping[str, Any] | None) -> str | None:
    """Return the arguments as a JSON object; a text and None stay as they are."""
    return json.dumps(dict(args)) if isinstance(args, Mapping) else args
