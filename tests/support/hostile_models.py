"""Small hostile ONNX models, one or more of each kind that no engine may see, and sound ones that look like them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import onnx
from onnx import TensorProto, helper

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("loc", 1)]
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


def value(name: str, kind: int = FLOAT, shape: tuple[int, ...] = (1, 4)) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


def model(nodes: list[Any], weights: Any = (), functions: Any = (), **more: Any) -> bytes:
    graph = helper.make_graph(
        nodes, "g", more.pop("inputs", [value("x")]), more.pop("outputs", [value("y")]), list(weights)
    )
    made = helper.make_model(graph, opset_imports=OPSETS, functions=list(functions), ir_version=10)
    return bytes(made.SerializeToString())


def function(name: str, nodes: list[Any], overload: str = "", domain: str = "loc") -> Any:
    made = helper.make_function(domain, name, ["a"], ["b"], nodes, OPSETS)
    made.overload = overload
    return made


def call(name: str, read: str, write: str, overload: str = "", domain: str = "loc") -> Any:
    made = node(name, [read], [write], domain=domain)
    made.overload = overload
    return made


def doubling(count: int, key: Callable[[int], dict[str, str]]) -> bytes:
    """Functions each of which calls the one before twice."""
    made = [function(**key(0), nodes=[node("Identity", ["a"], ["b"])])]
    for index in range(1, count):
        named = key(index - 1)
        calls = [call(**named, read="a", write="m"), call(**named, read="m", write="b")]
        made.append(function(**key(index), nodes=calls))
    return model([call(**key(count - 1), read="x", write="y")], functions=made)


def nested(depth: int, inner: list[Any] | None = None) -> bytes:
    """Ifs in each other."""
    graph = helper.make_graph(inner or [node("Identity", ["x"], ["z0"])], "b0", [], [value("z0")])
    for index in range(1, depth):
        other = helper.make_graph([node("Identity", ["x"], [f"e{index}"])], "e", [], [value(f"e{index}")])
        step = node("If", ["c"], [f"z{index}"], then_branch=graph, else_branch=other)
        graph = helper.make_graph([step], f"b{index}", [], [value(f"z{index}")])
    other = helper.make_graph([node("Identity", ["x"], ["e"])], "e", [], [value("e")])
    top = node("If", ["c"], ["y"], then_branch=graph, else_branch=other)
    return model([top], [helper.make_tensor("c", BOOL, [], [True])])


def nested_by_calls(depth: int) -> bytes:
    """Functions each of which calls the next one inside an If."""
    flag = helper.make_tensor("v", BOOL, [], [True])
    made = [function("F0", [node("Identity", ["a"], ["b"])])]
    for index in range(1, depth):
        then = helper.make_graph([call(f"F{index - 1}", "a", "t")], "t", [], [value("t")])
        other = helper.make_graph([node("Identity", ["a"], ["e"])], "e", [], [value("e")])
        step = node("If", ["c"], ["b"], then_branch=then, else_branch=other)
        made.append(function(f"F{index}", [node("Constant", [], ["c"], value=flag), step]))
    return model([call(f"F{depth - 1}", "x", "y")], functions=made)


def loop(rounds: list[Any], weights: list[Any], again: str = "goes") -> bytes:
    """A Loop whose number of rounds is the value `n`."""
    body = helper.make_graph(
        [node("Identity", [again], ["more"]), node("Add", ["v", "v"], ["w"])],
        "body",
        [value("i", INT64, ()), value("goes", BOOL, ()), value("v")],
        [value("more", BOOL, ()), value("w")],
    )
    return model([*rounds, node("Loop", ["n", "", "x"], ["y"], body=body)], weights)


def far(name: str, copies: int, sums: int) -> list[Any]:
    """Nodes that make a value of the weight `first`, with additions of the weight `zero` among them."""
    names = ["first", *(f"{name}{index}" for index in range(copies + sums - 1)), name]
    return [
        node("Add", [read, "zero"], [write]) if index < sums else node("Identity", [read], [write])
        for index, (read, write) in enumerate(pairwise(names))
    ]


def given_loop(given: str) -> bytes:
    """A Loop without end in a function that has its body as an attribute: from a "call", or by "default"."""
    plain = onnx.load_from_string(loop([], [scalar("n", 7)]))
    body = plain.graph.node[0].attribute[0]
    body.name = "given"
    inside = node("Loop", ["", "", "a"], ["b"])
    inside.attribute.add(name="body", ref_attr_name="given", type=onnx.AttributeProto.GRAPH)
    made = function("F", [inside])
    step = call("F", "x", "y")
    if given == "call":
        made.attribute.append("given")
        step.attribute.append(body)
    else:
        made.attribute_proto.append(body)
    return model([step], functions=[made])


def called_loop(rounds: int, given: str) -> bytes:
    """A Loop in a function, whose number of rounds the caller gives.

    Args:
        rounds: how many.
        given: as an "attribute", as one that a function "between" passes on, by "default", or as an "input".
    """
    own = " = " + str(rounds) if given == "default" else ""
    count = "n = Constant <value_int: int = @k> ()" if given != "input" else ""
    heads = {
        "attribute": f"y = loc.F <k: int = {rounds}> (x)",
        "between": f"y = loc.G <k: int = {rounds}> (x)",
        "default": "y = loc.F (x)",
        "input": f"m = Constant <value_int: int = {rounds}> () y = loc.F (x, m)",
    }
    opsets = '<domain: "loc", opset_import: ["" : 18, "loc" : 1]>'
    signature = "F (a, n)" if given == "input" else f"F <k{': int' * bool(own)}{own}> (a)"
    text = f"""
        <ir_version: 9, opset_import: ["" : 18, "loc" : 1]>
        g (float[1,4] x) => (float[1,4] y) {{ {heads[given]} }}
        {opsets}
        {signature} => (b) {{ {count} b = Loop (n, "", a) <body: graph = body (int64 i, bool c, float[1,4] v)
            => (bool co, float[1,4] vo) {{ co = Identity (c) vo = Add (v, v) }}> }}
        {f"{opsets} G <k> (a) => (b) {{ b = loc.F <k: int = @k> (a) }}" if given == "between" else ""}
    """
    return bytes(onnx.parser.parse_model(text).SerializeToString())


def scan(shape: tuple[int, ...]) -> bytes:
    """A Scan over a tensor without a single number, of any length."""
    body = helper.make_graph(
        [node("Identity", ["s"], ["t"])], "body", [value("s"), value("e", FLOAT, shape[1:])], [value("t")]
    )
    long = TensorProto(name="long", data_type=FLOAT, dims=shape)
    return model([node("Scan", ["x", "long"], ["y"], body=body, num_scan_inputs=1)], [long])


def weight(**fields: Any) -> bytes:
    """A model with one weight, whose fields are given."""
    places = fields.pop("places", [])
    made = TensorProto(name="w", **fields)
    for key, text in places:
        made.external_data.add(key=key, value=text)
    return model([node("Add", ["x", "w"], ["y"])], [made])


def scalar(name: str, number: int) -> Any:
    return helper.make_tensor(name, INT64, [], [number])


def tagged(number: int, content: bytes) -> bytes:
    """A field whose tag has more than 32 bits; onnxruntime's parser cuts them off, onnx's refuses them."""
    tag, written = number << 3 | 2 | 1 << 32, bytearray()
    while tag > 0x7F:
        written.append(tag & 0x7F | 0x80)
        tag >>= 7
    assert len(content) < 128
    return bytes((*written, tag, len(content))) + content


def with_two(attribute: str) -> bytes:
    """A Loop with two bodies: engines take one, a check may take the other."""
    whole = onnx.load_from_string(loop([], [scalar("n", 2)]))
    step = whole.graph.node[-1]
    step.attribute.append(next(entry for entry in step.attribute if entry.name == attribute))
    return bytes(whole.SerializeToString())


def lying_type() -> bytes:
    whole = onnx.load_from_string(loop([], [scalar("n", 2)]))
    whole.graph.node[-1].attribute[0].type = onnx.AttributeProto.INT
    return bytes(whole.SerializeToString())


def constants_in_functions(size: int, calls: int) -> bytes:
    """A function with a constant that is there once in the file, and once for each call in memory."""
    constant = helper.make_tensor("v", FLOAT, [size], bytes(4 * size), raw=True)
    body = [node("Constant", [], ["k"], value=constant), node("Identity", ["a"], ["b"])]
    steps = [call("F", "x" if index == 0 else f"m{index - 1}", f"m{index}") for index in range(calls)]
    return model([*steps, node("Identity", [f"m{calls - 1}"], ["y"])], functions=[function("F", body)])


def sparse(rows: int) -> bytes:
    made = onnx.load_from_string(model([node("Identity", ["x"], ["y"])]))
    values = helper.make_tensor("s", FLOAT, [1], [1.0])
    indices = helper.make_tensor("i", INT64, [1], [0])
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [rows, rows]))
    return bytes(made.SerializeToString())


ONE = [node("Identity", ["x"], ["y"])]


def versioned(domain: str, version: int) -> bytes:
    """A model with a version of the operators of a domain."""
    made = onnx.load_from_string(model(ONE))
    kept = [entry for entry in made.opset_import if entry.domain != domain]
    del made.opset_import[:]
    made.opset_import.extend([*kept, helper.make_opsetid(domain, version)])
    return bytes(made.SerializeToString())


F16 = bytes(16)

HOSTILE: dict[str, Callable[[], bytes]] = {
    "a tag above 32 bits": lambda: model(ONE) + tagged(14, b"\x0a\x01k"),
    "functions that double, by name": lambda: doubling(42, lambda index: {"name": f"F{index}"}),
    "functions that double, by overload": lambda: doubling(42, lambda index: {"name": "F", "overload": f"o{index}"}),
    "functions that double, by domain": lambda: doubling(
        42, lambda index: {"name": f"F{index}", "domain": ("", "ai.onnx")[index % 2]}
    ),
    "a function that calls itself": lambda: model(
        [call("F", "x", "y")], functions=[function("F", [call("F", "a", "b")])]
    ),
    "by overload": lambda: model(
        [call("F", "x", "y", "o")], functions=[function("F", [call("F", "a", "b", "o")], "o"), function("F", ONE_AB)]
    ),
    "by the standard domain's other name": lambda: model(
        [call("F", "x", "y", domain="ai.onnx")],
        functions=[function("F", [call("F", "a", "b", domain="ai.onnx")], domain="")],
    ),
    "two that call each other": lambda: model(
        [call("F", "x", "y")], functions=[function("F", [call("G", "a", "b")]), function("G", [call("F", "a", "b")])]
    ),
    "two that call each other, and nobody calls": lambda: model(
        ONE, functions=[function("F", [call("G", "a", "b")]), function("G", [call("F", "a", "b")])]
    ),
    "in an If": lambda: model([call("F", "x", "y")], functions=[function("F", IN_AN_IF)]),
    "two functions of one name": lambda: model(
        [call("F", "x", "y")], functions=[function("F", ONE_AB), function("F", ONE_AB)]
    ),
    "functions too deep": lambda: model(
        [call("F199", "x", "y")],
        functions=[function("F0", ONE_AB)]
        + [function(f"F{index}", [call(f"F{index - 1}", "a", "b")]) for index in range(1, 200)],
    ),
    "graphs too deep by calls": lambda: nested_by_calls(100),
    "a constant for each call": lambda: constants_in_functions(1 << 18, 600),
    "a version of operators that is none": lambda: versioned("", 1 << 62),
    "a version of known operators that is none": lambda: versioned("ai.onnx.ml", 1 << 40),
    "an output twice": lambda: model([node("Identity", ["x"], ["y"]), node("Neg", ["x"], ["y"])]),
    "a weight twice": lambda: model(ONE, [scalar("n", 1), scalar("n", 2)]),
    "a value that nothing makes": lambda: model([node("Add", ["x", "nothing"], ["y"])]),
    "an output that nothing makes": lambda: model([node("Identity", ["x"], ["z"])]),
    "a value that nothing makes, in a function": lambda: model(
        [call("F", "x", "y")], functions=[function("F", [node("Add", ["a", "nothing"], ["b"])])]
    ),
    "nodes in a circle": lambda: model([node("Add", ["x", "z"], ["y"]), node("Neg", ["y"], ["z"])]),
    "a node that reads itself": lambda: model([node("Add", ["x", "y"], ["y"])]),
    "two bodies": lambda: with_two("body"),
    "an attribute of another type": lying_type,
    "a loop without end": lambda: loop([], [scalar("n", (1 << 63) - 1)]),
    "a loop, its count computed": lambda: loop(
        [node("Mul", ["p", "q"], ["n"])], [scalar("p", 1 << 30), scalar("q", 1 << 30)]
    ),
    "a loop, its count cast and reshaped": lambda: loop(
        [node("Cast", ["p"], ["c"], to=INT64), node("Unsqueeze", ["c", "zero"], ["n"])],
        [scalar("p", 1 << 50), helper.make_tensor("zero", INT64, [1], [0])],
    ),
    **{
        f"a loop in a function, its count given as {given}": partial(called_loop, 1 << 40, given)
        for given in ("attribute", "between", "default", "input")
    },
    "a loop, its count behind many nodes": lambda: loop(
        far("n", 2000, 300), [scalar("zero", 0), scalar("first", 1 << 40)]
    ),
    "a loop that a function is given": lambda: given_loop("call"),
    "a loop that a function has by default": lambda: given_loop("default"),
    "a scan over nothing": lambda: scan((1 << 40, 0)),
    "a size beyond its bytes": lambda: weight(data_type=FLOAT, dims=[97, 1 << 31], raw_data=F16),
    "a size below its bytes": lambda: weight(data_type=FLOAT, dims=[2], raw_data=F16),
    "a size and no bytes": lambda: weight(data_type=FLOAT, dims=[1 << 40]),
    "a negative size": lambda: weight(data_type=FLOAT, dims=[-1, -4], raw_data=F16),
    "a size that wraps around": lambda: weight(data_type=FLOAT, dims=[1 << 62, 4], raw_data=b""),
    "too many dimensions": lambda: weight(data_type=FLOAT, dims=[1] * 65, raw_data=bytes(4)),
    "too few numbers": lambda: weight(data_type=FLOAT, dims=[1, 4], float_data=[1.0]),
    "numbers of another field": lambda: weight(data_type=FLOAT, dims=[1, 4], int64_data=[1, 2, 3, 4]),
    "numbers in two places": lambda: weight(data_type=FLOAT, dims=[1, 4], raw_data=F16, float_data=[0.0] * 4),
    "text that is too little": lambda: weight(data_type=TensorProto.STRING, dims=[1 << 40], string_data=[b"a"]),
    "an unknown element type": lambda: weight(data_type=99, dims=[1, 4], raw_data=F16),
    "no element type": lambda: weight(dims=[1, 4], raw_data=F16),
    "half bytes": lambda: weight(data_type=TensorProto.INT4, dims=[1, 5], raw_data=b"\0\0"),
    "a size of external data": lambda: weight(
        data_type=FLOAT, dims=[1, 1 << 40], data_location=1, places=[("location", "w"), ("length", "16")]
    ),
    "external data outside": lambda: weight(
        data_type=FLOAT, dims=[1, 4], data_location=1, places=[("location", "../w"), ("length", "16")]
    ),
    "external data elsewhere": lambda: weight(
        data_type=FLOAT, dims=[1, 4], data_location=1, places=[("location", "/etc/passwd"), ("length", "16")]
    ),
    "external data on another drive": lambda: weight(
        data_type=FLOAT, dims=[1, 4], data_location=1, places=[("location", "C:\\w"), ("length", "16")]
    ),
    "external data in memory": lambda: weight(
        data_type=FLOAT,
        dims=[1, 4],
        data_location=1,
        places=[("location", "*/_ORT_MEM_ADDR_/*"), ("offset", "4096"), ("length", "16")],
    ),
    "external data in two places": lambda: weight(
        data_type=FLOAT, dims=[1, 4], data_location=1, places=[("location", "w"), ("location", "../w")]
    ),
    "external data of no length": lambda: weight(
        data_type=FLOAT, dims=[1, 4], data_location=1, places=[("location", "w"), ("length", "")]
    ),
    "external data at an empty offset": lambda: weight(
        data_type=FLOAT, dims=[1, 4], data_location=1, places=[("location", "w"), ("offset", ""), ("length", "16")]
    ),
    "external data at no number": lambda: weight(
        data_type=FLOAT, dims=[1, 4], data_location=1, places=[("location", "w"), ("offset", "-16")]
    ),
    "a sparse tensor of terabytes": lambda: sparse(1 << 20),
    "cut": lambda: model(ONE)[:-3],
    "no graph": lambda: b"\x08\x0a",
    "names not in UTF-8": lambda: model(ONE).replace(b"Identity", b"Identi\xff\xfe"),
}
ONE_AB = [node("Identity", ["a"], ["b"])]
IN_AN_IF = [
    node("Constant", [], ["c"], value=helper.make_tensor("v", BOOL, [], [True])),
    node(
        "If",
        ["c"],
        ["b"],
        then_branch=helper.make_graph([call("F", "a", "t")], "t", [], [value("t")]),
        else_branch=helper.make_graph([node("Identity", ["a"], ["e"])], "e", [], [value("e")]),
    ),
]

SOUND: dict[str, Callable[[], bytes]] = {
    "a high version of operators of its own": lambda: versioned("own", 20_240_101),
    "a node": lambda: model(ONE),
    "functions of one name, by overload": lambda: doubling(4, lambda index: {"name": "F", "overload": f"o{index}"}),
    "functions that call each other": lambda: doubling(8, lambda index: {"name": f"F{index}"}),
    "nodes in another order": lambda: model([node("Neg", ["z"], ["y"]), node("Abs", ["x"], ["z"])]),
    "graphs in graphs": lambda: nested(10),
    "a loop that ends": lambda: loop([], [scalar("n", 7)]),
    **{
        f"a loop in a function that ends, its count given as {given}": partial(called_loop, 7, given)
        for given in ("attribute", "between", "default", "input")
    },
    "a loop that ends, its count behind many nodes": lambda: loop(
        far("n", 2000, 300), [scalar("zero", 0), scalar("first", 7)]
    ),
    "a scan": lambda: scan((5, 0)),
    "a weight": lambda: weight(data_type=FLOAT, dims=[1, 4], raw_data=F16),
    "a weight of numbers": lambda: weight(data_type=FLOAT, dims=[1, 4], float_data=[1.0, 2.0, 3.0, 4.0]),
    "a weight of half bytes": lambda: weight(data_type=TensorProto.INT4, dims=[1, 4], raw_data=b"\0\0"),
    "a scalar": lambda: weight(data_type=FLOAT, dims=[], raw_data=bytes(4)),
    "an empty weight": lambda: weight(data_type=FLOAT, dims=[0, 4]),
    "a field that onnx does not know": lambda: model(ONE) + b"\xba\x3e\x02ab",
    "external data that is not there": lambda: weight(
        data_type=FLOAT, dims=[1, 4], data_location=1, places=[("location", "sub/w"), ("length", "16")]
    ),
    "a small sparse tensor": lambda: sparse(4),
}
