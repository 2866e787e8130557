"""ONNX files in OpenVINO: equal to onnxruntime, in the precision said, and refused where they would be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from localattn.core.errors import MissingDependency, UsageError
from localattn.onnx_graph.onnx_file import OnnxFile
from localattn.runtime import load, open_step
from localattn.runtime.backends.openvino import prepare
from localattn.runtime.bench.request import BenchRequest
from localattn.runtime.parity.files import run_file_parity
from localattn.runtime.parity.report import ParityRequest

from ....conftest import Finished
from ....runtimes.kinds import exported

pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install 'localattn[openvino]'")


def slow(kind: str) -> object:
    return pytest.param(kind, marks=pytest.mark.slow)


# fp32 files differ by a few roundings, and by no more: what OpenVINO computes in bf16 by itself differs by 1e-3.
@pytest.mark.parametrize("kind", ["full", "dynamic", "AFT", *map(slow, ("mask", "bias", "xpos", "int8", "module"))])
def test_a_file_as_it_was_exported_is_equal_to_onnxruntime(kind: str) -> None:
    path = exported(kind)
    report = run_file_parity(ParityRequest(path, path, seeds=(0,), atol=1e-5, rtol=1e-5, runtime="openvino"))
    assert report.passed
    assert report.provider == "cpu"
    assert "computes in fp32" in report.notes


def test_a_precision_asked_for_is_used() -> None:
    session = load(exported("full"), runtime="openvino:bf16")
    exact = load(exported("full"), "cpu")
    tokens = {"tokens": np.arange(32)[None] % 23}
    difference = np.abs(session.run(tokens)["logits"] - exact.run(tokens)["logits"]).max()
    supported = "bf16" in session.notes[0]
    assert difference > 1e-4 if supported else session.notes == ("computes in fp32",)


def test_a_file_that_counts_beyond_32_bits_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (int64[1] position) => (int64[1] y) <int64[1] turns = {4397346540229}> { y = Mul (position, turns) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "wide.onnx")
    with pytest.raises(UsageError, match="OpenVINO") as refused:
        load(tmp_path / "wide.onnx", runtime="openvino")
    assert "32 bits" in refused.value.why
    # What clips is no arithmetic.
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[4] x) => (float[3] y) <int64[1] one = {1}, int64[1] end = {9223372036854775807}>
    { y = Slice (x, one, end) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "slice.onnx")
    session = load(tmp_path / "slice.onnx", runtime="openvino")
    np.testing.assert_array_equal(session.run({"x": np.arange(4, dtype="f")})["y"], [1, 2, 3])


@pytest.mark.parametrize("order", [1, -1])
def test_rows_that_it_would_join_for_minutes_are_refused_before(order: int, tmp_path: Path) -> None:
    """In any order of the nodes; a value that is read twice ends a row."""
    names = ["x", *(f"v{index}" for index in range(1199)), "y"]
    kinds = ("Relu", "Neg", "Abs")
    nodes = [
        onnx.helper.make_node(kinds[index % 3], [read], [write]) for index, (read, write) in enumerate(pairwise(names))
    ]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4]) for name in ("x", "y")]
    for taps in (False, True):
        read = names[10:1200:10] if taps else []
        more = [onnx.helper.make_node("MatMul", [name, name], [f"t{name}"]) for name in read]
        graph = onnx.helper.make_graph([*nodes, *more][::order], "g", ends[:1], ends[1:])
        file = OnnxFile.of_bytes(onnx.helper.make_model(graph, ir_version=10).SerializeToString())
        places = prepare._places_in_rows(graph)
        assert max(places) == (10 if taps else 1200)
        if not taps:
            with pytest.raises(UsageError, match="cannot be run in OpenVINO") as refused, prepare.readable(file):
                pass
            assert "1200 of its operators in a row" in refused.value.why


def test_identities_are_cheap_but_end_no_row() -> None:
    """OpenVINO removes them, and then joins what is before and after."""

    def row(kinds: str) -> list[float]:
        of = {"i": "Identity", "r": "Relu"}
        nodes = [onnx.helper.make_node(of[kind], [f"v{index}"], [f"v{index + 1}"]) for index, kind in enumerate(kinds)]
        return prepare._places_in_rows(onnx.helper.make_graph(nodes, "g", [], []))

    assert (
        sum(place**2 for place in row("i" * 2000)) < prepare._MOST_JOINED < sum(place**2 for place in row("i" * 5000))
    )
    assert max(row("ri" * 30)) == pytest.approx(40) and max(row("r" * 30)) == 30


def test_a_step_file_is_fed_call_by_call(tmp_path: Path) -> None:
    """A causal AFTLocal, whose steps count in small numbers; its prefill file beside it, windows beyond the ring."""
    import torch

    from localattn.exporter.export import ExportRequest
    from localattn.exporter.options import ShapeRequest

    from ....support.steps import export_steps

    checkpoint = tmp_path / "model.pt"
    torch.save(torch.load(exported("AFT").with_suffix(".pt")), checkpoint)
    (tmp_path / "model.json").write_text('{"class": "labml_nn.AFTLocal"}')
    request = ExportRequest(checkpoint, tmp_path / "step.onnx", shapes=ShapeRequest(causal=True))
    export_steps(request, chunk=8)
    path = tmp_path / "step.onnx"
    report = run_file_parity(ParityRequest(path, path, seeds=(0,), atol=1e-5, rtol=1e-5, runtime="openvino"))
    assert report.passed
    assert {"first 8 per call" in name for name, _ in report.comparisons} == {True, False}
    sessions = [open_step(path, runtime=runtime) for runtime in ("openvino", "auto")]
    inputs = {
        name: np.random.default_rng(0).standard_normal((19, 1, 16)).astype("f") for name in ("query", "key", "value")
    }
    for _ in range(2):  # `reset` empties the caches
        outputs = [session.consume(inputs).copy() for session in sessions]
        np.testing.assert_allclose(*outputs, atol=1e-5)
        for session in sessions:
            session.reset()


def test_commands_take_the_runtime(tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    path = exported("full")
    ran = localattn("run", path, "--runtime", "openvino", "--format", "json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert (report["backend"], report["provider"], report["plugin"]) == ("openvino", "cpu", None)
    compared = localattn("parity", path, "--against", path.with_suffix(".pt"), "--runtime", "openvino", "--seeds", 1)
    assert compared.code == 0, compared.err
    options = ("--duration", 0, "--iterations", 1, "--rounds", 1, "--warmup", 0, "--format", "json")
    measured = localattn("bench", path, "--runtime", "onnxruntime,openvino", *options)
    assert measured.code == 0, measured.err
    assert [row["backend"] for row in json.loads(measured.out)["rows"]] == ["onnxruntime", "openvino"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runtime": "tflite"}, "no runtime 'tflite'"),
        ({"runtime": "onnxruntime:bf16"}, "no runtime 'onnxruntime:bf16'"),
        ({"runtime": "openvino:int3"}, "does not compute in 'int3'"),
        ({"runtime": "openvino", "provider": "cuda"}, "no provider 'cuda'"),
        ({"runtime": "openvino", "plugin": "kernels.so"}, "cannot be used in OpenVINO"),
    ],
)
def test_what_openvino_has_not_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(exported("full"), **options)


def test_a_device_that_is_not_there_is_named() -> None:
    import openvino

    if any(name.startswith("NPU") for name in openvino.Core().available_devices):
        pytest.skip("there is a neural processor here")
    with pytest.raises(MissingDependency, match="finds no npu"):
        load(exported("full"), "npu", runtime="openvino")


def test_a_profile_is_of_onnxruntime_alone() -> None:
    with pytest.raises(UsageError, match="apply to onnxruntime only"):
        BenchRequest((Path("m.onnx"),), runtimes=("openvino",), profile=True)
