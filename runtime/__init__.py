"""Run exported models: the small Python API, without torch.

    from localattn.runtime import load
    session = load("model.onnx")
    outputs = session.run({"tokens": tokens})

    for (token,) in Generator.open("model_step.onnx").generate(prompt, max_tokens=100): ...

Importing this package imports no inference engine; `load` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends.session import Session
    from .backends.step_session import StepSession
    from .generation.generator import Generator
    from .generation.step_session import open_step
    from .session import load

# Public name → the module that defines it.
_PUBLIC = {
    "Generator": ".generation.generator",
    "Session": ".backends.session",
    "StepSession": ".backends.step_session",
    "load": ".session",
    "open_step": ".generation.step_session",
}
__all__ = ["Generator", "Session", "StepSession", "load", "open_step"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
