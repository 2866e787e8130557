"""What providers that take no functions are given: a copy with the same numbers, whole, and options for its types."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnxruntime
import pytest

from localattn.core.errors import MissingDependency, UsageError
from localattn.exporter.export import ExportRequest, export
from localattn.onnx_graph import inlining, onnx_file
from localattn.onnx_graph.graph_values import element_types
from localattn.onnx_graph.onnx_file import TOO_LARGE, OnnxFile
from localattn.runtime import load
from localattn.runtime.backends.onnxruntime.providers import PROVIDERS
from localattn.runtime.backends.onnxruntime.session import open_bytes
from localattn.runtime.backends.onnxruntime.tuned import open_tuned
from localattn.runtime.bundle.device import verify

from ..runtime.backends.onnxruntime.test_providers import CPU, CUDA, TENSORRT, FakeRuntime
from ..support.models.engine_models import small_checkpoint, small_model

OPTIONS = {"fp32": {}, "fp16": {"trt_fp16_enable": "True"}, "bf16": {"trt_bf16_enable": "True"}}
DTYPES = list(OPTIONS)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A model whose weights lie in another file."""
    export(ExportRequest(small_checkpoint(), tmp_path / "beside.onnx", external_data_from=0))
    return tmp_path / "beside.onnx"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """An onnxruntime with all providers, which computes on the CPU."""
    for dtype in DTYPES:
        small_model(dtype)  # exported with the real one
    runtime = FakeRuntime([TENSORRT, CUDA, CPU], [TENSORRT, CUDA, CPU])
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    return runtime


def assert_plain(model: bytes) -> None:
    given = onnx.load_model_from_string(model)
    onnx.checker.check_model(given, full_check=True)
    assert not given.functions
    assert {node.domain for node in given.graph.node} == {""}
    assert not [x for x in given.graph.initializer if x.data_location == onnx.TensorProto.EXTERNAL]


def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 23, (1, 64))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_copy_computes_the_same(dtype: str) -> None:
    model = small_model(dtype)
    document = OnnxFile.read(model).parse()
    assert element_types(document) == {"fp32": {"float32", "int64"}, "fp16": {"float16", "float32", "int64"}}[dtype]
    copy = inlining.apply(document).SerializeToString()
    assert_plain(copy)
    (expected,) = load(model, "cpu", plugin="none").run({"tokens": tokens()}).values()
    (actual,) = open_bytes(copy, "cpu").run({"tokens": tokens()}).values()
    np.testing.assert_array_equal(actual, expected)


def test_weights_of_another_file_come_into_the_copy(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(beside, "cpu", plugin="none").run({"tokens": tokens()})
    file = OnnxFile.read(beside)
    document = file.read_weights(file.parse())
    copy = inlining.apply(document).SerializeToString()
    assert_plain(copy)
    monkeypatch.setattr(onnx_file, "_MOST_BYTES", len(copy) // 2)
    with pytest.raises(ValueError, match="larger than 2 GB"):
        file.read_weights(file.parse())
    for data in beside.parent.glob("*.data"):
        data.unlink()
    np.testing.assert_array_equal(
        next(iter(open_bytes(copy, "cpu").run({"tokens": tokens()}).values())), next(iter(expected.values()))
    )


def test_a_model_without_functions_is_not_copied(tmp_path: Path) -> None:
    model = onnx.inliner.inline_local_functions(onnx.load(small_model()))
    assert inlining.apply(model) is model
    with pytest.raises(UsageError):
        OnnxFile.read(tmp_path / "none.onnx")


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensorrts_provider_gets_the_copy_and_is_told_the_type(dtype: str, fake: FakeRuntime) -> None:
    try:
        assert load(small_model(dtype), "tensorrt").provider == "tensorrt"
    except MissingDependency:  # this machine's CPU, which computes in its place, has no kernels for bf16
        assert dtype == "bf16"
    assert_plain(fake.models[0])
    first = (TENSORRT, OPTIONS[dtype]) if OPTIONS[dtype] else TENSORRT
    assert fake.asked[0] == [first, CUDA, CPU]
    # The others take functions.
    load(small_model("fp32"), "cuda")
    assert onnx.load_from_string(fake.models[-1]) == onnx.load(small_model("fp32"))


def test_what_a_provider_leaves_to_the_cpu_is_told(fake: FakeRuntime) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (uint8[2, 4] x, int8[4, 3] y) => (int32[2, 3] z) { z = MatMulInteger(x, y) }"""
    model = onnx.parser.parse_model(text).SerializeToString()
    assert open_bytes(model, "cpu").notes == ()
    for provider in ("cuda", "tensorrt"):
        assert open_bytes(model, provider).notes == (f"MatMulInteger runs on the CPU: {provider} has no kernel for it",)
    assert load(small_model(), "cuda").notes == ()
    cuda = PROVIDERS["cuda"]
    assert cuda.notes(["LpNormalization", "Add"], "1.27.0") == ()
    (note,) = cuda.notes(["LpNormalization", "Add"], "1.9.2")
    assert note == "LpNormalization runs on the CPU: cuda has no kernel for it before onnxruntime 1.27"


def test_so_does_a_session_that_replays_a_cuda_graph(fake: FakeRuntime) -> None:
    opened = open_tuned(small_model("fp16"), "tensorrt", None, cuda_graph=True, profile=None)
    assert opened.provider == "tensorrt"
    assert_plain(fake.models[-1])
    assert fake.asked[-1][0] == (TENSORRT, {**OPTIONS["fp16"], "trt_cuda_graph_enable": "True"})


def test_a_file_of_which_no_graph_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeRuntime):
        """Opens nothing that is to be recorded."""

        def open(self, model, options, providers):
            if "enable_cuda_graph" in providers[0][1]:
                raise RuntimeError("This session cannot use the graph capture feature")
            return super().open(model, options, providers)

    small_model()
    monkeypatch.setitem(sys.modules, "onnxruntime", Refusing([CUDA, CPU], [CUDA, CPU]))
    with pytest.raises(UsageError, match=r"No CUDA graph can be recorded of .*small.onnx") as caught:
        open_tuned(small_model(), "cuda", None, cuda_graph=True, profile=None)
    assert "graph capture feature" in caught.value.why and "fixed sizes" in caught.value.fix


def test_what_it_compiles_cannot_be_profiled(fake: FakeRuntime, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`profile` does not apply to the provider 'tensorrt'"):
        open_tuned(small_model(), "tensorrt", None, cuda_graph=False, profile=str(tmp_path))


def test_so_does_the_script_of_a_bundle(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, options in ((beside, {}), (small_model("fp16"), OPTIONS["fp16"])):
        runtime = FakeRuntime([TENSORRT, CPU], [TENSORRT, CPU])
        monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
        name, run = verify.open_onnx(path, "tensorrt", None)
        assert name == "tensorrt" and len(run({"tokens": tokens()})) == 1
        assert_plain(runtime.models[0])
        assert runtime.asked[0][0] == (TENSORRT, options)
    assert verify.PROVIDERS["tensorrt"][0] == (TENSORRT, {}), "the table stays as it is"


@pytest.mark.parametrize(
    ("fault", "fix"),
    [
        ("Please install TensorRT libraries as mentioned in the GPU requirements page", "pip install 'tensorrt<11'"),
        (TOO_LARGE, "localattn build"),
        ("CUDA failure 35", "onnxruntime-gpu"),
    ],
)
def test_what_to_do_about_a_provider(fault: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", FakeRuntime([TENSORRT, CPU], [TENSORRT, CPU], fault))
    with pytest.raises(MissingDependency) as caught:
        load(small_model(), "tensorrt")
    assert fault in caught.value.why and fix in caught.value.fix


class Old(onnxruntime.InferenceSession):
    """As up to 1.22: whatever is asked for, the error of a provider is printed, and the CPU takes its place."""

    _fallback_providers = (CPU,)

    def __init__(self, model, options, providers, enable_fallback):
        super().__init__(model, options, providers=providers)

    def _create_inference_session(self, providers, *more):
        if TENSORRT in providers:
            raise RuntimeError("Please install TensorRT libraries")
        super()._create_inference_session(providers, *more)


def test_a_session_does_not_fall_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Falling(FakeRuntime):
        InferenceSession = Old

    path = small_model()
    assert Old(str(path), None, [TENSORRT, CPU], 0).get_providers() == [CPU]
    assert "EP Error" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "onnxruntime", Falling([TENSORRT, CPU], [CPU]))
    with pytest.raises(MissingDependency, match="'tensorrt' does not run here") as caught:
        load(path, "tensorrt")
    assert "Please install TensorRT libraries" in caught.value.why and "tensorrt<11" in caught.value.fix
    assert capsys.readouterr().out == ""


def test_tensorrts_package_is_loaded_first(fake: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It brings the libraries that the provider links to, and puts them where no loader looks."""
    (tmp_path / "tensorrt.py").write_text("import builtins\nbuiltins.tensorrt_came = 'onnxruntime not asked'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # what is imported in its place goes with the patch
    del sys.modules["tensorrt"]
    monkeypatch.setattr(builtins, "tensorrt_came", "", raising=False)
    load(small_model(), "cuda")
    assert builtins.tensorrt_came == ""
    load(small_model(), "tensorrt")
    assert builtins.tensorrt_came
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # cannot be imported: the system may have the libraries
    assert load(small_model(), "tensorrt").provider == "tensorrt"
