"""Where an ONNX file says its weights lie: elsewhere than in its folder, they are refused before an engine reads them.

ONNX allows no such place, and a file that names one would have any file of the machine read as weights. onnxruntime
looks at it since 1.24 (1.23.2 reads `../secret.bin`), TensorRT's parser by its own rules.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import UsageError
from .wire_format import DEEPEST_GRAPH, Data, Span, fields

# Which fields of a message are messages that may hold tensors, and in the end the places of their data; the numbers are
# those of onnx.proto.
_PLACES: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
_KEY, _VALUE = 1, 2


def lies_inside(location: str) -> bool:
    """Whether a place of external data is in the folder of its model or below it."""
    return bool(location) and not Path(location).is_absolute() and ".." not in Path(location).parts


def check_data(path: Path) -> None:
    """Refuse a file whose weights lie elsewhere than in its folder. What is no ONNX file is left to whoever opens it.

    Raises:
        UsageError: it is such a file.
    """
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            locations = set(_locations(data, "Model", (0, len(data)), 0))
    except (OSError, ValueError):
        return
    outside = sorted(location for location in locations if not lies_inside(location))
    if outside:
        raise UsageError(
            f"{path} cannot be loaded.",
            why=f"It takes weights from {outside[0][:100]!r}, which is no file of its folder.",
            fix="Keep the external data file beside the model, under its original name.",
        )


def _locations(data: Data, message: str, span: Span, depth: int) -> Iterator[str]:
    if depth > 4 * DEEPEST_GRAPH:  # a graph in a graph is four messages deeper at the most
        raise ValueError("graphs in graphs, too deep for protobuf")
    if message == "Entry":
        entry = {number: data[start:end] for number, (start, end) in fields(data, span)}
        if entry.get(_KEY) == b"location":
            yield entry.get(_VALUE, b"").decode("utf-8", "replace")
        return
    parts = _PLACES[message]
    for number, inner in fields(data, span):
        if number in parts:
            yield from _locations(data, parts[number], inner, depth + 1)
