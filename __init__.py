"""localattn: trained local-attention models as ONNX files proven equal to the original.

    from localattn import load                  # run an exported file; needs no torch
    from localattn import export, export_module, replace_local_attention

Importing this package imports nothing heavy; each name brings what it needs.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

# Silent unless an application, or the command line's -v, asks for what is logged under this name.
logging.getLogger(__name__).addHandler(logging.NullHandler())

# Public name → the module that defines it.
_PUBLIC = {
    "ExportRequest": ".exporter.export",
    "export": ".exporter.export",
    "ModuleOptions": ".exporter.user_module.export_module",
    "export_module": ".exporter.user_module.export_module",
    "replace_local_attention": ".exporter.user_module.replace",
    "Generator": ".runtime.generation.generator",
    "load": ".runtime.session",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    """The installed release; reading it takes longer than importing this package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("localattn")
    except PackageNotFoundError:  # a source tree on the path that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
