"""Collect the windows of an exported file or its sidecar for reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.documents.window_view import WindowView, bias_views, views
from ..core.errors import UsageError
from ..core.geometry import WindowGeometry
from ..core.nodes.attention import geometry_of

if TYPE_CHECKING:
    from ..core.documents.sidecar import Sidecar
    from .summary import OnnxSummary


def windows_of_file(summary: OnnxSummary) -> list[WindowView]:
    """Return the windows of the attention nodes in a file, and AFT-local's biases by its sidecar."""
    sidecar = summary.sidecar if summary.sidecar_matches else None
    found = views(
        _geometries((node.name, node.attributes) for node in summary.windowed),
        None if sidecar is None else sidecar.seq_len,
    )
    # A file in standard operators has no such nodes, but its sidecar describes them.
    return found or windows_of_sidecar(sidecar)


def windows_of_sidecar(sidecar: Sidecar | None) -> list[WindowView]:
    """Return the windows that a sidecar states."""
    if sidecar is None:
        return []
    found = views(_geometries((window.name, vars(window)) for window in sidecar.windows), sidecar.seq_len)
    size = sidecar.kwargs.get("local_window_size")  # an argument of AFTLocal alone, whose layers have no windows
    if not found and isinstance(size, int):
        return bias_views(sidecar.class_name, size, bool(sidecar.options.get("causal")), sidecar.seq_len)
    return found


def _geometries(nodes: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, WindowGeometry]]:
    """Yield the geometry of nodes with complete and possible attributes; another program may have written them."""
    for name, attributes in nodes:
        try:
            yield name, geometry_of(attributes)
        except (KeyError, TypeError, ValueError, UsageError):
            continue
