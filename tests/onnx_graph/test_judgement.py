"""Hostile models are refused by onnx's own reading and by that of a bundle's script alike, sound ones by neither."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from localattn.core.errors import UsageError
from localattn.onnx_graph import judgement, onnx_file, wire_model
from localattn.onnx_graph.onnx_file import OnnxFile
from localattn.runtime.bundle.device import verify
from localattn.runtime.session import load

from ..support.hostile_models import HOSTILE, ONE_AB, SOUND, call, far, function, model, node, scalar, tagged, weight


@pytest.mark.parametrize("kind", HOSTILE)
def test_both_readings_refuse(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(HOSTILE[kind]())
    with pytest.raises(UsageError) as caught:
        OnnxFile.read(path).check()
    with pytest.raises(verify.Fault) as fault:
        verify.check_model(path)
    assert fault.value.code == verify.ALTERED
    if "is not an ONNX model" not in str(caught.value):
        assert (fault.value.why, fault.value.fix) == (caught.value.why, caught.value.fix)


@pytest.mark.parametrize("kind", SOUND)
def test_neither_refuses_a_sound_model(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(SOUND[kind]())
    OnnxFile.read(path).check()
    verify.check_model(path)


def test_both_measure_alike(tmp_path: Path) -> None:
    for kind, make in SOUND.items():
        content = make()
        found = OnnxFile.of_bytes(content).growth
        scanned = judgement.judge(wire_model.read(content), len(content), lambda _: None)
        assert (found.nodes, found.depth, found.calls, found.doubled) == (
            scanned.nodes,
            scanned.depth,
            scanned.calls,
            scanned.doubled,
        ), kind


def test_each_value_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else calls that read the ends of long chains would take the square of the file's size."""
    origin, followed = judgement._Scope._origin, []
    monkeypatch.setattr(judgement._Scope, "_origin", lambda *given: followed.append(given[1:]) or origin(*given))
    steps = far("n", 500, 40)
    reads = [name for step in steps for name in step.output]
    calls = [node("F", ["x", *reads], [f"y{index}"], domain="loc") for index in range(50)]
    made = function("F", [node("Identity", ["a"], ["b"])])
    made.input.extend(f"i{index}" for index in range(len(reads)))
    content = model([*steps, *calls, node("Identity", ["x"], ["y"])], [scalar("zero", 0), scalar("first", 3)], [made])
    OnnxFile.of_bytes(content).check()
    assert len(reads) <= len(followed) <= 3 * len(reads)


def test_what_is_judged_is_what_an_engine_gets() -> None:
    """Unknown fields are gone, at any depth, and both names of the standard domain are one."""
    made = onnx.load_from_string(SOUND["graphs in graphs"]())
    graph, depth = made.graph, 0
    while graph.node[0].attribute:
        graph.node[0].domain, depth = "ai.onnx", depth + 1
        graph = next(entry.g for entry in graph.node[0].attribute if entry.name == "then_branch")
    inner = graph.node[0]
    inner.MergeFromString(b"\xba\x3e\x02ab")
    made.opset_import.add(domain="ai.onnx", version=18)
    made.training_info.add()
    content = made.SerializeToString()
    given = OnnxFile.of_bytes(content).content
    assert depth == 10 and b"\xba\x3e\x02ab" in content
    assert b"\xba\x3e\x02ab" not in given and b"ai.onnx" not in given
    plain = onnx.load_from_string(given)
    assert not plain.training_info and [entry.domain for entry in plain.opset_import] == ["", "loc"]


def test_two_versions_of_one_domain_are_refused() -> None:
    made = onnx.load_from_string(SOUND["a node"]())
    made.opset_import.add(domain="ai.onnx", version=17)
    with pytest.raises(UsageError, match="two versions"):
        OnnxFile.of_bytes(made.SerializeToString()).check()


FEW = 400
LARGE = b"\0" * onnx_file.LARGE_TENSOR
# A model of very many parts: where they are, and one of them.
MANY: dict[str, tuple[tuple[int, ...], bytes]] = {
    "nodes": ((7,), b"\x0a\x00"),
    "weights": ((7,), b"\x2a\x00"),
    "sizes of a weight": ((7, 5), b"\x08\x01"),
    "places of a weight": ((7, 5), b"\x6a\x00"),
    "attributes": ((7, 1), b"\x2a\x00"),
    "tensors of an attribute": ((7, 1, 5), b"\x52\x00"),
    "graphs of an attribute": ((7, 1, 5), b"\x5a\x00"),
    "nodes of a graph in a node": ((7, 1, 5, 6), b"\x0a\x00"),
    "shapes": ((7,), b"\x6a\x00"),
    "operator sets": ((), b"\x42\x00"),
    "functions": ((), b"\xca\x01\x00"),
    "nodes of a function": ((25,), b"\x3a\x00"),
    "unknown fields of the model": ((), b"\x98\x3e\x01"),
    "unknown fields of a node": ((7, 1), b"\x98\x3e\x01"),
    "unknown fields in a group": ((), b"\xa3\x01" + b"\x78\x01" * 2 * FEW + b"\xa4\x01"),
}


def many(kind: str, rest: int) -> bytes:
    """A model with twice `FEW` parts of a kind and, at the end of the same message, an unknown field of this length."""
    place, part = MANY[kind]
    content = part * (2 if "group" in kind else 2 * FEW) + (wire_model._field(1000, bytes(rest)) if rest else b"")
    for number in reversed(place):
        content = wire_model._field(number, content)
    return model([node("Identity", ["x"], ["y"])]) + content


@pytest.mark.parametrize("kind", MANY)
def test_very_many_parts_are_refused_before_each_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 16 MB took two minutes, one of 34 MB longer: neither the size nor the nodes alone bound it.

    onnx's parser made up to 2.2 GB of 15 MB.
    """
    monkeypatch.setattr(onnx, "load_model_from_string", lambda _: pytest.fail("it was parsed"))
    monkeypatch.setattr(wire_model, "MOST_FIELDS", FEW)
    monkeypatch.setattr(judgement, "MOST_PARTS", FEW)
    path = tmp_path / "m.onnx"
    for limit, rest in (
        (onnx_file.IN_MEMORY, 0),
        (100, 0),
        (100, len(LARGE)),
    ):  # whole in memory; small; large messages
        monkeypatch.setattr(onnx_file, "IN_MEMORY", limit)
        monkeypatch.setattr(wire_model, "_UNCOUNTED", 0)
        path.write_bytes(many(kind, rest))
        with pytest.raises(UsageError) as caught:
            OnnxFile.read(path).check()
        assert " more " in caught.value.why and "than" in caught.value.why, caught.value.why
        with pytest.raises(verify.Fault):
            verify.check_model(path)


@pytest.mark.parametrize("kind", ["nodes", "weights", "attributes", "functions", "nodes of a function"])
def test_what_takes_most_memory_is_counted_apart(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "load_model_from_string", lambda _: pytest.fail("it was parsed"))
    monkeypatch.setattr(wire_model, "MOST_PARTS", FEW)
    monkeypatch.setattr(wire_model, "_UNCOUNTED", 0)
    path = tmp_path / "m.onnx"
    path.write_bytes(many(kind, 0))
    with pytest.raises(UsageError) as caught:
        OnnxFile.read(path).check()
    assert "nodes, weights and attributes" in caught.value.why
    with pytest.raises(verify.Fault):
        verify.check_model(path)


def test_bytes_that_lead_to_no_weight_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnx's parser makes a hundred bytes of each two of them."""
    monkeypatch.setattr(onnx_file, "IN_MEMORY", 100)
    path = tmp_path / "m.onnx"
    made = onnx.load_from_string(model([node("Identity", ["x"], ["y"])]))
    made.graph.value_info.add(name="y").type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * 10_000)
    path.write_bytes(made.SerializeToString())
    OnnxFile.read(path).check()
    monkeypatch.setattr(wire_model, "MOST_REST", 1000)
    with pytest.raises(UsageError, match="not an ONNX model"):
        OnnxFile.read(path).check()


@pytest.mark.parametrize("where", ["graph", "Constant", "branch"])
def test_weights_of_a_large_file_stay_in_it(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "IN_MEMORY", 100)
    numbers = np.arange(4 * 5000, dtype=np.float32).reshape(5000, 4)
    tensor = onnx.numpy_helper.from_array(numbers, "w")
    if where == "graph":
        content = model([node("Add", ["x", "w"], ["y"])], [tensor])
    elif where == "Constant":
        content = model([node("Constant", [], ["w"], value=tensor), node("Add", ["x", "w"], ["y"])])
    else:
        branch = onnx.helper.make_graph(
            [node("Add", ["x", "w"], ["z"])], "b", [], [onnx.helper.make_tensor_value_info("z", 1, None)], [tensor]
        )
        flag = onnx.helper.make_tensor("c", onnx.TensorProto.BOOL, [], [True])
        content = model([node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)], [flag])
    made = onnx.load_from_string(content)
    made.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 5000
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    file = OnnxFile.read(path)
    assert len(file.content) < 3000 and not file.locations
    assert file.parse() == made
    x = np.ones((1, 4), np.float32)
    for runtime in ("auto", "openvino"):
        if runtime == "openvino":
            pytest.importorskip("openvino")
        np.testing.assert_array_equal(load(file, "cpu", runtime=runtime).run({"x": x})["y"], numbers + 1)


def hub(folder: Path) -> Path:
    """A model and its data as Hugging Face's hub caches them: links into one folder, under other names."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    numbers = np.arange(40_000, dtype=np.float32).reshape(-1, 4)
    weights = [onnx.numpy_helper.from_array(numbers, "w"), onnx.numpy_helper.from_array(np.array([1, 4]), "s")]
    made = onnx.load_from_string(model([node("Reshape", ["x", "s"], ["r"]), node("Add", ["r", "w"], ["y"])], weights))
    made.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 10_000
    onnx.save_model(made, blobs / "aa", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    (blobs / "model.onnx_data").rename(blobs / "bb")
    (snapshot / "model.onnx").symlink_to("../../blobs/aa")
    (snapshot / "model.onnx_data").symlink_to("../../blobs/bb")
    return snapshot / "model.onnx"


@pytest.mark.parametrize("runtime", ["auto", "openvino"])
def test_links_into_one_folder_and_small_external_tensors(runtime: str, tmp_path: Path) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino")
    path = hub(tmp_path)
    out = load(path, "cpu", runtime=runtime).run({"x": np.ones((1, 4), np.float32)})["y"]
    assert out.shape == (10_000, 4) and out[-1, -1] == 40_000


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "w").symlink_to("../secret")
    path = tmp_path / "m" / "m.onnx"
    path.write_bytes(weight(data_type=1, dims=[1, 4], data_location=1, places=[("location", "w"), ("length", "16")]))
    for runtime in ("auto", "openvino"):
        if runtime == "openvino":
            pytest.importorskip("openvino")
        with pytest.raises(UsageError) as caught:
            load(path, "cpu", runtime=runtime)
        assert "is a link to" in caught.value.why and "copy" in caught.value.fix


def test_external_data_that_is_shorter_than_claimed(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(weight(data_type=1, dims=[1, 4], data_location=1, places=[("location", "w"), ("offset", "8")]))
    (tmp_path / "w").write_bytes(bytes(16))
    with pytest.raises(UsageError) as caught:
        load(path, "cpu")
    assert "'w' has only 8 bytes for it" in caught.value.why
    with pytest.raises(verify.Fault):
        verify.check_model(path)


def test_the_judgement_travels_alone(tmp_path: Path) -> None:
    """Both files work where nothing else is: no onnx, no package."""
    for module in (judgement, wire_model):
        source = Path(module.__file__ or "")
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "m.onnx").write_bytes(HOSTILE["by overload"]())
    code = (
        "import judgement, wire_model\ndata = open('m.onnx', 'rb').read()\n"
        "try: judgement.judge(wire_model.read(data), len(data), lambda _: None)\n"
        "except judgement.Refused as error: print(error.why)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, '.')\n" + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "in a circle" in done.stdout


def test_calls_with_ever_other_constants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is counted for itself: functions that give two others to the next would take the limit of nodes."""
    monkeypatch.setattr(judgement, "MOST_CALLS", 50)
    steps = [node("Constant", [], [f"k{index}"], value_int=index) for index in range(60)]
    calls = [node("F", ["x", f"k{index}"], [f"y{index}" if index else "y"], domain="loc") for index in range(60)]
    made = function("F", ONE_AB)
    made.input.append("n")
    OnnxFile.of_bytes(model(steps[:50] + calls[:50], functions=[made])).check()
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        OnnxFile.of_bytes(model(steps + calls, functions=[made])).check()
    assert "more than 50 different constants" in caught.value.why


def without_that_overload() -> bytes:
    """A function that calls one of its name by an overload that no function has."""
    return model([call("F", "x", "y", "o")], functions=[function("F", [call("F", "a", "b", "none")], "o")])


@pytest.mark.parametrize("make", [SOUND["functions of one name, by overload"], without_that_overload])
def test_tensorrt_tells_no_overloads_apart(make: Callable[[], bytes]) -> None:
    file = OnnxFile.of_bytes(make())
    file.check()
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        file.check_without_overloads("TensorRT")
    assert "does not distinguish functions by overload" in caught.value.why


def test_the_helper_makes_a_tag_that_onnx_refuses() -> None:
    assert tagged(14, b"k")[4] >= 0x10, "the fifth byte holds bits above the 32nd"
