"""Run the command line, as `localattn` and as `python -m localattn`."""

from __future__ import annotations

from .commands.supervisor.early import answer_quietly


def main() -> None:
    """Run the command line and exit with its exit code."""
    answer_quietly()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
