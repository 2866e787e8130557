"""The Python package that a runtime needs: what it must have, and the command that installs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...core.errors import MissingDependency


@dataclass(frozen=True)
class Package:
    """A Python package that a runtime imports.

    Args:
        name: its import name.
        has: a name that it must define; a package that was half removed still imports.
        install: advice on how to install it.
    """

    name: str
    has: str
    install: str

    def require(self) -> Any:
        """Import and return the package.

        Raises:
            MissingDependency: it is not installed, or is installed and broken.
        """
        try:
            module = self._import()
        except ImportError as error:
            raise self._missing(str(error)) from error
        if not hasattr(module, self.has):
            raise self._missing(f"{self.name} is installed only in part: it has no {self.has}.")
        return module

    def _import(self) -> Any:
        """Import it; a package that needs something set before that overrides this."""
        return import_module(self.name)

    def _missing(self, why: str) -> MissingDependency:
        return MissingDependency(
            f"{self.name} is needed to run this file and cannot be imported.", why=why, fix=self.install
        )
