"""Keep the time of onnxscript's rewriting linear in the size of a graph, with the same results.

PyTorch's exporter tries each of onnxscript's patterns on each node. A pattern that ends in several nodes lists all
nodes of the graph first, even where its first node cannot be the one it is tried on: the time grows with the square of
the number of layers, and was half of the time of tracing a model of 18. onnxscript has no option for it, so its
function is replaced while a model is traced; where a release has no such function, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_nodes_tried_first() -> Iterator[None]:
    """Let patterns that end in several nodes look at their first node before they list the others."""
    try:
        from onnxscript.rewriter._basics import MatchResult
        from onnxscript.rewriter._matcher import SimplePatternMatcher

        kind: Any = SimplePatternMatcher
        own = vars(kind)["match"]
    except (ImportError, AttributeError, KeyError):
        yield
        return

    def match(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        try:
            pattern = self.pattern
            tried = None if pattern.has_single_output_node else pattern.output_nodes[0].matches(node, MatchResult())
        except (AttributeError, TypeError, IndexError):  # another release
            tried = None
        return own(self, model, graph, node, **options) if tried is None or tried else tried

    kind.match = match
    try:
        yield
    finally:
        kind.match = own
