"""The compiled kernels on the CPU: which library a session uses, and what happens if it does not load.

onnxruntime prefers an operator of a registered library over the ONNX function in the file. So a library is registered
if there is one and the file has nodes for it; all other nodes are computed as without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....core.errors import LocalAttnError, MissingDependency
from ....core.storage.cpu_library import computes
from ....core.storage.library_store import AUTO, CPU_KERNELS, NONE, Library, find, read_named

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledKernel:
    """A library to register in a session.

    Args:
        library: verified.
        asked: the user named it, so there is no fallback.
        used: the file has nodes that it computes.
    """

    library: Library
    asked: bool
    used: bool

    def register(self, ort: Any, options: Any) -> None:
        """Register the library in these `SessionOptions`.

        Raises:
            MissingDependency: this onnxruntime does not load it.
        """
        try:
            options.register_custom_ops_library(self.library.image)
        except Exception as error:
            raise MissingDependency(
                f"{self.library.path} cannot be loaded into onnxruntime {ort.__version__}.",
                why=self.library.in_words(error),
                fix=f"Build it on this machine: {CPU_KERNELS.how_to_build} --force",
            ) from error


def choose(plugin: str, operators: Iterable[tuple[str, str]]) -> CompiledKernel | None:
    """Choose the library of compiled kernels for a file; None for none.

    Args:
        plugin: "auto" for the newest library of this release that may be loaded by itself, if the file has nodes for
            it; "none"; or the path of a library.
        operators: domain and type of the file's nodes.

    Raises:
        UsageError: the path leads to no library for this processor.
        CheckFailed: the library at the path was changed after it was built.
    """
    if plugin == NONE:
        return None
    used = any(computes(domain, op_type) for domain, op_type in operators)
    if plugin != AUTO:
        return CompiledKernel(read_named(CPU_KERNELS, Path(plugin)), asked=True, used=used)
    if not used:
        return None
    try:
        library = find(CPU_KERNELS)
    except LocalAttnError as error:
        fall_back(" ".join(line for line in (error.what, error.why) if line))
        return None
    if library is None:
        _log.info("no library of compiled kernels of this release is in the cache")
        return None
    return CompiledKernel(library, asked=False, used=True)


_said: set[str] = set()


def fall_back(reason: str) -> None:
    """Warn, once for each reason, that the ONNX function computes the node although there is a library."""
    if reason not in _said:
        _said.add(reason)
        _log.warning("the compiled attention kernel is not used: %s", reason)


def lacking(source: str, reason: str) -> MissingDependency | None:
    """Return the error for attention nodes without ONNX functions, if onnxruntime's reason shows that; else None."""
    if "not a registered function/op" not in reason:
        return None
    for word in reason.replace("(", " ").split():  # the node is told as "domain:op_type"
        domain, _, op_type = word.partition(":")
        if computes(domain, op_type):
            return MissingDependency(
                f"{source} cannot be loaded: it needs the compiled attention kernel.",
                why=f"Its node {word} has no function definition, and no library with a kernel for it was loaded.",
                fix=f"Build one: {CPU_KERNELS.how_to_build}. Or export the model with its function definition.",
            )
    return None
