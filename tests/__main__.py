"""Run the tests: add the packages that need `--no-deps`, then run pytest with the same arguments."""

from __future__ import annotations

import importlib
import sys

import pytest

from .packages import install, missing


def main() -> int:
    """Install what is missing, run pytest, and return its exit code."""
    install(missing())
    importlib.invalidate_caches()
    return pytest.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
