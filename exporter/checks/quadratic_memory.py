"""Check that no tensor of the graph has two dimensions of the sequence length.

The graph's own tensors are checked by their recorded shapes, those inside the attention node's ONNX function by the
shapes that onnxruntime computes. A model may be as wide as the sequence is long: then the graph is traced at another
length, and only tensors that changed in both dimensions are faults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import onnx

from ...core.documents.sidecar import CheckRecord
from ..source.source_model import SourceModel
from .growth import all_shapes, unjudged
from .outcome import failed, not_proven, passed, skipped
from .probe import probes

Shape = tuple[int, ...]
T = TypeVar("T")
# A replaced layer keeps a module for each length it is called with (`exporter/models/local_attention/adapter.py`).
_MADE_FOR = re.compile(r"(?<=\.by_length)\.\d+(?=\.)")


class SizesInUse(NamedTuple):
    """Collect sizes that another length should not equal, because a tensor might have them by chance.

    Args:
        graph: the sizes of all tensors of the graph.
        suspects: the sizes of those that may be square in the length.
    """

    graph: frozenset[int]
    suspects: frozenset[int]


def check_quadratic_memory(
    model: onnx.ModelProto, source: SourceModel, retrace: Callable[[SizesInUse], tuple[set[int], dict[str, Shape]]]
) -> CheckRecord:
    """Look for tensors that are quadratic in the sequence length.

    Args:
        model: the written file, weights may be absent.
        source: the model it was exported from.
        retrace: traces the model at another length; returns that length, also as it is padded, and the shapes by name.
    """
    length, window = source.shapes.seq_len, source.window_size
    if source.shapes.full_mask:
        return skipped(f"the requested mask is {length} × {length}")
    if length <= window:
        detail = f"a sequence of {length} fits in one window of {window}, so the scores are n × n anyway"
        return not_proven(detail)
    found, alone = all_shapes(model), probes(model)
    shapes = _in_numbers(found)
    lengths = {length} | {probe.length for probe in alone}  # a node's input may be padded
    square = {name: shape for name, shape in shapes.items() if is_square(shape, lengths)}
    suspects: list[str] = []
    if square:
        in_use = sizes_in_use(shapes, square)
        suspects = still_square(square, in_use, *retrace(in_use))
    largest = max((math.prod(shape) for shape in shapes.values()), default=0)
    for probe in alone:
        inside = probe.measured_shapes(lengths)
        suspects += [f"{probe.node.name}: {name}" for name, shape in inside.items() if is_square(shape, lengths)]
        heads = source.shapes.batch * source.shapes.heads
        largest = max(largest, heads * max(math.prod(shape) for shape in inside.values()))
    if suspects:
        detail = f"{len(suspects)} tensor(s) are n × n (n = {length}): {', '.join(suspects[:5])}"
        return failed(detail)
    unknown = unjudged(model, found)
    if unknown:
        return not_proven(unknown)
    detail = f"no n × n tensor (n = {length}); at most {-(-largest // length):,} elements a position"
    return passed(detail, largest_elements=largest, tensors=len(shapes))


def graph_shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """Return the shapes of all tensors of a model and its subgraphs, by name; dimensions that are no numbers as 0."""
    return _in_numbers(all_shapes(model))


def _in_numbers(shapes: Mapping[str, tuple[int | str, ...]]) -> dict[str, Shape]:
    return {name: tuple(size if isinstance(size, int) else 0 for size in shape) for name, shape in shapes.items()}


def is_square(shape: Iterable[int], lengths: set[int]) -> bool:
    """Return whether at least two dimensions have one of these sizes."""
    return sum(size in lengths for size in shape) >= 2


def sizes_in_use(shapes: Mapping[str, tuple[int | str, ...]], suspects: Iterable[str]) -> SizesInUse:
    """Return the sizes in use in a graph and in its tensors that may be square in the length."""

    def sizes(names: Iterable[str]) -> frozenset[int]:
        return frozenset(size for name in names for size in shapes[name] if isinstance(size, int))

    return SizesInUse(sizes(shapes), sizes(suspects))


def unused_first(lengths: Iterable[T], sizes: Callable[[T], Collection[int]], in_use: SizesInUse) -> Iterator[T]:
    """Order lengths to try: first those with no size in use in the graph, then those with none in its suspects.

    Args:
        lengths: lengths to choose from, the best first.
        sizes: gives the sizes that a graph of one length has.
        in_use: the sizes in use, as `sizes_in_use` returns them.
    """
    late = []
    for length in lengths:
        if in_use.graph.isdisjoint(sizes(length)):
            yield length
        else:
            late.append(length)
    yield from sorted(late, key=lambda length: not in_use.suspects.isdisjoint(sizes(length)))


def still_square(
    suspects: Mapping[str, tuple[int | str, ...]], in_use: SizesInUse, lengths: set[int], shapes: Mapping[str, Shape]
) -> list[str]:
    """List the tensors that are still square in the length when the graph is traced at another length.

    The exporter numbers tensors, and another length may shift the numbers, so names alone are not reliable. If the
    other length is a size of something else too, a tensor is a fault only if one of its name was square before. A
    suspect whose name is gone is a fault unless its shape is still there, with the other length in one place at most.

    Args:
        suspects: shapes of the tensors that may be square, by name.
        in_use: sizes in use in the graph, as `sizes_in_use` returns them.
        lengths: the other length, also as it is padded.
        shapes: the shapes at the other length, by name.
    """
    plain = partial(_MADE_FOR.sub, "")
    named, there, left = set(map(plain, suspects)), set(map(plain, shapes)), set(shapes.values())
    square = [name for name, shape in shapes.items() if is_square(shape, lengths)]
    faults = [name for name in square if in_use.graph.isdisjoint(lengths) or plain(name) in named]
    gone = {name: shape for name, shape in suspects.items() if plain(name) not in there}
    return faults + [name for name, shape in gone.items() if not _left(shape, lengths, left)]


def _left(shape: tuple[int | str, ...], lengths: set[int], shapes: set[Shape]) -> bool:
    """Return whether a shape is among others, as it is or with one dimension replaced by one of these lengths."""
    changed = ((*shape[:place], size, *shape[place + 1 :]) for place in range(len(shape)) for size in lengths)
    return any(other in shapes for other in (shape, *changed))
