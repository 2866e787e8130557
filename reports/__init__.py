"""Results as pages: tables, Markdown, and self-contained HTML with small charts.

Nothing here measures or decides; it shows what the commands' JSON says. Tables and Markdown need nothing beyond
Python, HTML needs Jinja2.
"""

from __future__ import annotations


def require_html() -> None:
    """Say before the work, not after it, that a page could not be written.

    Raises:
        MissingDependency: Jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        from ..core.errors import MissingDependency

        raise MissingDependency(
            "Jinja2 is needed for HTML pages and cannot be imported.",
            why=str(error),
            fix="Install it: pip install 'localattn[report]', or choose --format md.",
        ) from error
