"""What fuzzing and attempts by hand found, each with the smallest input that showed it."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from localattn import load
from localattn.core.errors import UsageError
from localattn.core.storage.publishing import sealed, sidecar_path
from localattn.onnx_graph.onnx_file import OnnxFile
from localattn.runtime.backends.tensorrt.builder.source import read_source

from ..conftest import Finished
from ..support.models.damaged import TOKENS, folder, made, worker  # noqa: F401
from .fuzz.runner import Worker

Command = Callable[..., Finished]


def check(path: Path) -> None:
    OnnxFile.read(path).check()


def function(name: str, called: str, times: int) -> Any:
    """A model-local function that calls another one after the other."""
    wires = ["a", *(f"t{index}" for index in range(times - 1)), "b"]
    nodes = [onnx.helper.make_node(called, [x], [y], domain="f") for x, y in itertools.pairwise(wires)]
    return onnx.helper.make_function("f", name, ["a"], ["b"], nodes, _OPSETS)


_OPSETS = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("f", 1)]


def calling(called: str, functions: list[Any]) -> bytes:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    node = onnx.helper.make_node(called, ["x"], ["y"], domain="f")
    graph = onnx.helper.make_graph([node], "g", [x], [y])
    model = onnx.helper.make_model(graph, functions=functions, opset_imports=_OPSETS, ir_version=10)
    return bytes(model.SerializeToString())


CALLS = {
    "itself": [function("F0", "F0", 1)],
    "a circle": [function("F0", "F1", 1), function("F1", "F0", 1)],
    # onnxruntime 1.31 inlines these for as long as one waits.
    "twice, forty times": [function(f"F{index}", f"F{index + 1}", 2) for index in range(40)],
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_without_end_are_refused(name: str, tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "m.onnx").write_bytes(calling("F0", CALLS[name]))
    answer = worker.ask(["run", str(tmp_path / "m.onnx")], tmp_path, {})
    assert answer.get("code") == 2, answer
    assert "functions call each other" in answer["err"]


def test_functions_are_counted_as_they_are_inlined(made: Path, tmp_path: Path) -> None:
    for times, depth in ((1, 50), (3, 12)):  # 3^12 = 531,441 nodes are allowed, 3^13 are not
        content = calling("F0", [function(f"F{index}", f"F{index + 1}", times) for index in range(depth)])
        (tmp_path / "m.onnx").write_bytes(content)
        check(tmp_path / "m.onnx")
    (tmp_path / "m.onnx").write_bytes(calling("F0", [function(f"F{i}", f"F{i + 1}", 3) for i in range(13)]))
    with pytest.raises(UsageError, match="functions"):
        check(tmp_path / "m.onnx")
    for content in (b"", b"\x3a\xff\xff\xff\xff\x7f", b"\xff" * 30, b"\x3b", (made / "model.onnx").read_bytes()[:-7]):
        (tmp_path / "m.onnx").write_bytes(content)
        with pytest.raises(UsageError, match="is not an ONNX model"):
            check(tmp_path / "m.onnx")
    check(made / "model.onnx")


@pytest.mark.parametrize("name", ["../step.onnx", "/etc/passwd", "a\0b", "x" * 5000, ""])
def test_prefill_names_stay_in_the_folder(name: str, folder: Path, localattn: Command) -> None:
    path = folder / "steps/step.onnx"
    document = json.loads(sidecar_path(path).read_bytes())
    document["step"]["prefill"] = name
    sidecar_path(path).write_text(sealed(json.dumps(document)))
    finished = localattn("generate", path, "--prompt-ids", "1,2", "--max-tokens", "1")
    assert finished.code in (0, 2) and "Traceback" not in finished.err
    assert finished.code == (0 if name.startswith("x") else 2), finished  # a file that was not copied along


def test_names_in_a_file_do_not_steer_the_terminal(tmp_path: Path, localattn: Command) -> None:
    name = "x\x1b[2J\n"
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[1] x) => (float[1] y) {y = Neg(x)}'
    )
    model.graph.input[0].name = model.graph.node[0].input[0] = name
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", x=np.zeros(1, np.float32))
    finished = localattn("run", tmp_path / "m.onnx", "--load-inputs", tmp_path / "in.npz")
    assert finished.code == 2 and "\x1b[2J" not in finished.err and "\\x1b[2J" in finished.err
    shown = localattn("inspect", tmp_path / "m.onnx")
    assert shown.code == 0 and "\x1b" not in shown.out and "\\x1b[2J" in shown.out


def test_names_in_a_file_are_no_markup(tmp_path: Path, localattn: Command) -> None:
    """Rich reads brackets as markup: `[/b]` ended the command with a fault, `[red]` disappeared."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[1] x) => (float[1] y) {y = Neg(x)}'
    )
    model.graph.output[0].name = model.graph.node[0].output[0] = "[/b] [red]y"
    for name in ("m.onnx", "n.onnx"):
        onnx.save(model, tmp_path / name)
    finished = localattn("parity", tmp_path / "m.onnx", "--against", tmp_path / "n.onnx")
    assert finished.code == 0 and "[/b] [red]y" in finished.out


@pytest.mark.parametrize("text", ["kwargs: &a {dim: *a}", "kwargs: &a {dim: [*a, *a]}", "kwargs: {dim: &a [*a]}"])
def test_tables_that_hold_themselves_are_refused(text: str, folder: Path, localattn: Command) -> None:
    (folder / "c.yaml").write_text(text)
    finished = localattn("inspect", folder / "model.pt", "--config", folder / "c.yaml")
    assert finished.code == 2 and "kwargs has more than" in finished.err


OUTSIDE = onnx.TensorProto(name="w", dims=[1], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
INITIALIZER = onnx.helper.make_graph([], "g", [], [], [OUTSIDE])
CONSTANT = onnx.helper.make_node("Constant", [], ["w"], value=OUTSIDE)
# Every place where a model may hold a tensor.
HOLDERS = {
    "initializer": (INITIALIZER, []),
    "constant": (onnx.helper.make_graph([CONSTANT], "g", [], []), []),
    "branch": (
        onnx.helper.make_graph(
            [onnx.helper.make_node("If", ["c"], [], then_branch=INITIALIZER)],
            "g",
            [onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])],
            [],
        ),
        [],
    ),
    "function": (
        onnx.helper.make_graph([], "g", [], []),
        [onnx.helper.make_function("own", "F", [], ["w"], [CONSTANT], [onnx.helper.make_opsetid("", 20)])],
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_weights_lie_in_the_folder_of_their_model(holder: str, tmp_path: Path) -> None:
    graph, functions = HOLDERS[holder]
    content = onnx.helper.make_model(graph, functions=functions).SerializeToString()
    for place, allowed in (
        ("w.data", True), ("sub/w.data", True), ("./w.data", True), ("..w.data", True),
        ("../w.data", False), ("sub/../../w.data", False), ("/etc/passwd", False), ("", False),
    ):  # fmt: skip
        model = onnx.load_model_from_string(content)
        tensors = list(every_tensor(model))
        assert len(tensors) == 1
        tensors[0].external_data.add(key="location", value=place)
        path = tmp_path / "m.onnx"
        path.write_bytes(model.SerializeToString())
        if allowed:
            check(path)
            continue
        for read in (check, read_source):
            with pytest.raises(UsageError, match="cannot be loaded") as caught:
                read(path)
            assert repr(place) in caught.value.why


def every_tensor(message: Any) -> Iterator[onnx.TensorProto]:
    """The tensors of a message, by protobuf's own description of it."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from every_tensor(part)


@pytest.mark.parametrize("place", ["../secret.bin", "/etc/passwd", "x" * 300, ""])
def test_external_data_elsewhere_is_refused(place: str, folder: Path, localattn: Command) -> None:
    (folder / "secret.bin").write_bytes(bytes(1 << 16))
    model = onnx.load(folder / "model.onnx")
    tensor = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    length = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", place), ("offset", "0"), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    (folder / "sub").mkdir()
    path = folder / "sub/m.onnx"
    path.write_bytes(model.SerializeToString())
    np.savez(folder / "in.npz", tokens=TOKENS)
    finished = localattn("run", path, "--load-inputs", folder / "in.npz", "--provider", "cpu")
    assert finished.code == 2, finished
    shown = localattn("inspect", path)
    assert shown.code == 0 and "MISSING" in shown.out
    with pytest.raises(UsageError):
        load(path)
