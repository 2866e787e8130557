"""Export trained local-attention models to ONNX files, checked against the original.

    import localattn

    localattn.record(model, {"tokens": tokens}, "golden.npz")               # where your model runs
    localattn.export("model.pt", "model.onnx", golden="golden.npz")         # a checkpoint of a supported class
    localattn.export_module(module, {"x": x}, "mine.onnx")                  # a module that contains such layers
    localattn.parity("model.onnx", golden="golden.npz")
    localattn.load("model.onnx").run({"tokens": tokens})                    # needs no torch

Importing this package imports nothing heavy; each name imports what it needs.
"""

from __future__ import annotations

import os
import sys


def _run_with_m() -> bool:
    """Return whether `python -m localattn` imports this package, to run it or a module of it.

    Python says `-m` as the program's name until it has found the module.
    """
    given = sys.orig_argv[1:]
    named = [after for option, after in zip(given, given[1:], strict=False) if option == "-m"]  # noqa: RUF007
    return sys.argv[:1] == ["-m"] and bool(named) and named[0].partition(".")[0] == __name__


def _forget_working_folder() -> None:
    """Remove the working folder from `sys.path` where `python -m localattn` has put it first.

    Modules of a stranger's folder must not be imported in place of Python's own. Whatever Python imported before this
    package came from that folder already.
    """
    if not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109
        del sys.path[0]


def _leave_quietly(number: int, _: object) -> None:
    """End this process, with 128 + the number of the signal as its exit code."""
    os._exit(128 + number)


def _answer_quietly() -> None:
    """Let Ctrl-C end this process without a traceback, unless it is ignored, as in the background.

    It is for the command line while it is imported, when nothing has begun.
    """
    signal: Any = __import__("_signal")  # built in; `signal` imports `enum`, during which Ctrl-C were a traceback
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave_quietly)


if _run_with_m():
    _forget_working_folder()
if _run_with_m() or os.path.basename(sys.argv[0] if sys.argv else "").partition(".")[0] == "localattn":  # noqa: PTH119
    _answer_quietly()

import logging  # noqa: E402
from functools import partial  # noqa: E402
from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from .core.storage.fingerprints import register_fingerprint  # noqa: E402

if TYPE_CHECKING:
    from .commands.api.benching import bench
    from .commands.api.bisecting import bisect
    from .commands.api.building import build
    from .commands.api.bundling import bundle
    from .commands.api.comparing import parity
    from .commands.api.converting import convert
    from .commands.api.exporting import export, export_module
    from .commands.api.generating import generate
    from .commands.api.inspecting import inspect
    from .core import errors
    from .core.documents.report import Report
    from .core.errors import BuildFailed, CheckFailed, ExportFailed, LocalAttnError, MissingDependency, UsageError
    from .exporter.user_module.record import record
    from .exporter.user_module.replace import replace_local_attention
    from .runtime.generation.generator import Generator
    from .runtime.generation.step_session import open_step
    from .runtime.session import load

    __version__: str

# Silent unless an application, or the command line's -v, asks for what is logged under this name.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "BuildFailed",
    "CheckFailed",
    "ExportFailed",
    "Generator",
    "LocalAttnError",
    "MissingDependency",
    "Report",
    "UsageError",
    "__version__",
    "bench",
    "bisect",
    "build",
    "bundle",
    "convert",
    "errors",
    "export",
    "export_module",
    "generate",
    "inspect",
    "load",
    "open_step",
    "parity",
    "record",
    "replace_local_attention",
]


def _fingerprint(kind: str) -> str:
    found: str = import_module(".plugins.fingerprints", __name__).fingerprint(kind)
    return found


# `core` may not import the packages above it, so they register the digest of what each kind of library is built from.
for _kind in ("kernels", "plugin"):
    register_fingerprint(_kind, partial(_fingerprint, _kind))

# Public name → the module that defines it.
_PUBLIC = {
    **dict.fromkeys(("export", "export_module"), ".commands.api.exporting"),
    "bench": ".commands.api.benching",
    "bisect": ".commands.api.bisecting",
    "build": ".commands.api.building",
    "bundle": ".commands.api.bundling",
    "convert": ".commands.api.converting",
    "generate": ".commands.api.generating",
    "inspect": ".commands.api.inspecting",
    "parity": ".commands.api.comparing",
    "record": ".exporter.user_module.record",
    "replace_local_attention": ".exporter.user_module.replace",
    "load": ".runtime.session",
    "open_step": ".runtime.generation.step_session",
    "Generator": ".runtime.generation.generator",
    "Report": ".core.documents.report",
    **dict.fromkeys(
        ("BuildFailed", "CheckFailed", "ExportFailed", "LocalAttnError", "MissingDependency", "UsageError"),
        ".core.errors",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Reading it takes longer than importing this package.
        return import_module(".core.versions", __name__).package_version()
    if name == "errors":
        return import_module(".core.errors", __name__)
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
