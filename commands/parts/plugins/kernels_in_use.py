"""Say in one line which kernels compute a model on the CPU, and which command adds compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ....core.errors import LocalAttnError, MissingDependency
from ....core.extras import as_installed
from ..console import say

if TYPE_CHECKING:
    from ....core.documents.bench_report import BenchRow
    from ....onnx_graph.onnx_file import OnnxFile
    from ....runtime.session import Session


def has_nodes(model: Path | OnnxFile) -> bool:
    """Return whether compiled kernels for the CPU exist for any node of a model; an engine has none."""
    from ....core.storage.cpu_library import computes
    from ....onnx_graph.onnx_file import OnnxFile
    from ....runtime.backends import registry

    backend = registry.of_file(model)
    if backend is None or not backend.cpu_kernels:
        return False
    if isinstance(model, Path):
        model = OnnxFile.read(model)
    return any(computes(domain, op_type) for domain, op_type in model.operators)


def say_kernels(has_nodes: Callable[[], bool], ran: Session | BenchRow, asked: str) -> None:
    """Say which kernels computed a model; nothing without a node for such kernels, elsewhere, or with `--plugin none`.

    Args:
        has_nodes: answers as the function `has_nodes` does; called only where the answer matters.
        ran: what ran the model: the backend's name, the provider, and the library that computed its nodes.
        asked: what was asked for, as `plugin` of `localattn.load`.
    """
    if ran.plugin is not None:
        say(f"Kernels: compiled, {ran.plugin}")
        return
    from ....runtime.backends import registry

    takes_kernels = registry.named(ran.backend).cpu_kernels and (ran.provider, asked) == ("cpu", "auto")
    if takes_kernels and has_nodes():
        command = how_to_add()
        adding = f" To add them: {command}" if command else ""
        say(f"Kernels: none, ONNX functions compute the attention.{adding}")


def how_to_add() -> str:
    """Return the command that adds compiled kernels, and a compiler if needed; "" if that is impossible."""
    from ....core.machine.processor import host_arch
    from ....core.storage.library_store import CPU_KERNELS
    from ....plugins.compilers import find_compiler

    try:
        find_compiler(host_arch())
    except MissingDependency:
        return as_installed(f"pip install 'localattn[compiler]' && {CPU_KERNELS.how_to_build}")
    except LocalAttnError:  # no kernels for this processor, or CXX is not a compiler
        return ""
    return CPU_KERNELS.how_to_build
