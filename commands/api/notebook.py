"""Show the steps of a long call in notebooks, where nobody gave it a `progress`."""

from __future__ import annotations

import re
import sys

_COUNT = re.compile(r"\d+(?:/| of )\d+")


class _InNotebooks:
    """Print a line for each step where the call comes from IPython or a notebook; else nothing.

    Of steps that are counted ("Round 3 of 12") the first is printed. No control codes: a cell keeps what it was sent.
    """

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, step: str) -> None:
        name = _COUNT.split(step)[0]
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None and name != self._last:
            print(f"localattn: {step} …", file=sys.stderr, flush=True)
        self._last = name

    def __repr__(self) -> str:
        """Return it as signatures show it."""
        return "<shown in notebooks>"


IN_NOTEBOOKS = _InNotebooks()
