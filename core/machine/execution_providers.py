"""Map the names of execution providers in options to onnxruntime's names."""

from __future__ import annotations

_SUFFIX = "ExecutionProvider"
CPU, CUDA, TENSORRT = (f"{name}{_SUFFIX}" for name in ("CPU", "CUDA", "Tensorrt"))


def short_name(execution_provider: str) -> str:
    """Return onnxruntime's name of a provider without the common ending."""
    return execution_provider.removesuffix(_SUFFIX)
