"""Run exported models: the small Python API, without torch.

    from localattn.runtime import load
    session = load("model.onnx")
    outputs = session.run({"tokens": tokens})

Importing this package imports no inference engine; `load` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session, load

__all__ = ["Session", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(".session", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
