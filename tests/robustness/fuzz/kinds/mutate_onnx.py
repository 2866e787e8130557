"""Mutations of an ONNX model as a message: any field of any part, operators, graph structure, external data."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor as Field

from .mutate import ODD_INTEGERS, ODD_TEXTS, mutate_bytes

_OPERATORS = (
    "Add", "MatMul", "Gather", "Reshape", "Expand", "Tile", "Range", "ConstantOfShape", "Slice", "Concat", "Split",
    "Transpose",
    "Softmax", "Where", "Cast", "Unsqueeze", "Squeeze", "Shape", "Pad", "ReduceSum", "Einsum", "Loop", "If", "Scan",
    "ScatterND", "GatherND", "Resize", "TopK", "CumSum", "LayerNormalization", "Gemm", "Conv", "OneHot", "Identity",
    "NoSuchOp",
)  # fmt: skip
_LOCATIONS = (
    "../../etc/passwd", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "", ".", "..", "model.onnx",
    "none.bin",
    "weights.bin", "a\0b", "x" * 5000, "./weights.bin", "sub/../weights.bin", "link.bin", "folder",
)  # fmt: skip
# Names that look like output of our own, or steer what shows them.
_FORGERIES = (
    "x\n  \x1b[32m\u2713\x1b[0m parity  max error 1.2e-07", "x\r6 passed, 0 failed, 0 not proven", "x\nNext: run x",
    "x\u2028Warning: x", "\u202eabc\u202c", "\u2066x", "a\x00b", "x\x85Checks:", "x\x07\x9b31m", "<script>x</script>",
    "x`\n\n## y\n\n```sh\nz\n```",
)  # fmt: skip
_OFFSETS = ("0", "-1", "1", "4096", "99999999999999999999", str(1 << 62), "x", "", "0x10", "1e3")


def mutate_onnx(random: Random, content: bytes) -> bytes:
    """One to three changes of the message, or of its bytes."""
    if random.random() < 0.15:
        return mutate_bytes(random, content)
    model = onnx.load_model_from_string(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _CHANGES[random.randrange(len(_CHANGES))](random, model)
    return bytes(model.SerializeToString())


def _messages(message: Any) -> list[Any]:
    """A message and all messages in it."""
    found = [message]
    for field, value in message.ListFields():
        if field.cpp_type == Field.CPPTYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                found += _messages(inner)
    return found


def _any_field(random: Random, model: Any) -> None:
    """A field of any part gets another value, or none."""
    message = random.choice(_messages(model))
    fields = message.ListFields()
    if not fields:
        return
    field, value = random.choice(fields)
    repeated = field.is_repeated
    if random.random() < 0.15:
        message.ClearField(field.name)
    elif field.cpp_type == Field.CPPTYPE_MESSAGE:
        if repeated and len(value):
            _shuffle(random, value)
    elif repeated:
        value[random.randrange(len(value))] = _other(random, field, value[0])
    else:
        setattr(message, field.name, _other(random, field, value))


def _shuffle(random: Random, values: Any) -> None:
    index = random.randrange(len(values))
    if random.random() < 0.5:
        del values[index]
    else:
        values.add().CopyFrom(values[index])


def _other(random: Random, field: Any, value: Any) -> Any:
    if field.cpp_type in (Field.CPPTYPE_INT32, Field.CPPTYPE_ENUM):
        number = random.choice((*range(-1, 25), 1 << 30, -(1 << 31)))
        closed = field.cpp_type == Field.CPPTYPE_ENUM and number not in field.enum_type.values_by_number
        return value if closed else number
    if field.cpp_type == Field.CPPTYPE_INT64:
        number = random.choice((*ODD_INTEGERS[:-1], value + 1, value - 1, value * 2))
        return max(min(number, (1 << 63) - 1), -(1 << 63))
    if field.cpp_type == Field.CPPTYPE_UINT64:
        return random.choice((0, 1, 1 << 63))
    if field.cpp_type in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
        return random.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))
    if field.type == Field.TYPE_BYTES:
        return mutate_bytes(random, value)
    return random.choice(ODD_TEXTS).replace("\ud800", "")


def _operator(random: Random, model: Any) -> None:
    nodes = [*model.graph.node, *(node for body in model.functions for node in body.node)]
    if nodes:
        node = random.choice(nodes)
        if random.random() < 0.5:
            node.op_type = random.choice(_OPERATORS)
        else:
            node.domain = random.choice(("", "localattn", "ai.onnx.ml", "com.microsoft", "none"))


def _forged(random: Random, model: Any) -> None:
    """A name, at each place where it stands, or another text becomes one that looks like output of our own."""
    forgery = random.choice(_FORGERIES)
    texts = random.choice(("input", "output", "initializer", "producer", "doc", "metadata", "domain"))
    graph = model.graph
    if texts == "producer":
        model.producer_name = model.producer_version = forgery
    elif texts == "doc":
        model.doc_string = graph.doc_string = graph.name = forgery
    elif texts == "metadata":
        model.metadata_props.add(key=forgery, value=forgery)
    elif texts == "domain":
        model.opset_import.add(domain=forgery, version=1)
    elif named := list(getattr(graph, texts)):
        before = random.choice(named).name
        for part in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            part.name = forgery if part.name == before else part.name
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [forgery if name == before else name for name in names]


def _wires(random: Random, model: Any) -> None:
    """A node reads or writes another name: cycles, doubles, unknown names."""
    body = random.choice([model.graph, *model.functions])
    if not body.node:
        return
    names = [name for node in body.node for name in (*node.input, *node.output)] + ["", "nothing"]
    node = random.choice(body.node)
    side = random.choice((node.input, node.output))
    if side:
        side[random.randrange(len(side))] = random.choice(names)


def _dimensions(random: Random, model: Any) -> None:
    """A tensor or value claims another shape, maybe a huge one."""
    graph = model.graph
    if graph.initializer and random.random() < 0.5:
        dims = random.choice(graph.initializer).dims
        if dims:
            dims[random.randrange(len(dims))] = random.choice((0, -1, 1 << 20, 1 << 31, 1 << 40, 1 << 62))
        return
    values = [*graph.input, *graph.output, *graph.value_info]
    dims = random.choice(values).type.tensor_type.shape.dim if values else []
    if dims:
        dim = random.choice(dims)
        if random.random() < 0.3:
            dim.dim_param = random.choice(("n", "batch", "", "?"))
        else:
            dim.dim_value = random.choice((0, -1, 1, 1 << 20, 1 << 31, 1 << 40, 1 << 62))


def _external(random: Random, model: Any) -> None:
    """Weights in another file, somewhere they may not be."""
    if not model.graph.initializer:
        return
    tensor = random.choice(model.graph.initializer)
    del tensor.external_data[:]
    if random.random() < 0.9:
        tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entries = {
        "location": random.choice(_LOCATIONS),
        "offset": random.choice(_OFFSETS),
        "length": random.choice(_OFFSETS),
        "checksum": "0",
    }
    for key in random.sample(list(entries), random.randrange(1, 5)):
        tensor.external_data.add(key=key, value=entries[key])


def _recursion(random: Random, model: Any) -> None:
    """Functions that call themselves or each other."""
    for body in model.functions:
        node = body.node.add(op_type=random.choice(model.functions).name, domain=body.domain)
        node.input.extend(body.input)
        node.output.extend(f"again{index}" for index in range(len(body.output)))


def _doubling(random: Random, model: Any) -> None:
    """Functions that each call the next one twice: few bytes, any number of nodes."""
    if not model.functions:
        return
    body = model.functions[0]
    for index in range(random.choice((3, 30))):
        inner = model.functions.add(name=f"double{index}", domain=body.domain, input=["a"], output=["c"])
        inner.opset_import.extend(body.opset_import)
        last = f"double{index + 1}" if random.random() < 0.99 else body.name
        inner.node.add(op_type=last, domain=body.domain, input=["a"], output=["b"])
        inner.node.add(op_type=last, domain=body.domain, input=["b"], output=["c"])
    outputs = [name for node in model.graph.node for name in node.output]
    if outputs:
        model.graph.node.add(op_type="double0", domain=body.domain, input=[random.choice(outputs)], output=["doubled"])


def _attributes(random: Random, model: Any) -> None:
    nodes = [*model.graph.node, *(node for body in model.functions for node in body.node)]
    with_attributes = [node for node in nodes if node.attribute]
    if not with_attributes:
        return
    node = random.choice(with_attributes)
    attribute = random.choice(node.attribute)
    if random.random() < 0.3:
        attribute.CopyFrom(random.choice(random.choice(with_attributes).attribute))
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = random.choice(ODD_INTEGERS[:-1])
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = random.choice((0.0, float("nan"), float("inf"), -1.0))
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = random.choice(ODD_TEXTS).encode("utf-8", "replace")
    else:
        attribute.type = random.randrange(0, 15)


def _parts(model: Any) -> list[Any]:
    """Everything that has a domain: nodes, functions, imports."""
    bodies = [model.graph, *model.functions]
    return [*model.functions, *model.opset_import, *(node for body in bodies for node in body.node)]


def _overloads(random: Random, model: Any) -> None:
    """Functions and calls of one name, told apart by overload; a call may lead back to its own function."""
    if not model.functions:
        return
    body = random.choice(model.functions)
    copies = [model.functions.add() for _ in range(random.choice((1, 2, 40)))]
    for index, copy in enumerate(copies):
        copy.CopyFrom(body)
        copy.overload = f"o{index}"
        for _ in range(random.choice((0, 1, 2))):
            node = copy.node.add(op_type=body.name, domain=body.domain, input=body.input)
            node.overload = random.choice((f"o{index + 1}", f"o{index}", "", "none"))
            node.output.extend(f"again{len(copy.node)}.{place}" for place in range(len(body.output)))
    for node in model.graph.node:
        if node.op_type == body.name and random.random() < 0.5:
            node.overload = "o0"


def _aliases(random: Random, model: Any) -> None:
    """The standard domain under its other name, or a function in it."""
    for part in random.sample(_parts(model), min(3, len(_parts(model)))):
        part.domain = random.choice(("", "ai.onnx", "ai.onnx", part.domain))


def _rename(random: Random, model: Any) -> None:
    """A function gets the name of an operator, or of another function."""
    if model.functions:
        body = random.choice(model.functions)
        body.name = random.choice((*_OPERATORS, *(each.name for each in model.functions)))


def _claims(random: Random, model: Any) -> None:
    """A tensor of any part says another type or size, or loses some of its bytes."""
    tensors = [entry for entry in _messages(model) if isinstance(entry, onnx.TensorProto)]
    if not tensors:
        return
    tensor, change = random.choice(tensors), random.randrange(5)
    if change == 0:
        tensor.data_type = random.randrange(0, 30)
    elif change == 1:
        tensor.dims[:] = random.choice(([], [0], [-1], [1 << 62, 4], [1 << 40, 0], [1] * 70, [97, 1 << 31]))
    elif change == 2:
        tensor.raw_data = tensor.raw_data[: random.randrange(len(tensor.raw_data) + 1)]
    elif change == 3:
        tensor.int64_data.extend([1, 1 << 62])
    else:
        made = model.graph.sparse_initializer.add(dims=[random.choice((3, 1 << 20, 1 << 40))] * 2)
        made.values.CopyFrom(tensor)
        made.values.name = "sparse"
        made.indices.CopyFrom(onnx.numpy_helper.from_array(np.array([0])))


def _opsets(random: Random, model: Any) -> None:
    """An import is missing, there twice, or of another version."""
    body = random.choice([model, *model.functions])
    if not body.opset_import:
        return
    entry = random.choice(body.opset_import)
    if random.random() < 0.3:
        body.opset_import.add().CopyFrom(entry)
    entry.version = random.choice((0, 1, 7, 13, 17, 21, 22, 26, 1 << 40))


def _nodes(random: Random, model: Any) -> None:
    """A node is gone, or there twice."""
    body = random.choice([model.graph, *model.functions])
    if body.node:
        _shuffle(random, body.node)


def _nesting(random: Random, model: Any) -> None:
    """Some nodes lie in Ifs in each other."""
    if not model.graph.node:
        return
    node = random.choice(model.graph.node)
    inner, condition = onnx.NodeProto(), "nesting.condition"
    inner.CopyFrom(node)
    other = onnx.helper.make_graph([inner], "other", [], [onnx.ValueInfoProto(name=x) for x in inner.output])
    for _ in range(random.choice((1, 5, 25, 31))):
        graph = onnx.helper.make_graph([inner], "nested", [], [onnx.ValueInfoProto(name=x) for x in inner.output])
        inner = onnx.helper.make_node("If", [condition], list(inner.output), then_branch=graph, else_branch=other)
    node.CopyFrom(inner)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), condition))


_CHANGES = (
    _any_field, _any_field, _any_field, _operator, _forged, _wires, _dimensions, _dimensions, _external, _recursion,
    _doubling, _attributes, _overloads, _aliases, _rename, _claims, _claims, _opsets, _nodes, _nesting,
)  # fmt: skip
