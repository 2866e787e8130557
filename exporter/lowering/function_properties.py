"""Find common properties of all nodes that share an ONNX function; each saves work or memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from ...core.geometry import WindowGeometry
from ...core.nodes.attention import HEADS_FIRST, NodeVariant, geometry_of
from ...core.nodes.grouped import GroupedVariant

# Bytes of scores that one part computes at a time, and the most parts of an ONNX function.
PART_BYTES, MOST_PARTS = 4 << 20, 32


class Part(NamedTuple):
    """A number of blocks of queries that are computed together.

    Args:
        blocks: number of blocks.
        inside: whether all of their keys are inside the sequence.
    """

    blocks: int
    inside: bool


@dataclass(frozen=True)
class FunctionProperties:
    """Properties of every node that shares an ONNX function.

    Args:
        aligned: the length is a multiple of `query_block`, so nothing is padded.
        heads_first: the inputs are `[B, H, N, D]` already.
        whole: the sequence has several blocks but is no longer than the keys of one, so every block takes all keys.
        all_seen: every query sees the whole sequence, so the window hides nothing.
        parts: all blocks in order, grouped in parts; empty if there are few blocks, or if nothing is known of them.
    """

    aligned: bool = False
    heads_first: bool = False
    whole: bool = False
    all_seen: bool = False
    parts: tuple[Part, ...] = ()

    def __and__(self, other: FunctionProperties) -> FunctionProperties:
        """Return the properties that hold for both."""
        same = {field.name for field in fields(self) if getattr(self, field.name) == getattr(other, field.name)}
        return FunctionProperties(**{name: getattr(self, name) for name in same})


def properties_of(
    variant: NodeVariant | GroupedVariant,
    attributes: Mapping[str, Any],
    length: int | None,
    sequences: int | None = None,
) -> FunctionProperties:
    """Return the properties of one node.

    Args:
        variant: its op type.
        attributes: its attributes, by name.
        length: length of its sequences; None if it is dynamic.
        sequences: number of sequences, `B·H`; None if it is dynamic.
    """
    heads_first = tuple(attributes["perm"]) == HEADS_FIRST
    if length is None:
        return FunctionProperties(heads_first=heads_first)
    geometry, block = geometry_of(attributes), int(attributes["query_block"])
    aligned = length % block == 0
    if geometry.sees_all:
        return FunctionProperties(aligned, heads_first)
    keys = geometry.backward_reach + geometry.forward_reach + block
    # A given bias and xpos' decay are stored by distance from the block, so they need the block's own span.
    free = not (variant.has_bias or variant.has_xpos)
    # In one block, or in blocks of one query, the scores would be N × N.
    whole = aligned and free and length <= keys and 1 < block < length
    first, end = geometry.visible_interval(np.array([0, length - 1]), length)
    all_seen = whole and not attributes.get("shared_qk") and first[1] == 0 and end[0] == length
    most = None if sequences is None else PART_BYTES // (4 * sequences * block * (length if whole else keys))
    parts = () if most is None else _parts(geometry, block, length, most)
    return FunctionProperties(aligned, heads_first, whole, bool(all_seen), parts)


def _parts(geometry: WindowGeometry, block: int, length: int, most: int) -> tuple[Part, ...]:
    """Group the blocks in parts of at most `most`, separating those whose keys all lie inside the sequence."""
    blocks = -(-length // block)
    if blocks <= max(1, most):
        return ()
    most = max(1, most, -(-blocks // MOST_PARTS))
    first = min(blocks, -(-geometry.backward_reach // block))
    end = max(first, (length - geometry.forward_reach) // block)
    found = []
    for start, stop, inside in ((0, first, False), (first, end, True), (end, blocks, False)):
        found += [Part(min(most, stop - at), inside) for at in range(start, stop, most)]
    return tuple(found)
