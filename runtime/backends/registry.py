"""The table of runtimes, and which of them runs a file: the first that claims it, or the one that is named."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.wrong_file import refuse_wrong_file
from .backend import AUTO, ONNX_SUFFIX, Backend
from .building import BuildingBackend

if TYPE_CHECKING:
    from ...onnx_graph.onnx_file import OnnxFile

# By name: the folder here whose `backend.py` defines BACKEND. Of those that claim a file the first runs it, if none is
# named.
ROWS = {
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt_rtx",
}


@cache
def named(name: str) -> Backend:
    """Return the backend of a row; KeyError if there is none."""
    return cast("Backend", import_module(f".{ROWS[name]}.backend", __package__).BACKEND)


def backends() -> list[Backend]:
    """Return every backend, in the order of the rows."""
    return [*map(named, ROWS)]


def by_name() -> list[Backend]:
    """Return the backends that `--runtime` names: a file that was built runs in its own."""
    return [backend for backend in backends() if not backend.built]


def builders() -> list[BuildingBackend]:
    """Return the backends that build engines."""
    return [backend for backend in backends() if isinstance(backend, BuildingBackend)]


def builder(name: str) -> BuildingBackend:
    """Return the backend that builds engines under this name.

    Raises:
        UsageError: no backend of this name builds any.
    """
    known = {backend.name: backend for backend in builders()}
    if name not in known:
        raise UsageError(f"There is no backend {name[:60]!r} that builds engines.", fix=f"Known: {', '.join(known)}.")
    return known[name]


def of_file(file: Path | OnnxFile) -> Backend | None:
    """Return the backend that runs a file if none is named; None if none does. Nothing is opened or checked."""
    path = file if isinstance(file, Path) else Path(f"model{ONNX_SUFFIX}")
    return next((backend for backend in map(named, ROWS) if backend.claims(path)), None)


def choose(file: Path | OnnxFile, runtime: str = AUTO) -> tuple[Backend, str]:
    """Return the backend for a file, and the precision in the runtime's name, "" without one.

    Args:
        file: a path, or an ONNX file that was read.
        runtime: as of `runtime.session.load`.

    Raises:
        UsageError: no runtime has this name, or it does not run such files; no backend runs them.
    """
    own = of_file(file)
    if runtime == AUTO:
        return own or _refuse(Path(file)), ""
    name, _, precision = runtime.partition(":")
    found = next((backend for backend in by_name() if backend.name == name), None)
    if found is None or (precision and not found.precisions):
        raise UsageError(f"There is no runtime {runtime[:60]!r}.", fix=f"Known: {_names()}.")
    suffix = (own or _refuse(Path(file))).suffix
    if suffix != found.suffix:
        raise UsageError(
            f"A file named {suffix} does not run in {name}.",
            why="It runs in the engine that it was built for.",
            fix=f"Leave {argument('runtime')} out.",
        )
    return found, precision


def distributions() -> list[str]:
    """List the distributions that bring the runtimes."""
    lines = [line for backend in backends() for line in backend.doctor_lines()]
    return list(dict.fromkeys(name for line in lines for name in (line.distribution, line.add) if name))


def suffixes() -> list[str]:
    """List the suffixes of all backends' files."""
    return list(dict.fromkeys(backend.suffix for backend in backends()))


def _refuse(path: Path) -> NoReturn:
    """Refuse a file that no backend runs, by what it is where that can be told."""
    refuse_wrong_file(path)
    raise UsageError(
        f"Cannot run {path}.",
        why=f"No backend runs files named {path.suffix or 'without a suffix'}.",
        fix=f"Known: {', '.join(suffixes())}.",
    )


def _names() -> str:
    """List what `runtime` may be, with an example of a precision for each backend that takes one."""
    examples = [
        f"{backend.name}:{backend.precisions[-1]} lets {backend.title} compute in {backend.precisions[-1]}"
        for backend in by_name()
        if backend.precisions
    ]
    return "; ".join([", ".join((AUTO, *(backend.name for backend in by_name()))), *examples])
