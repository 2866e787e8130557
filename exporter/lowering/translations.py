"""Make PyTorch's table of translations to ONNX once in a process, where PyTorch makes it for every export.

The table has a thousand entries, and each is parsed from its source: a third of the time of tracing a small model, and
an export traces two to four times. PyTorch has no option for it, so its function is replaced while a model is traced;
where a release has no such function, each export makes its own table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def translations_made_once() -> Iterator[None]:
    """Give every export in this context a copy of one table of translations."""
    try:
        from torch.onnx._internal.exporter import _registration

        kind: Any = _registration.ONNXRegistry
        own = vars(kind)["from_torchlib"]
    except (ImportError, AttributeError, KeyError):
        yield
        return
    kind.from_torchlib = staticmethod(functools.partial(_copied, kind, own.__get__(None, kind)))
    try:
        yield
    finally:
        kind.from_torchlib = own


def _copied(kind: Any, make: Any, *args: Any, **options: Any) -> Any:
    """Return a table that an export may change; the entries themselves are shared."""
    known = _made(make, args, tuple(sorted(options.items())))
    table = kind()
    vars(table).update(vars(known))
    table.functions = {target: list(entries) for target, entries in known.functions.items()}
    return table


@functools.cache
def _made(make: Any, args: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    return make(*args, **dict(options))
