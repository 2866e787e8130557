"""Open TensorRT or TensorRT-RTX in a way that is the same for the rest of the package.

Polygraphy's loaders handle the differences between releases. It works with both libraries, but binds itself to one when
its modules are imported (POLYGRAPHY_USE_TENSORRT_RTX). `open_library` sets that choice, and afterwards refuses the
other library, which would otherwise be confused with the first.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ....core.errors import MissingDependency, UsageError
from ....core.tensorrt_versions import TENSORRT, TENSORRT_RTX, describe, has
from .package import Library

_log = logging.getLogger(__name__)

# Above every severity of Polygraphy: it logs to stdout, where only results belong, and it also raises its errors.
_SILENT = 1000


# By name: the folder of the runtime whose `package.py` describes the library.
_FOLDERS = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt_rtx"}

# How every message of our plugin library begins.
_OWN = "localattn: "

# Part of what TensorRT-RTX logs after every error where there is no driver (seen with 1.4.0 and 1.7.1).
_NO_DRIVER = "::catchCudaError::"

# Polygraphy's modules that are bound to one library once they are imported.
_BOUND = "polygraphy.backend.trt"


@dataclass
class Messages:
    """The errors that the library logged.

    Args:
        errors: in order, without the severity.
    """

    errors: list[str] = field(default_factory=list)

    def reason(self, error: Exception | None = None) -> str:
        """Return why something failed, in one line: the last error logged, else the exception's text."""
        lines = [line for line in self.errors if _NO_DRIVER not in line] or self.errors
        words = lines[-1:] or [str(error or "")]
        return words[0].strip().split("\n")[0] or "It logged no error."

    def clear(self) -> None:
        """Forget all messages, before work whose messages matter."""
        self.errors.clear()


@dataclass(frozen=True)
class TensorRTLibrary:
    """A library that is open and ready.

    Args:
        library: which of the two.
        trt: its Python module.
        version: its full version.
        messages: the errors it logs.
        logger: the logger that collects them.
    """

    library: Library
    trt: Any
    version: str
    messages: Messages
    logger: Any

    def has(self, feature: str) -> bool:
        """Return whether this release has a feature of `core.tensorrt_versions.FEATURES`."""
        return has(feature, self.library.name, self.version)


_opened: dict[str, TensorRTLibrary] = {}


def open_library(name: str) -> TensorRTLibrary:
    """Import TensorRT ("tensorrt") or TensorRT-RTX ("tensorrt-rtx"), and Polygraphy for it.

    Raises:
        UsageError: an unknown name, or this process already uses the other library.
        MissingDependency: it is not installed, does not start, or is a release that this package does not support.
    """
    if name not in _FOLDERS:
        raise UsageError(f"There is no backend {name!r} for engines.", fix=f"Known: {', '.join(_FOLDERS)}.")
    if name in _opened:
        return _opened[name]
    library: Library = import_module(f"..{_FOLDERS[name]}.package", __package__).PACKAGE
    if find_spec(library.module) is None:
        raise MissingDependency(
            f"{library.module} is not installed.", why=f"The engines of {name} need it.", fix=library.install
        )
    _refuse_other(library)
    trt = _import(library)
    version = str(trt.__version__)
    if not has("supported", name, version):
        raise MissingDependency(
            f"{library.module} {version} is not supported.",
            why=f"This package knows {describe('supported', name)}.",
            fix=library.install,
        )
    messages = Messages()
    logger = _logger(trt, messages)
    _bind_polygraphy(library, logger)
    _opened[name] = TensorRTLibrary(library, trt, version, messages, logger)
    return _opened[name]


def _refuse_other(library: Library) -> None:
    """Refuse a second library in one process: Polygraphy's modules keep the one they were imported for."""
    other = next((name for name in _opened if name != library.name), None)
    bound = sys.modules.get("polygraphy.config") if _BOUND in sys.modules else None
    if other is None and bound is not None and bool(bound.USE_TENSORRT_RTX) != library.is_rtx:
        other = TENSORRT_RTX if bound.USE_TENSORRT_RTX else TENSORRT
    if other is not None:
        raise UsageError(
            f"This process cannot use {library.name}.",
            why=f"It already uses {other}, and Polygraphy drives one of the two a process.",
            fix="Use the two in separate processes: run the command once for each engine.",
        )


def _import(library: Library) -> Any:
    library.prepare()
    try:
        trt = import_module(library.module)
    except ImportError as error:
        raise MissingDependency(
            f"{library.module} cannot be imported.", why=str(error).splitlines()[0], fix=library.install
        ) from error
    if not hasattr(trt, "Builder"):
        raise MissingDependency(
            f"{library.module} is installed only in part.", why="It has no Builder.", fix=library.install
        )
    return trt


def _logger(trt: Any, messages: Messages) -> Any:
    """Return a logger that keeps errors, and passes on the warnings of our own plugins."""
    kept = (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in kept:
                messages.errors.append(message)
            elif severity == trt.ILogger.Severity.WARNING and message.startswith(_OWN):
                _log.warning("%s", message.removeprefix(_OWN))

    return Logger()


def _bind_polygraphy(library: Library, logger: Any) -> None:
    """Import Polygraphy's loaders for this library without output, with this package's logger."""
    try:
        config: Any = import_module("polygraphy.config")
        config.USE_TENSORRT_RTX = library.is_rtx
        import_module("polygraphy.logger").G_LOGGER.module_severity = _SILENT
        util: Any = import_module("polygraphy.backend.trt.util")
        for loaders in library.loaders():
            import_module(loaders)
    except ImportError as error:
        raise MissingDependency(
            "polygraphy cannot be imported.",
            why=str(error).splitlines()[0],
            fix=f"Install it: pip install 'localattn[{library.extra}]' (polygraphy 0.50.3 or later).",
        ) from error
    # Every loader and runner of Polygraphy gives this logger to the library. A process has only one logger, the first,
    # so it must be this one for failures to have a reason.
    util.TRT_LOGGER = logger
