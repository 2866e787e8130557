"""Which caches of a chunk file its compiled kernels may overwrite, though its ONNX functions may not.

The function of a chunk node makes a new ring from the old one. The kernel attends to the old ring first, and writes the
new keys last, so that input and output may be one buffer: nothing is copied, and of a long ring no more memory is
touched than has keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...core.nodes.attention import PLUGIN_NAMESPACE
from ...core.nodes.step import CHUNK
from ...onnx_graph.graph_values import reads

if TYPE_CHECKING:
    from ...core.documents.step_facts import CacheFacts


def overwritten(model: Any, caches: Iterable[CacheFacts]) -> frozenset[str]:
    """Return the inputs among caches that a chunk node reads and nothing else, and whose successor it writes.

    Layers that share keys read one ring, and the first would overwrite what the others need.
    """
    graph = model.graph
    readers = Counter(value.name for value in graph.output)
    readers.update(name for node in graph.node for name in reads(node))
    chunks = [node for node in graph.node if node.domain == PLUGIN_NAMESPACE and CHUNK in node.op_type]
    passed_on = {(name, to) for node in chunks for name in node.input for to in node.output}
    return frozenset(
        cache.input for cache in caches if readers[cache.input] == 1 and (cache.input, cache.output) in passed_on
    )
