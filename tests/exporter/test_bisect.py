"""`bisect` names the module and the cause of faults planted in exported files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from localattn.exporter.bisect.bisect import run_bisect
from localattn.exporter.bisect.marked import fix
from localattn.exporter.bisect.request import BisectReport, BisectRequest
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.runtime.backends.engines import BuildRequest
from localattn.runtime.backends.tensorrt.builder.build import build_engine
from localattn.runtime.backends.tensorrt.device import find_device_or_none

from ..conftest import TINY, Finished, save_upstream
from ..support.models.engine_models import needs_rtx

Plant = Callable[[onnx.ModelProto], None]
LENGTH = 70  # no multiple of the window, 4


def _export(
    folder: Path, kwargs: dict[str, object], dtype: str = "fp32", dynamic: Sequence[str] = (), **shapes: object
) -> tuple[Path, Path]:
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", {**TINY, "max_seq_len": 128, **kwargs})
    model = folder / "model.onnx"
    request = ExportRequest(
        checkpoint, model, dtype=dtype, dynamic=dynamic, shapes=ShapeRequest(seq_len=LENGTH, **shapes)
    )
    export(request)
    return model, checkpoint


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Exact causal windows, with a mask."""
    return _export(tmp_path_factory.mktemp("causal"), {"exact_windowsize": True}, mask=True)


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Block-local windows that look ahead, at a length that upstream pads."""
    return _export(tmp_path_factory.mktemp("both"), {"causal": False})


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _export(tmp_path_factory.mktemp("half"), {}, dtype="fp16")


@pytest.fixture(scope="module")
def open_sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Block-local windows that look ahead, any batch and length."""
    return _export(tmp_path_factory.mktemp("open"), {"causal": False}, dynamic=("batch", "seq"))


def planted(pair: tuple[Path, Path], folder: Path, plant: Plant) -> BisectReport:
    """Bisect a copy of the file with a fault in it."""
    model, checkpoint = pair
    document = onnx.load(model)
    plant(document)
    copy = folder / "faulty.onnx"
    onnx.save(document, copy)
    (folder / "faulty.onnx.json").write_text(model.with_name("model.onnx.json").read_text())
    return run_bisect(BisectRequest(copy, checkpoint))


def nodes_of(document: onnx.ModelProto, module: str) -> Iterator[onnx.NodeProto]:
    for node in document.graph.node:
        if any(prop.key == "module" and prop.value == module for prop in node.metadata_props):
            yield node


def change_weight(document: onnx.ModelProto, module: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change every array that a module's nodes read, for these nodes alone."""
    held = {tensor.name: tensor for tensor in document.graph.initializer}
    changed = 0
    for node in nodes_of(document, module):
        for place, name in enumerate(node.input):
            if name in held and numpy_helper.to_array(held[name]).ndim >= 2:
                array = numpy_helper.to_array(held[name])
                copy = numpy_helper.from_array(change(array).astype(array.dtype), f"{name}_changed_{changed}")
                document.graph.initializer.append(copy)
                node.input[place] = copy.name
                changed += 1
    assert changed


def attention_node(document: onnx.ModelProto, layer: int) -> onnx.NodeProto:
    return [node for node in document.graph.node if node.domain == "localattn"][layer]


@pytest.mark.parametrize("pair", ["causal", "both_ways", "half", "open_sizes"])
def test_a_good_file_agrees_everywhere(pair: str, request: pytest.FixtureRequest) -> None:
    model, checkpoint = request.getfixturevalue(pair)
    report = run_bisect(BisectRequest(model, checkpoint))
    assert report.fault is None
    paths = {(row.path, row.role) for row in report.rows}
    for layer in range(2):
        attention = f"layers.{layer}.0.branch.attn_fn"
        assert {(attention, role) for role in ("value", "attention")} <= paths
        assert (f"layers.{layer}.1", "output") in paths
    assert report.rows[-1].path in ("", "to_logits.1")
    limit = 1e-2 if pair == "half" else 1e-5
    assert report.largest.comparison.relative_rms < limit


def test_a_changed_weight(causal: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(document: onnx.ModelProto) -> None:
        change_weight(document, "layers.1.0.branch.to_out", lambda w: np.where(w == w.max(), w + 0.5, w))

    fault = planted(causal, tmp_path, plant).fault
    assert fault is not None
    assert (fault.module, fault.cause.name) == ("layers.1.0.branch.to_out", "weights")
    assert "0.5" in fault.cause.evidence
    assert fault.before and all(row.passed for row in fault.before)


def test_a_norm_that_a_node_of_the_streams_computes(causal: tuple[Path, Path], tmp_path: Path) -> None:
    """It has no node of its own; its module is named all the same."""
    path = "layers.1.0.branch.norm"

    def plant(document: onnx.ModelProto) -> None:
        (node,) = (n for n in document.graph.node if any((x.key, x.value) == ("norm", path) for x in n.metadata_props))
        assert node.op_type == "MixReadStreamsNorm"
        held = {tensor.name: numpy_helper.to_array(tensor) for tensor in document.graph.initializer}
        document.graph.initializer.append(numpy_helper.from_array(2 * held[node.input[7]], "doubled"))
        node.input[7] = "doubled"

    fault = planted(causal, tmp_path, plant).fault
    assert fault is not None and fault.module == path
    assert fault.before and all(row.passed for row in fault.before)


def test_a_rotation_by_one_position(causal: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(document: onnx.ModelProto) -> None:
        change_weight(document, "layers.1.0.branch.attn_fn.rel_pos", lambda table: np.roll(table, 1, axis=0))

    # A table that queries and keys share turns both by the same angle, which changes no score: shift one of them.
    def plant_in_keys(document: onnx.ModelProto) -> None:
        before = {tensor.name for tensor in document.graph.initializer}
        plant(document)
        key = attention_node(document, 1).input[1]
        feeding = _ancestors(document, key, "layers.1.0.branch.attn_fn.rel_pos")
        for node in nodes_of(document, "layers.1.0.branch.attn_fn.rel_pos"):
            if node.output[0] not in feeding:
                for place, name in enumerate(node.input):
                    original = name.rpartition("_changed_")[0]
                    if original in before:
                        node.input[place] = original

    fault = planted(causal, tmp_path, plant_in_keys).fault
    assert fault is not None
    assert (fault.module, fault.cause.name) == ("layers.1.0.branch.attn_fn.rel_pos", "rotary phase")


def _ancestors(document: onnx.ModelProto, value: str, module: str) -> set[str]:
    made = {name: node for node in nodes_of(document, module) for name in node.output}
    found, queue = set(), [value]
    while queue:
        name = queue.pop()
        if name in made and name not in found:
            found.add(name)
            queue += made[name].input
    return found


def _through_mask(document: onnx.ModelProto, *nodes: onnx.NodeProto) -> None:
    """Put nodes between the mask and the first attention node."""
    node = attention_node(document, 0)
    node.input[3] = nodes[-1].output[0]
    for position, new in enumerate(nodes):
        document.graph.node.insert(position, new)


def test_an_inverted_mask(causal: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(document: onnx.ModelProto) -> None:
        _through_mask(document, helper.make_node("Not", ["mask"], ["opposite"]))

    fault = planted(causal, tmp_path, plant).fault
    assert fault is not None
    assert (fault.module, fault.cause.name) == ("layers.0.0.branch.attn_fn", "mask")
    assert "inverted" in fault.cause.evidence


def test_a_mask_without_effect(causal: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(document: onnx.ModelProto) -> None:
        nodes = (helper.make_node("Not", ["mask"], ["not_mask"]), helper.make_node("Or", ["mask", "not_mask"], ["all"]))
        _through_mask(document, *nodes)

    fault = planted(causal, tmp_path, plant).fault
    assert fault is not None
    assert fault.cause.name == "mask" and "no effect" in fault.cause.evidence


def test_a_mask_shifted_by_one_key(causal: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(document: onnx.ModelProto) -> None:
        order = numpy_helper.from_array(np.roll(np.arange(LENGTH), 1), "shifted_order")
        document.graph.initializer.append(order)
        _through_mask(document, helper.make_node("Gather", ["mask", "shifted_order"], ["shifted"], axis=1))

    fault = planted(causal, tmp_path, plant).fault
    assert fault is not None
    assert fault.cause.name == "mask" and "every key kept the output is right" in fault.cause.evidence


def test_padding_that_is_not_zero(both_ways: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(document: onnx.ModelProto) -> None:
        pad = next(node for node in nodes_of(document, "layers.0.0.branch.attn_fn") if node.op_type == "Pad")
        document.graph.initializer.append(numpy_helper.from_array(np.float32(1.5), "not_zero"))
        del pad.input[2:]
        pad.input.append("not_zero")

    fault = planted(both_ways, tmp_path, plant).fault
    assert fault is not None
    assert (fault.module, fault.cause.name) == ("layers.0.0.branch.attn_fn", "padding")


def test_another_window(causal: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(document: onnx.ModelProto) -> None:
        attribute = next(a for a in attention_node(document, 1).attribute if a.name == "look_backward")
        attribute.i = 3

    fault = planted(causal, tmp_path, plant).fault
    assert fault is not None
    assert (fault.module, fault.cause.name) == ("layers.1.0.branch.attn_fn", "window")
    assert "3 back" in fault.cause.evidence


def test_a_file_of_open_sizes_is_compared_at_sizes_of_its_own_or_of_the_inputs(
    open_sizes: tuple[Path, Path], tmp_path: Path
) -> None:
    """The same module is found as in a file of fixed sizes; the length is no multiple of the window."""

    def plant(document: onnx.ModelProto) -> None:
        change_weight(document, "layers.1.0.branch.to_out", lambda w: np.where(w == w.max(), w + 0.5, w))

    found = planted(open_sizes, tmp_path, plant)
    assert found.fault is not None and found.fault.module == "layers.1.0.branch.to_out"
    assert found.fault.cause.name == "weights" and "compared at batch=1, seq=27" in found.notes
    np.savez(tmp_path / "inputs.npz", tokens=np.ones((2, 45), np.int64))
    given = run_bisect(BisectRequest(*open_sizes, inputs=tmp_path / "inputs.npz"))
    assert given.fault is None and "compared at batch=2, seq=45" in given.notes


def test_weights_may_lie_in_a_folder_below_as_links(causal: tuple[Path, Path], tmp_path: Path) -> None:
    document, model = onnx.load(causal[0]), tmp_path / "m.onnx"
    onnx.save(document, model, save_as_external_data=True, location="weights", size_threshold=1024)
    document = onnx.load(model, load_external_data=False)
    for tensor in document.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "below/weights" if entry.key == "location" else entry.value
    onnx.save(document, model)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "weights").symlink_to("../weights")
    assert run_bisect(BisectRequest(model, causal[1])).fault is None


def test_expressions_of_sizes_are_computed_and_others_left() -> None:
    sizes = {"batch": 3, "seq": 10}
    texts = {"seq": 10, "2*batch*seq": 60, "4*((seq + 3)//4) - 1": 11, "-batch + seq": 7, "Max(seq, 1)": 0, "other": 0}
    texts |= {"seq*1000000000*1000000000*1000000000": 0, "seq - 11": 0, "seq//0": 0}
    values = [helper.make_tensor_value_info(text, TensorProto.FLOAT, [text, 5]) for text in texts]
    graph = helper.make_graph([], "sizes", values, [])
    fix(graph, sizes)
    found = {value.name: value.type.tensor_type.shape.dim[0].dim_value for value in graph.input}
    assert found == texts


def test_a_softmax_in_half_precision(causal: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(document: onnx.ModelProto) -> None:
        for function in document.functions:
            for position, node in reversed(list(enumerate(function.node))):
                if node.op_type == "Softmax":
                    scores = node.input[0]
                    node.input[0] = "rounded_back"
                    function.node.insert(
                        position, helper.make_node("Cast", ["rounded"], ["rounded_back"], to=TensorProto.FLOAT)
                    )
                    function.node.insert(
                        position, helper.make_node("Cast", [scores], ["rounded"], to=TensorProto.FLOAT16)
                    )

    fault = planted(causal, tmp_path, plant).fault
    assert fault is not None
    assert (fault.module, fault.cause.name) == ("layers.0.0.branch.attn_fn", "precision of the softmax")


def test_an_overflow_in_fp16(half: tuple[Path, Path], tmp_path: Path) -> None:
    """The same model with one matrix so large that its products leave fp16, though it fits itself."""
    _, checkpoint = half
    state = torch.load(checkpoint)
    name = "layers.1.1.branch.1.weight"
    state[name] *= 1e5
    state["layers.1.1.branch.4.weight"] *= 1e-3
    large = tmp_path / "large.pt"
    torch.save(state, large)
    large.with_suffix(".json").write_text(checkpoint.with_suffix(".json").read_text())

    def plant(document: onnx.ModelProto) -> None:
        for module in ("layers.1.1.branch.value", "layers.1.1.branch.gate"):
            change_weight(document, module, lambda w: w.astype(np.float64) * 1e5)
        change_weight(document, "layers.1.1.branch.4", lambda w: w.astype(np.float64) * 1e-3)

    fault = planted((half[0], large), tmp_path, plant).fault
    assert fault is not None
    assert fault.cause.name == "overflow"
    assert fault.module in ("layers.1.1.branch.value", "layers.1.1.branch.gate")
    assert "65504" in fault.cause.evidence


def test_the_command(
    causal: tuple[Path, Path], tmp_path: Path, localattn: Callable[..., Finished], half: tuple[Path, Path]
) -> None:
    model, checkpoint = causal
    good = localattn("bisect", model, "--against", checkpoint)
    assert good.code == 0 and "module boundaries agree" in good.out

    document = onnx.load(model)
    change_weight(document, "layers.0.1.branch.4", lambda w: w * 1.5)
    faulty = tmp_path / "faulty.onnx"
    onnx.save(document, faulty)
    (tmp_path / "faulty.onnx.json").write_text(model.with_name("model.onnx.json").read_text())
    found = localattn("bisect", faulty, "--against", checkpoint)
    assert found.code == 1
    assert "layers.0.1.branch.4" in found.out and "weights" in found.out and "WRONG" in found.out
    as_json = json.loads(localattn("bisect", faulty, "--against", checkpoint, "--format", "json").out)
    assert as_json["fault"]["module"] == "layers.0.1.branch.4" and not as_json["passed"]
    assert as_json["boundaries"][0]["passed"]


def test_a_file_that_names_no_modules(
    causal: tuple[Path, Path], tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    model, checkpoint = causal
    document = onnx.load(model)
    for node in document.graph.node:
        del node.metadata_props[:]
    bare = tmp_path / "bare.onnx"
    onnx.save(document, bare)
    refused = localattn("bisect", bare, "--against", checkpoint)
    assert refused.code == 2 and "does not record which module" in refused.err


def test_another_checkpoint(causal: tuple[Path, Path], tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    other = save_upstream(tmp_path, "local_attention.LocalTransformer", {**TINY, "max_seq_len": 128, "num_tokens": 11})
    refused = localattn("bisect", causal[0], "--against", other)
    assert refused.code == 2 and "Traceback" not in refused.err


@needs_rtx
def test_an_engine_is_built_again_with_its_values_as_outputs(
    causal: tuple[Path, Path], tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    for path in causal[0].parent.glob("model.onnx*"):
        shutil.copyfile(path, tmp_path / path.name)
    model, engine = tmp_path / "model.onnx", tmp_path / "model.engine"
    build_engine(BuildRequest(model, engine, "tensorrt-rtx", ("sm_86",)))
    finished = localattn("bisect", engine, "--against", causal[1])
    if find_device_or_none() is None:  # everything but the run itself
        assert finished.code == 3 and "driver" in finished.err
    else:
        assert finished.code == 0, finished.err
    model.write_bytes(model.read_bytes() + b"\x00")
    other = localattn("bisect", engine, "--against", causal[1])
    assert other.code == 1 and "is not the file model.engine was built from" in other.err
    model.unlink()
    gone = localattn("bisect", engine, "--against", causal[1])
    assert gone.code == 2 and "Copy that file into the engine's folder" in gone.err
