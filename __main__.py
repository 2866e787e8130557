"""Run the command line, as `localattn` and as `python -m localattn`."""

from __future__ import annotations

from . import _answer_quietly


def main() -> None:
    """Run the command line and exit with its exit code."""
    _answer_quietly()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
