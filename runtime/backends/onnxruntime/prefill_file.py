"""Prefill files as onnxruntime is given them: without an output that a prompt does not need, and with shared rings.

The ONNX function of a chunk node makes a new ring from the old one. The compiled kernel attends to the old ring first,
and writes the new keys last, so that input and output may be one buffer: nothing is copied, and of a long ring no more
memory is touched than has keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.nodes.attention import PLUGIN_NAMESPACE
from ....core.nodes.step import CHUNK
from ....onnx_graph.graph_values import reads
from ....onnx_graph.onnx_file import IN_MEMORY, OnnxFile

if TYPE_CHECKING:
    from ....core.documents.step_record import CacheRecord, StepRecord


def leaner(path: Path | OnnxFile, record: StepRecord) -> OnnxFile:
    """Return a prefill file without its output; a file too large for memory stays as it is."""
    file = OnnxFile.read(path)
    if file.size > IN_MEMORY:
        return file
    return file.rewritten(without_output(file.parse(), record.logits_output))


def rings_to_share(file: OnnxFile, record: StepRecord) -> frozenset[str]:
    """Return the inputs among caches that compiled kernels may overwrite; none of a file too large for memory."""
    if file.size > IN_MEMORY:
        return frozenset()
    return overwritten(file.parse(), record.caches)


def overwritten(model: Any, caches: Iterable[CacheRecord]) -> frozenset[str]:
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


def without_output(model: Any, output: str) -> Any:
    """Return a copy of the model without the output, and without nodes and weights that serve nothing else.

    External data is not read: the copy refers to it as the model does.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    kept = [value for value in graph.output if value.name != output]
    needed = {value.name for value in kept}
    nodes = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(reads(node))
            nodes.append(node)
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, left in (("output", kept), ("node", nodes[::-1]), ("initializer", weights)):
        copies = [type(x).FromString(x.SerializeToString()) for x in left]
        graph.ClearField(field)
        getattr(graph, field).extend(copies)
    return copy
