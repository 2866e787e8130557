"""Loops that never end are refused before anything runs; loops that end, run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import UsageError
from localattn.onnx_graph.judgement import DEEPEST_CALLS, MOST_RUNS
from localattn.runtime.backends.tensorrt.builder.source import read_source
from localattn.runtime.session import load

from ..conftest import Finished

onnx = pytest.importorskip("onnx")

FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
node, scalar = onnx.helper.make_node, onnx.helper.make_tensor_value_info
ALWAYS, FOREVER = (1 << 63) - 1, 1 << 40


def constant(name: str, value: int | bool) -> Any:
    return onnx.helper.make_tensor(name, BOOL if isinstance(value, bool) else INT64, [], [value])


def body(then: list[Any], constants: list[Any], inner: list[Any] | None = None) -> Any:
    """A body that adds 1 to what it carries; `then` makes `again`, whether to go on."""
    nodes = inner or [node("Add", ["a", "one"], ["b"])]
    inputs = [scalar("round", INT64, []), scalar("goes", BOOL, []), scalar("a", FLOAT, [1])]
    outputs = [scalar("again", BOOL, []), scalar("b", FLOAT, [1])]
    return onnx.helper.make_graph([*then, *nodes], "body", inputs, outputs, constants)


def model(loop: Any, nodes: list[Any], constants: list[Any], functions: list[Any] | None = None) -> Any:
    """A graph x → y around a loop; `one` is 1, and `most` may be fed."""
    one = onnx.helper.make_tensor("one", FLOAT, [1], [1.0])
    inputs = [scalar("x", FLOAT, [1]), scalar("fed", INT64, [])]
    graph = onnx.helper.make_graph([*nodes, loop], "g", inputs, [scalar("y", FLOAT, [1])], [one, *constants])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("f", 1)]
    return onnx.helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)


TRUE, FALSE = constant("true", True), constant("false", False)
SAME = [node("Identity", ["goes"], ["again"])]
KEEPS_ON = [node("Identity", ["true"], ["again"])]
COUNTED = [node("Less", ["round", "enough"], ["again"])]


def in_a_function() -> Any:
    steps = [
        node("Constant", [], ["one"], value=onnx.helper.make_tensor("v", FLOAT, [1], [1.0])),
        node("Loop", ["", "", "in"], ["out"], body=body(SAME, [])),
    ]
    opsets = [onnx.helper.make_opsetid("", 20)]
    function = onnx.helper.make_function("f", "Forever", ["in"], ["out"], steps, opsets)
    return model(node("Forever", ["x"], ["y"], domain="f"), [], [], [function])


def one_in_another(rounds: int) -> Any:
    """Either loop ends, but not the one in the other."""
    steps = [node("Identity", ["goes2"], ["again2"]), node("Add", ["a2", "one"], ["b2"])]
    inputs = [scalar("round2", INT64, []), scalar("goes2", BOOL, []), scalar("a2", FLOAT, [1])]
    outputs = [scalar("again2", BOOL, []), scalar("b2", FLOAT, [1])]
    inside = onnx.helper.make_graph(steps, "inside", inputs, outputs)
    inner = node("Loop", ["rounds", "", "a"], ["b"], body=inside, name="inner")
    for_graph = body(KEEPS_ON, [TRUE], [inner])
    return model(
        node("Loop", ["rounds", "", "x"], ["y"], body=for_graph, name="outer"), [], [constant("rounds", rounds)]
    )


def looping(count: str, goes: str, then: list[Any], inside: list[Any], outside: list[Any], nodes: Any = ()) -> Any:
    return model(node("Loop", [count, goes, "x"], ["y"], body=body(then, inside), name="l"), list(nodes), outside)


ENDLESS = {
    "neither count nor condition": lambda: looping("", "", SAME, [], []),
    "a condition that is true": lambda: looping("", "true", SAME, [], [TRUE]),
    "a body that says true": lambda: looping("", "", KEEPS_ON, [TRUE], []),
    "true from the graph around": lambda: looping("", "true", KEEPS_ON, [], [TRUE]),
    "the largest count": lambda: looping("most", "true", SAME, [], [TRUE, constant("most", ALWAYS)]),
    "a count no one waits for": lambda: looping("most", "", SAME, [], [constant("most", FOREVER)]),
    "a count from a Constant": lambda: looping(
        "most", "", SAME, [], [], [node("Constant", [], ["c"], value_int=FOREVER), node("Identity", ["c"], ["most"])]
    ),
    "in a function": in_a_function,
    "one in another": lambda: one_in_another(1 << 17),
}
# What comes out of 0 with 5 fed.
ENDING = {
    "a count": (lambda: looping("n", "true", SAME, [], [TRUE, constant("n", 7)]), 7),
    "a count that is fed": (lambda: looping("fed", "", SAME, [], []), 5),
    "the largest count and a condition": (
        lambda: looping("most", "true", COUNTED, [constant("enough", 3)], [TRUE, constant("most", ALWAYS)]),
        4,
    ),
    "a condition alone": (lambda: looping("", "", COUNTED, [constant("enough", 3)], []), 4),
    "a false condition": (lambda: looping("", "false", SAME, [], [FALSE]), 0),
    "a body that says false": (lambda: looping("", "", [node("Identity", ["false"], ["again"])], [FALSE], []), 1),
    "one in another": (lambda: one_in_another(11), 121),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_loop_without_end_is_refused(name: str, tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    path = tmp_path / "m.onnx"
    made = ENDLESS[name]()
    onnx.checker.check_model(made, full_check=True)  # well-formed, so nothing else refuses it
    onnx.save(made, path)
    finished = localattn("run", path)
    assert finished.code == 2 and f"loops run more than {MOST_RUNS} nodes" in finished.err
    with pytest.raises(UsageError, match="cannot be loaded"):
        read_source(path)  # what `localattn build` reads, before TensorRT does
    assert localattn("inspect", path).code == 0  # which runs nothing


@pytest.mark.parametrize("name", ENDING)
def test_a_loop_that_ends_runs(name: str, tmp_path: Path) -> None:
    make, wanted = ENDING[name]
    onnx.save(make(), tmp_path / "m.onnx")
    fed = {"x": np.zeros(1, np.float32), "fed": np.array(5)}
    assert load(tmp_path / "m.onnx", "cpu").run(fed)["y"] == wanted


def test_a_broken_count_is_left_to_the_engine(tmp_path: Path) -> None:
    """Fewer bytes than a number takes: no number is known, and onnxruntime refuses the file in its own words."""
    made = looping("most", "", SAME, [], [onnx.TensorProto(name="most", data_type=INT64, raw_data=b"\1")])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "m.onnx", "cpu")
    assert "loops run" not in caught.value.why


@pytest.mark.parametrize("deep", [99, 2000])
def test_functions_that_call_each_other_deep(deep: int, tmp_path: Path) -> None:
    """Deeper than Python's own stack is more than any exporter writes, and refused."""
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("f", 1)]
    called = [node(f"F{index + 1}", ["a"], ["b"], domain="f") for index in range(deep)]
    functions = [
        onnx.helper.make_function("f", f"F{index}", ["a"], ["b"], [call], opsets) for index, call in enumerate(called)
    ]
    functions.append(onnx.helper.make_function("f", f"F{deep}", ["a"], ["b"], [node("Identity", ["a"], ["b"])], opsets))
    nodes = [node("F0", ["x"], ["z"], domain="f")]
    made = looping("n", "", SAME, [], [constant("n", 2)], nodes)
    made.functions.extend(functions)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    if deep > DEEPEST_CALLS:
        with pytest.raises(UsageError) as caught:
            load(tmp_path / "m.onnx", "cpu")
        assert f"the limit is {DEEPEST_CALLS}" in caught.value.why
    else:
        assert load(tmp_path / "m.onnx", "cpu").run({"x": np.zeros(1, np.float32), "fed": np.array(5)})["y"] == 2
