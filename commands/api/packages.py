"""Name a package that is not installed, with the command that installs it, instead of Python's import error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import MissingDependency

# Packages that the extras of pyproject.toml install, by import name.
_EXPORTER = ("torch", "onnxscript", "onnx_ir", "einops", "safetensors", "yaml")


def missing_package(error: ModuleNotFoundError) -> MissingDependency | None:
    """Return the error to show for a package that an extra would have installed; None for any other."""
    package = (error.name or "").split(".")[0]
    if package not in _EXPORTER:
        return None
    return MissingDependency(
        f"{package} is not installed.",
        why="Reading checkpoints and exporting need it; running exported models does not.",
        fix="Install it with: pip install 'localattn[cpu]', or pip install 'localattn[gpu]'.",
    )


@contextmanager
def packages_named() -> Iterator[None]:
    """Raise MissingDependency for a missing package that an extra installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from error
