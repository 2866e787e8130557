"""Read an ONNX file's bytes as protobuf's wire format, with Python's standard library alone.

`read` gives messages that `judgement.py` judges, for devices without onnx: a bundle takes both files along.
`without_weights` gives the bytes of a large file whose weights are replaced by where they lie in it, so that nothing
else reads them. Field numbers are those of onnx/onnx.proto3, the same since IR version 8.

What protobuf does not read, neither does this: a tag has 32 bits, a number 64, messages nest 100 deep. Where a field
that can be there once comes again, numbers and text replace, and messages are merged, as in protobuf.
"""

from __future__ import annotations

import mmap
from collections.abc import Container, Iterator, Mapping
from typing import Any

Data = mmap.mmap | bytes

# More fields than any model has, those in groups and of unknown numbers included: each takes about a microsecond.
MOST_FIELDS = 1 << 22
# Messages of a model that take most memory: nodes, weights, attributes, values. A parser makes up to 200 bytes of two.
MOST_PARTS = 1 << 20
# Bytes of small messages whose parts are not counted: that costs time, and there are at most half as many.
_SMALL, _UNCOUNTED = 1 << 14, 1 << 21
# Bytes of the fields of a large file that lead to no weight, such as the shapes of values.
MOST_REST = 1 << 26
_DEEPEST = 100
# The first numbers of a list, which are kept; the others are only counted.
_KEPT = 64
_VARINT, _FIXED64, _BYTES, _GROUP, _END, _FIXED32 = range(6)

# The fields of each message: number → name and kind, "*" for lists. Others are passed over.
_NUMBERS = {"int": _VARINT, "int32": _VARINT, "type": _VARINT, "place": _VARINT, "f32": _FIXED32, "f64": _FIXED64}
_FIELDS: dict[str, dict[int, tuple[str, str]]] = {
    "Model": {
        1: ("ir_version", "int"),
        7: ("graph", "Graph"),
        8: ("opset_import", "Opset*"),
        25: ("functions", "Function*"),
    },
    "Opset": {1: ("domain", "str"), 2: ("version", "int")},
    "Graph": {
        1: ("node", "Node*"),
        5: ("initializer", "Tensor*"),
        11: ("input", "Value*"),
        12: ("output", "Value*"),
        15: ("sparse_initializer", "Sparse*"),
    },
    "Function": {
        1: ("name", "str"),
        4: ("input", "str*"),
        5: ("output", "str*"),
        7: ("node", "Node*"),
        9: ("opset_import", "Opset*"),
        10: ("domain", "str"),
        11: ("attribute_proto", "Attribute*"),
        13: ("overload", "str"),
    },
    "Node": {
        1: ("input", "str*"),
        2: ("output", "str*"),
        3: ("name", "str"),
        4: ("op_type", "str"),
        5: ("attribute", "Attribute*"),
        7: ("domain", "str"),
        8: ("overload", "str"),
    },
    "Attribute": {
        1: ("name", "str"),
        2: ("f", "f32"),
        3: ("i", "int"),
        4: ("s", "bytes"),
        5: ("t", "Tensor"),
        6: ("g", "Graph"),
        7: ("floats", "f32*"),
        8: ("ints", "int*"),
        9: ("strings", "bytes*"),
        10: ("tensors", "Tensor*"),
        11: ("graphs", "Graph*"),
        14: ("tp", "Type"),
        15: ("type_protos", "Type*"),
        20: ("type", "type"),
        21: ("ref_attr_name", "str"),
        22: ("sparse_tensor", "Sparse"),
        23: ("sparse_tensors", "Sparse*"),
    },
    "Tensor": {
        1: ("dims", "int*"),
        2: ("data_type", "int32"),
        4: ("float_data", "f32*"),
        5: ("int32_data", "int32*"),
        6: ("string_data", "bytes*"),
        7: ("int64_data", "int*"),
        8: ("name", "str"),
        9: ("raw_data", "bytes"),
        10: ("double_data", "f64*"),
        11: ("uint64_data", "int*"),
        13: ("external_data", "Entry*"),
        14: ("data_location", "place"),
    },
    "Sparse": {1: ("values", "Tensor"), 2: ("indices", "Tensor"), 3: ("dims", "int*")},
    "Entry": {1: ("key", "str"), 2: ("value", "str")},
    "Value": {1: ("name", "str"), 2: ("type", "Type")},
    "Type": {1: ("tensor_type", "TensorType")},
    "TensorType": {2: ("shape", "Shape")},
    "Shape": {1: ("dim", "Dim*")},
    "Dim": {1: ("dim_value", "int")},
}
# The largest value of the enumerations; protobuf passes over larger ones.
_LARGEST = {"type": 14, "place": 1}


class TooMany(ValueError):
    """The file has more parts than any model; its text is a sentence."""


_TOO_MANY = f"It has more than {MOST_PARTS} nodes, weights and attributes."


class Numbers:
    """A list of numbers: how many they are, and the first of them."""

    def __init__(self) -> None:
        self._count, self._first = 0, list[int]()

    def add(self, value: int) -> None:
        """Append a number."""
        self._count += 1
        if len(self._first) < _KEPT:
            self._first.append(value)

    def skip(self, count: int) -> None:
        """Count numbers that are not kept."""
        self._count += count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self._first)

    def __getitem__(self, index: int) -> int:
        return self._first[index]


class Text:
    """Bytes in the file, read when needed."""

    def __init__(self, data: Data, start: int, end: int) -> None:
        self._data, self._start, self._end = data, start, end

    def __len__(self) -> int:
        return self._end - self._start

    def __bytes__(self) -> bytes:
        return bytes(self._data[self._start : self._end])


class Message:
    """A message of the file; its attributes are those of onnx's class of the same name."""

    def __init__(self, kind: str) -> None:
        self._kind, self._size = kind, 0
        self._present: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self._present:
            return self._present[name]
        kind = next((kind for known, kind in _FIELDS[self._kind].values() if known == name), None)
        if kind is None:
            raise AttributeError(name)
        return _default(kind)

    def HasField(self, name: str) -> bool:
        """Return whether a singular field is present."""
        return name in self._present

    def ByteSize(self) -> int:
        """Return its size in the file."""
        return self._size


def _default(kind: str) -> Any:
    if kind.endswith("*"):
        return Numbers() if kind[:-1] in _NUMBERS else []
    return {"str": "", "bytes": b""}.get(kind, 0) if kind in ("str", "bytes", *_NUMBERS) else Message(kind)


def read(data: Data) -> Message:
    """Read a model.

    Raises:
        ValueError: the bytes are not a model.
    """
    model = Message("Model")
    _Reader(data).message(model, 0, len(data), 0)
    if not model.HasField("graph") or not model.ir_version:
        raise ValueError("no graph")
    return model


class Allowance:
    """Count down the fields that may still be read."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields = MOST_FIELDS


class _Reader:
    def __init__(self, data: Data) -> None:
        self._data, self._left, self._messages = data, Allowance(), MOST_PARTS

    def message(self, message: Message, start: int, end: int, depth: int) -> None:
        """Read the fields of a message, which may have some already."""
        if depth > _DEEPEST:
            raise ValueError("messages are nested too deeply")
        message._size += end - start
        known = _FIELDS[message._kind]
        for number, wire, value, stop, _ in fields(self._data, start, end, self._left):
            if number in known:
                self._field(message._present, *known[number], wire, value, stop, depth)

    def _field(
        self, present: dict[str, Any], name: str, kind: str, wire: int, value: int, stop: int, depth: int
    ) -> None:
        """Add a field; protobuf ignores a field with a wire type that does not fit its kind."""
        single, listed = kind.rstrip("*"), kind.endswith("*")
        found: Any
        if single in _NUMBERS:
            if listed and wire == _BYTES:
                self._packed(present.setdefault(name, Numbers()), single, value, stop)
            elif wire == _NUMBERS[single]:
                found = _number(single, value)
                if listed:
                    present.setdefault(name, Numbers()).add(found)
                elif 0 <= found <= _LARGEST.get(single, found) or single not in _LARGEST:
                    present[name] = found
            return
        if wire != _BYTES:
            return
        if single == "bytes":
            found = Text(self._data, value, stop)
        elif single == "str":
            found = self._data[value:stop].decode("utf-8")
        else:
            self._messages -= 1
            if self._messages < 0:
                raise TooMany(_TOO_MANY)
            found = Message(single) if listed else present.get(name) or Message(single)
            self.message(found, value, stop, depth + 1)
        if listed:
            present.setdefault(name, []).append(found)
        else:
            present[name] = found

    def _packed(self, numbers: Numbers, kind: str, start: int, end: int) -> None:
        """Add a list of numbers without tags."""
        width = {_FIXED32: 4, _FIXED64: 8}.get(_NUMBERS[kind])
        if width is not None:
            if (end - start) % width:
                raise ValueError("cut")
            numbers.skip((end - start) // width)
            return
        at = start
        while at < end and len(numbers) < _KEPT:
            value, at = _varint(self._data, at, end)
            numbers.add(_number(kind, value))
        if at < end:
            if self._data[end - 1] >= 0x80:
                raise ValueError("cut")
            for block in range(at, end, 1 << 20):
                numbers.skip(len(self._data[block : min(end, block + (1 << 20))].translate(None, _CONTINUED)))


_CONTINUED = bytes(range(0x80, 0x100))


def _number(kind: str, value: int) -> int:
    """Return a number of the wire with its sign; floating-point numbers are never needed."""
    bits = 32 if kind in ("int32", *_LARGEST) else 64
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) and kind not in ("f32", "f64") else value


def fields(data: Data, at: int, end: int, left: Allowance) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the fields of a message: number, wire type, its value and 0, or where the content begins and ends; and
    where the field itself begins.

    Groups are passed over, with what is in them. Source: protobuf.dev, "Encoding".

    Raises:
        ValueError: it is not a message, or has more fields than are left.
    """
    groups: list[int] = []
    while at < end:
        left.fields -= 1
        if left.fields < 0:
            raise TooMany("It has more fields than any model.")
        begin = at
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if tag >> 32 or not number:
            raise ValueError("not a protobuf message")
        value, stop = at, 0
        if wire == _VARINT:
            value, at = _varint(data, at, end)
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        elif wire == _BYTES:
            length, value = _varint(data, at, end)
            at = stop = value + length
        elif wire == _GROUP:
            groups.append(number)
            if len(groups) > _DEEPEST:
                raise ValueError("groups are nested too deeply")
        elif wire != _END or not groups or groups.pop() != number:
            raise ValueError("not a protobuf message")
        if at > end:
            raise ValueError("cut")
        if not groups and wire != _END:
            yield number, wire, value, stop, begin
    if groups:
        raise ValueError("cut")


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
    raise ValueError("a number is too long")


def check_parts(data: Data, kinds: Mapping[str, Mapping[int, str]], model: str, large: Container[str]) -> None:
    """Refuse a model with more parts than any model has, before a parser makes an object of each.

    Of small messages nothing is counted until there is much of them: up to `_UNCOUNTED` bytes this takes no time.

    Args:
        data: its bytes.
        kinds: the kinds of messages, each with its fields that are messages: number → kind.
        model: the kind of the model itself.
        large: the kinds of which there may be `MOST_PARTS` at most, together.

    Raises:
        TooMany: there are more, or more than `MOST_FIELDS` fields.
        ValueError: the bytes are not a model.
    """
    if len(data) > _UNCOUNTED:
        _Counter(data, kinds, large).message(model, 0, len(data), 0)


class _Counter:
    def __init__(self, data: Data, kinds: Mapping[str, Mapping[int, str]], large: Container[str]) -> None:
        self._data, self._kinds, self._large = data, kinds, large
        self._left, self._parts, self._uncounted = Allowance(), MOST_PARTS, _UNCOUNTED

    def message(self, kind: str, start: int, end: int, depth: int) -> None:
        """Count the parts of a message."""
        if depth > _DEEPEST:
            raise ValueError("messages are nested too deeply")
        known = self._kinds[kind]
        for number, wire, value, stop, _ in fields(self._data, start, end, self._left):
            if wire != _BYTES or number not in known:
                continue
            inner = known[number]
            if inner in self._large:
                self._parts -= 1
                if self._parts < 0:
                    raise TooMany(_TOO_MANY)
            if stop - value < _SMALL:
                self._uncounted -= stop - value
                if self._uncounted >= 0:
                    continue
            self.message(inner, value, stop, depth + 1)


# Messages that lead to weights, by the number of the field; "Graphs" is an attribute of which only graphs count.
_LEADS = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor"},
    "Function": {7: "Node"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 11: "Graph"},
    "Graphs": {6: "Graph", 11: "Graph"},
}
_RAW, _ENTRIES, _PLACE = 9, 13, 14
# Fields that lead to no weight, but to many small messages: operator sets, metadata, training; inputs, outputs, shapes
# of values, quantization.
_REST = {"Model": (8, 14, 20), "Graph": (11, 12, 13, 14, 16), "Function": (9, 12, 14), "Node": (9,)}


def without_weights(data: Data, location: str, least: int) -> bytes:
    """Return the model's bytes, with weights as external data in the model's own file.

    Args:
        data: the file.
        location: the file's name.
        least: bytes from which on a tensor is replaced.

    Raises:
        ValueError: the bytes are not a model.
    """
    return b"".join(_Cutter(data, location, least).message("Model", 0, len(data), 0))


class _Cutter:
    """Writer of a model's messages without weights, in pieces of bytes."""

    def __init__(self, data: Data, location: str, least: int) -> None:
        self._data, self._location, self._least = data, location, least
        self._left, self._rest = Allowance(), MOST_REST

    def message(self, kind: str, start: int, end: int, depth: int) -> list[bytes]:
        """Return the pieces of a message; parse only messages that are large enough to hold such a weight."""
        if depth > _DEEPEST:
            return [self._data[start:end]]
        if kind == "Tensor":
            return self._tensor(start, end)
        leads, pieces, at = _LEADS[kind], [], start
        if kind == "Node" and not self._is_constant(start, end):
            leads = {5: "Graphs"}  # tensors in attributes of other nodes stay in place
        for number, wire, value, stop, begin in fields(self._data, start, end, self._left):
            if wire != _BYTES:
                continue
            if number not in leads:
                self._rest -= stop - value if number in _REST.get(kind, ()) else 0
                if self._rest < 0:
                    raise TooMany("It has more shapes of values than any model.")
                continue
            if stop - value < self._least:
                continue
            inner = self.message(leads[number], value, stop, depth + 1)
            pieces += [self._data[at:begin], _written(number << 3 | _BYTES), _written(sum(map(len, inner))), *inner]
            at = stop
        return [*pieces, self._data[at:end]]

    def _is_constant(self, start: int, end: int) -> bool:
        """Return whether a node is a Constant."""
        found = (
            self._data[value:stop]
            for number, wire, value, stop, _ in fields(self._data, start, end, self._left)
            if number == 4 and wire == _BYTES
        )
        return [*found][-1:] == [b"Constant"]

    def _tensor(self, start: int, end: int) -> list[bytes]:
        """Return a tensor that refers to its raw bytes in the file instead of containing them."""
        found = [field for field in fields(self._data, start, end, self._left) if field[0] in (_RAW, _ENTRIES, _PLACE)]
        if len(found) != 1 or found[0][0] != _RAW or found[0][3] - found[0][2] < self._least:
            return [self._data[start:end]]
        _, _, value, stop, begin = found[0]
        entries = (("location", self._location), ("offset", str(value)), ("length", str(stop - value)))
        written = [_field(_ENTRIES, _field(1, key.encode()) + _field(2, text.encode())) for key, text in entries]
        return [self._data[start:begin], self._data[stop:end], *written, _written(_PLACE << 3), _written(1)]


def _field(number: int, content: bytes) -> bytes:
    return _written(number << 3 | _BYTES) + _written(len(content)) + content


def _written(value: int) -> bytes:
    """Return a number in wire format."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
