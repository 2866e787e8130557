"""Build the compiled CPU kernels along with an editable install, where a C++ compiler is there.

All about the package stands in pyproject.toml. `localattn doctor` says whether the kernels are there.
"""

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel


class EditableWithKernels(editable_wheel):  # type: ignore[misc]
    """The editable install, which never fails for want of kernels."""

    def run(self) -> None:
        """Install, then build the kernels into the user's cache, as `localattn plugin build` does."""
        super().run()
        try:
            _this_tree().build_into_cache()
        except Exception as error:
            logging.getLogger(__name__).warning("no compiled CPU kernels: %s", error)


class WithoutThisFile(build_py):  # type: ignore[misc]
    """The package's modules: this file lies among them, because the source tree is the package."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """List them as package, module and file."""
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if entry[:2] != ("localattn", "setup")]


def _this_tree() -> Any:
    """Import this tree under its name, without what the package requires, and return its module that builds kernels."""
    tree = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        "localattn", tree / "__init__.py", submodule_search_locations=[str(tree)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["localattn"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["localattn"])
    return importlib.import_module("localattn.plugins.cpu.build")


setup(cmdclass={"build_py": WithoutThisFile, "editable_wheel": EditableWithKernels})
