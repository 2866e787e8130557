"""Show results as pages: tables, Markdown, and self-contained HTML with small charts.

Nothing here measures or decides; it shows what the commands' JSON says. Tables and Markdown need nothing beyond
Python, HTML needs Jinja2.
"""

from __future__ import annotations

from ..core.error_texts import argument


def require_html() -> None:
    """Check, before any work begins, that an HTML page can be written.

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
            fix=f"Install it: pip install 'localattn[report]', or choose {argument('format', 'md')}.",
        ) from error
