"""An ONNX file read as protobuf's wire format, as far as a check needs and without its weights.

It takes no other package and no memory; the numbers of fields are those of onnx.proto.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

# Graphs inside graphs, as deep as protobuf itself reads.
DEEPEST_GRAPH = 64

Span = tuple[int, int]
Data = mmap.mmap | bytes


def fields(data: Data, span: Span) -> Iterator[tuple[int, Span]]:
    """Number and span of each field that has a length; others are skipped (protobuf.dev, "Encoding")."""
    at, end = span
    while at < end:
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            length, at = _varint(data, at, end)
            if length > end - at:
                raise ValueError("cut")
            yield tag >> 3, (at, at + length)
            at += length
        else:
            raise ValueError("no protobuf message")


def _varint(data: Data, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("cut")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number too long")
