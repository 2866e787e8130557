"""Sessions: lazy imports, honest providers, inputs checked by name, hostile files refused in one line."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from localattn.core.errors import MissingDependency, UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import NodeAttributes
from localattn.core.tensors import TensorSpec
from localattn.runtime import load
from localattn.runtime.backends.onnxruntime import session as onnxruntime_session

EMBED = """
<ir_version: 10, opset_import: ["" : 20]>
embed (int64[1, N] tokens, bool[1, N] mask) => (float[1, N, 2] out, float[1, N] kept)
<float[3, 2] table = {0.0, 0.5, 1.0, 1.5, 2.0, 2.5}>
{
    out = Gather <axis = 0> (table, tokens)
    kept = Cast <to = 1> (mask)
}
"""
RELU = '<ir_version: 10, opset_import: ["" : 20]> g (float[4] x) => (float[4] y) { y = Relu(x) }'


def model_bytes(text: str) -> bytes:
    return onnx.parser.parse_model(text).SerializeToString()


@pytest.fixture
def embed(tmp_path):
    path = tmp_path / "embed.onnx"
    path.write_bytes(model_bytes(EMBED))
    return path


def good_inputs() -> dict[str, np.ndarray]:
    return {"tokens": np.array([[2, 0, 1]]), "mask": np.array([[True, False, True]])}


def test_importing_the_runtime_imports_no_heavy_package():
    heavy = ("torch", "onnxruntime", "onnx", "pydantic")
    code = (
        "import sys, localattn.runtime, localattn.runtime.session, localattn.runtime.backends.onnxruntime.session,"
        "localattn.runtime.inputs.arrays, localattn.runtime.parity.comparison, localattn.onnx_graph.summary,"
        "localattn.commands.run\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
        "localattn.runtime.load\n"
        "import onnx; print('onnx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]


def test_running_a_model_does_not_import_torch(embed):
    code = (
        "import sys, numpy as np\nfrom localattn.runtime import load\n"
        f"s = load({str(embed)!r}, 'cpu')\n"
        "s.run({'tokens': np.zeros((1, 2), np.int64), 'mask': np.ones((1, 2), bool)})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_session_describes_itself_and_runs(embed):
    session = load(embed, threads=1)
    assert session.backend == "onnxruntime"
    assert session.inputs == [TensorSpec("tokens", "int64", (1, "N")), TensorSpec("mask", "bool", (1, "N"))]
    assert session.outputs[0] == TensorSpec("out", "float32", (1, "N", 2))
    outputs = session.run(good_inputs())
    np.testing.assert_array_equal(outputs["out"], np.array([[[2, 2.5], [0, 0.5], [1, 1.5]]], np.float32))
    np.testing.assert_array_equal(outputs["kept"], np.array([[1, 0, 1]], np.float32))


def test_a_model_in_memory_runs():
    session = onnxruntime_session.open_bytes(model_bytes(RELU), "cpu")
    out = session.run({"x": np.array([-1, 2, -3, 4], np.float32)})["y"]
    np.testing.assert_array_equal(out, [0, 2, 0, 4])


@pytest.mark.parametrize(
    "change",
    [
        lambda i: {**i, "tokens": i["tokens"].astype(np.int32)},
        lambda i: {**i, "tokens": i["tokens"].astype(np.uint8)},
        lambda i: {**i, "tokens": i["tokens"].astype(">i8")},
        lambda i: {**i, "mask": i["mask"].astype(np.uint8)},
        lambda i: {**i, "tokens": np.repeat(i["tokens"], 2, axis=1)[:, ::2]},
    ],
)
def test_exact_conversions_change_no_result(embed, change):
    session = load(embed, "cpu")
    expected = session.run(good_inputs())
    outputs = session.run(change(good_inputs()))
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda i: {"tokens": i["tokens"]}, ["Missing: mask bool [1, N]"]),
        (lambda i: {**i, "masc": i["mask"]}, ["Unknown: 'masc'", "mask bool [1, N]"]),
        (lambda i: {**i, "tokens": i["tokens"].astype(np.float32)}, ["'tokens'", "float32", "int64 [1, N]"]),
        (lambda i: {**i, "tokens": i["tokens"].astype(np.uint64)}, ["'tokens'", "uint64", "int64 [1, N]"]),
        (lambda i: {**i, "mask": np.array([[2, 0, 1]], np.uint8)}, ["'mask'", "uint8", "bool [1, N]"]),
        (lambda i: {**i, "mask": i["mask"].astype(np.int64)}, ["'mask'", "int64", "bool [1, N]"]),
        (lambda i: {**i, "tokens": i["tokens"][0]}, ["'tokens'", "shape [3]", "[1, N]"]),
        (lambda i: {**i, "tokens": i["tokens"].repeat(2, 0)}, ["'tokens'", "shape [2, 3]", "[1, N]"]),
        (lambda i: {**i, "mask": i["mask"][:, :2]}, ["'mask'", "shape [1, 2]", "N = 3"]),
        (lambda i: {**i, "mask": [[True] * 3]}, ["'mask'", "a list"]),
    ],
)
def test_inputs_that_do_not_fit_are_named_with_what_came_and_what_is_wanted(embed, change, said):
    with pytest.raises(UsageError) as caught:
        load(embed, "cpu").run(change(good_inputs()))
    for piece in said:
        assert piece in str(caught.value)


def test_values_the_engine_refuses_are_a_usage_error_and_no_log(embed, capfd):
    with pytest.raises(UsageError, match="did not run"):
        load(embed, "cpu").run({**good_inputs(), "tokens": np.array([[7, 0, 1]])})
    assert capfd.readouterr() == ("", "")


def test_a_run_that_fails_on_its_provider_is_not_done_on_another(capfd, monkeypatch):
    """onnxruntime's own sessions go on with the providers they fall back to, and print that."""
    from onnxruntime.capi._pybind_state import EPFail

    session = onnxruntime_session.open_bytes(model_bytes(RELU), "cpu")
    native = session._open._sess

    class Failing:
        def __getattr__(self, name):
            return getattr(native, name)

        def run(self, *_):
            raise EPFail("the GPU is lost")

    monkeypatch.setattr(session._open, "_sess", Failing())
    with pytest.raises(UsageError, match="did not run") as caught:
        session.run({"x": np.zeros(4, np.float32)})
    assert caught.value.why == "the GPU is lost"
    assert capfd.readouterr() == ("", "")


def bodiless_model() -> bytes:
    """A valid attention node without its function."""
    text = """<ir_version: 10, opset_import: ["" : 20, "localattn" : 1]>
    g (float[1, 16, 2, 4] x) => (float[1, 16, 2, 4] y) { y = localattn.WindowedAttention(x, x, x) }"""
    model = onnx.parser.parse_model(text)
    attributes = NodeAttributes(WindowGeometry(8, causal=True), scale=0.125).as_onnx()
    model.graph.node[0].attribute.extend(onnx.helper.make_attribute(*item) for item in attributes.items())
    return model.SerializeToString()


def external_data_model() -> bytes:
    model = onnx.parser.parse_model(EMBED)
    table = model.graph.initializer[0]
    table.ClearField("float_data")
    table.ClearField("raw_data")
    table.data_location = onnx.TensorProto.EXTERNAL
    table.external_data.add(key="location", value="gone.bin")
    return model.SerializeToString()


def newer_format() -> bytes:
    model = onnx.parser.parse_model(RELU)
    model.ir_version = 99
    return model.SerializeToString()


HOSTILE = {
    "empty": b"",
    "cut": model_bytes(EMBED)[:60],
    "last byte gone": model_bytes(EMBED)[:-1],
    "random": np.random.default_rng(0).bytes(4000),
    "text": b"this is no model\n" * 20,
    "zeros": bytes(500),
    "external data": external_data_model(),
    "no function definition": bodiless_model(),
    "newer format": newer_format(),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_broken_file_is_one_line_of_reason_and_no_log(case, tmp_path, capfd):
    path = tmp_path / "broken.onnx"
    path.write_bytes(HOSTILE[case])
    kind = MissingDependency if case == "no function definition" else UsageError
    with pytest.raises(kind, match=r"broken\.onnx (cannot be loaded|is not complete|is not an ONNX model)") as caught:
        load(path, "cpu")
    assert caught.value.why and "\n" not in caught.value.why and len(caught.value.why) <= 300
    assert "onnxruntime_src" not in caught.value.why
    assert caught.value.fix
    assert capfd.readouterr() == ("", "")


def test_the_reason_is_what_is_wrong(tmp_path):
    path = tmp_path / "m.onnx"
    for case, kind, reason in (
        ("no function definition", MissingDependency, "localattn:WindowedAttention"),
        ("external data", UsageError, "gone.bin"),
    ):
        path.write_bytes(HOSTILE[case])
        with pytest.raises(kind) as caught:
            load(path)
        assert reason in caught.value.why
    path.write_bytes(HOSTILE["newer format"])
    with pytest.raises(UsageError) as caught:
        load(path)
    assert caught.value.why.startswith("Unsupported model IR version: 99")


def test_a_model_with_other_than_number_tensors_is_refused():
    text = '<ir_version: 10, opset_import: ["" : 20]> g (string[1] x) => (string[1] y) { y = Identity(x) }'
    with pytest.raises(UsageError, match="not a tensor of numbers"):
        onnxruntime_session.open_bytes(model_bytes(text))


def test_paths_that_are_no_model_file(tmp_path, embed):
    (tmp_path / "folder.onnx").mkdir()
    other = embed.rename(tmp_path / "model.engine2")
    for path, said in (
        (tmp_path / "folder.onnx", "folder"),
        (tmp_path / "none.onnx", "no such file"),
        (other, "No backend"),
    ):
        with pytest.raises(UsageError, match=said):
            load(path)


@pytest.mark.parametrize(("provider", "threads"), [("vulkan", None), ("cpu", 0)])
def test_options_out_of_range(embed, provider, threads):
    with pytest.raises(UsageError):
        load(embed, provider, threads)


def test_onnxruntime_missing_is_exit_code_3_with_the_command(embed, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependency, match="pip install onnxruntime"):
        load(embed)
    # What is left after one of the two packages was uninstalled: it imports and is empty.
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    with pytest.raises(MissingDependency, match="in part"):
        load(embed)


class FakeRuntime:
    """onnxruntime as a machine with other providers would show it: what is listed, what really starts."""

    __version__ = "fake"

    def __init__(self, listed, starts, fault=None):
        self.real, self.listed, self.starts, self.fault = onnxruntime, listed, starts, fault
        self.SessionOptions = onnxruntime.SessionOptions
        self.asked, self.models = [], []

    def get_available_providers(self):
        return self.listed

    def set_default_logger_severity(self, severity):
        self.real.set_default_logger_severity(severity)

    @property
    def InferenceSession(self):
        runtime = self

        class InferenceSession:
            def __new__(cls, model, options, providers, enable_fallback):
                return runtime.open(model, options, providers)

        return InferenceSession

    def open(self, model, options, providers):
        names = [p if isinstance(p, str) else p[0] for p in providers]
        self.asked.append(providers)
        self.models.append(model)
        if self.fault and names[0] != "CPUExecutionProvider":
            raise RuntimeError(self.fault)
        session = self.real.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        session.get_providers = lambda: [name for name in names if name in self.starts]
        return session


CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


def opened(monkeypatch, provider, *args, **kwargs):
    fake = FakeRuntime(*args, **kwargs)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    return onnxruntime_session.open_bytes(model_bytes(RELU), provider), fake


def test_an_explicit_gpu_is_used_or_refused(monkeypatch):
    session, fake = opened(monkeypatch, "cuda", [CUDA, CPU], [CUDA, CPU])
    assert session.provider == "cuda"
    assert fake.asked[0][0] == (CUDA, {"use_tf32": "0"})
    for listed, starts, fault in (
        ([CPU], [CPU], None),
        ([CUDA, CPU], [CPU], None),
        ([CUDA, CPU], [CPU], "CUDA failure 35"),
    ):
        with pytest.raises(MissingDependency, match="onnxruntime-gpu") as caught:
            opened(monkeypatch, "cuda", listed, starts, fault)
        assert caught.value.exit_code == 3
        assert CPU in caught.value.why
        assert fault is None or fault in caught.value.why


def test_tensorrt_that_fell_back_to_cuda_is_refused(monkeypatch):
    with pytest.raises(MissingDependency, match="TensorrtExecutionProvider did not start"):
        opened(monkeypatch, "tensorrt", [TENSORRT, CUDA, CPU], [CUDA, CPU])


@pytest.mark.parametrize(
    ("listed", "starts", "fault", "runs"),
    [
        ([TENSORRT, CUDA, CPU], [TENSORRT, CUDA, CPU], None, "cuda"),
        ([CUDA, CPU], [CPU], None, "cpu"),
        ([CUDA, CPU], [CPU], "CUDA failure 35", "cpu"),
        ([CPU], [CPU], None, "cpu"),
    ],
)
def test_auto_takes_the_best_that_starts_and_says_which(monkeypatch, listed, starts, fault, runs):
    session, _ = opened(monkeypatch, "auto", listed, starts, fault)
    assert session.provider == runs


def test_a_broken_file_is_not_blamed_on_the_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", FakeRuntime([CUDA, CPU], [CPU], "CUDA failure 35"))
    for provider in ("auto", "cuda"):
        with pytest.raises(UsageError, match="is not an ONNX model"):
            onnxruntime_session.open_bytes(HOSTILE["cut"], provider)
