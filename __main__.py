"""Run the command line with `python -m localattn`."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
