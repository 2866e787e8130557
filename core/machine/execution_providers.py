"""onnxruntime's names of the execution providers that this package runs on, by the names that options have for them."""

from __future__ import annotations

_SUFFIX = "ExecutionProvider"
CPU, CUDA, TENSORRT = (f"{name}{_SUFFIX}" for name in ("CPU", "CUDA", "Tensorrt"))


def short_name(execution_provider: str) -> str:
    """Return onnxruntime's name of a provider without the ending that all of them share."""
    return execution_provider.removesuffix(_SUFFIX)
