"""On an Arm machine: the commands a Jetson runs, the compiled kernels inside onnxruntime for aarch64, and fp16."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from localattn.core.tolerance import TOLERANCES
from localattn.core.versions import parse
from localattn.plugins.cpu.probes import probes
from localattn.runtime import Generator, load
from localattn.runtime.backends.onnxruntime.providers import SUMMED
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.inputs.arrays import load_arrays, save_arrays

from ....conftest import TINY, Finished, save_upstream
from ....exporter.test_step_export import TRANSFORMER, steps
from ....support.arm_machine import ONNXRUNTIME, ArmMachine, arm_machine
from ....support.models.engine_models import small_model
from ....support.native.cpu_build import built

pytestmark = pytest.mark.slow

SUMS_HALVES = parse(ONNXRUNTIME) >= (1, 29)
TOKENS = np.arange(64).reshape(1, 64) % 23


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ArmMachine:
    store = request.config.cache
    assert store is not None
    return arm_machine(store.mkdir("arm"), tmp_path_factory.mktemp("arm"))


@pytest.fixture(scope="module")
def library(arm: ArmMachine) -> Path:
    """The library of CPU kernels for aarch64, built on this machine."""
    path = built("aarch64").path
    assert path is not None
    return path


def document(finished: Finished) -> dict:
    assert finished.code == 0, finished.err
    return json.loads(finished.out)


def test_every_kernel_runs_in_onnxruntime_for_arm(arm: ArmMachine, library: Path) -> None:
    shown = document(arm.localattn("plugin", "check", "--backend", "onnxruntime", library, "--format", "json"))
    assert shown["onnxruntime"] == ONNXRUNTIME and shown["instruction_set"] == "neon"
    assert set(shown["kernels"]) == {probe.op_type for probe in probes()}
    for probe in probes():
        assert probe.dtype in shown["kernels"][probe.op_type]


@pytest.mark.parametrize(
    ("dtype", "plugin"),
    [("fp32", "kernels"), ("fp16", "kernels"), ("fp32", "bodies"), ("fp16", "bodies"), ("bf16", "bodies")],
)
def test_a_model_computes_the_same(arm: ArmMachine, library: Path, dtype: str, plugin: str, tmp_path: Path) -> None:
    path, given, saved = small_model(dtype), tmp_path / "in.npz", tmp_path / "out.npz"
    save_arrays(given, {"tokens": TOKENS})
    expected = load(path, "cpu", plugin="none").run({"tokens": TOKENS})["logits"]
    chosen = ("--plugin-library", library) if plugin == "kernels" else ("--plugin", "none")
    shown = document(arm.localattn(
        "run", path, "--load-inputs", given, "--save-outputs", saved, *chosen, "--format", "json"
    ))  # fmt: skip
    assert shown["plugin"] == (str(library) if plugin == "kernels" else None)
    assert (SUMMED in shown["notes"]) is (dtype == "fp16" and SUMS_HALVES)
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(load_arrays(saved)["logits"], expected, tolerance.rtol, tolerance.atol)


PRODUCT = """
import sys, numpy, onnxruntime
from localattn.runtime.backends.onnxruntime.session import open_bytes
model = open(sys.argv[1], "rb").read()
x, exact = numpy.load(sys.argv[2]), numpy.load(sys.argv[3])
plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
ours = open_bytes(model, "cpu").run({"x": x})["y"]
print(*(numpy.sqrt(numpy.mean((y - exact) ** 2)) for y in (plain, ours, exact.astype("float16"))))
"""


def test_fp16_products_are_summed_in_fp32(arm: ArmMachine, tmp_path: Path) -> None:
    """onnxruntime's own are not, from 1.29 on: else there would be no need of the pass `fp16_matmul_in_fp32`."""
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape).astype(np.float16) for shape in ((32, 1024), (1024, 64)))
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "graph", [value("x", 10, x.shape)], [value("y", 10, (32, 64))], [onnx.numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "product.onnx")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "exact.npy", x.astype(np.float64) @ w.astype(np.float64))
    finished = arm.python("-c", PRODUCT, *(tmp_path / name for name in ("product.onnx", "x.npy", "exact.npy")))
    assert finished.code == 0, finished.err
    plain, ours, rounding = map(float, finished.out.split())
    assert ours < 1.01 * rounding
    assert (plain > 10 * rounding) is SUMS_HALVES


def test_a_bundle_proves_itself(arm: ArmMachine, library: Path, tmp_path: Path) -> None:
    create_bundle(BundleRequest(small_model(), tmp_path / "bundle", plugins=(library,)))
    finished = arm.python(tmp_path / "bundle" / "verify.py")
    assert finished.code == 0, finished.out + finished.err
    assert finished.out.count("ok   model/small.onnx on cpu, samples") == 2
    assert finished.out.count(f"ok   model/small.onnx on cpu, kernels/aarch64/{library.name}, samples") == 2


def test_text_goes_on_with_the_same_tokens(arm: ArmMachine, library: Path, tmp_path: Path) -> None:
    step = steps(save_upstream(tmp_path, TRANSFORMER, TINY), 8)[0].path
    asked = ("generate", step, "--prompt-ids", "1,2,3,4,5,6,7,8,9,10", "--max-tokens", "20", "--temperature", "0", "-q")
    finished = arm.localattn(*asked)
    assert finished.code == 0, finished.err
    here = Generator.open(step, "cpu").generate(np.arange(1, 11), max_tokens=20, temperature=0)
    expected = [int(token) for (token,) in here]
    assert [int(word) for word in finished.out.replace(",", " ").split()] == expected


def test_doctor_and_bench(arm: ArmMachine) -> None:
    """Both start processes of their own."""
    report = document(arm.localattn("doctor", "--format", "json", "-q"))
    findings = {entry["name"]: entry for entry in report["findings"]}
    assert "aarch64" in findings["machine"]["detail"]
    assert findings["cpu"]["status"] == "ok" and findings["cpu"]["version"] == ONNXRUNTIME
    able = {entry["command"] for entry in report["commands"] if entry["able"]}
    assert {"run model.onnx", "generate", "bench", "bundle verify", "parity --against model.onnx"} <= able
    short = ("--duration", "0", "--iterations", "1", "--rounds", "1", "--format", "json")
    timed = document(arm.localattn("bench", small_model("fp16"), *short))
    assert timed["rows"][0]["provider"] == "cpu"
