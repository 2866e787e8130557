"""localattn: trained local-attention models as checked ONNX files that run anywhere."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("localattn")
except PackageNotFoundError:  # a source tree on the path that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
