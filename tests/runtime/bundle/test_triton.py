"""The Triton model repository of a bundle, read with Triton's own protobuf schema and served by a small stand-in.

The server itself is not a Python package. What it does with a configuration is in its documentation and sources: which
tensors come from the client, which from the state of the sequence, and what that state starts as. The stand-in does
just that.
"""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import importlib.metadata
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from localattn.core.documents.sidecar import sidecar_path
from localattn.core.documents.step_record import CacheRecord, StepRecord
from localattn.core.storage.files import sha256
from localattn.core.tensors import TensorSpec
from localattn.runtime.bundle import serving
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.triton import Serving, model_config, served_name
from localattn.runtime.bundle.verify import verify_bundle
from localattn.runtime.inputs.rows import open_batch

from ...conftest import TINY, Finished, save_upstream
from ...support.models.bundles import open_model, tiny_model  # noqa: F401
from ...support.models.step_model import expected_logits, write
from .test_create import engine_sidecar

Command = Callable[..., Finished]
_NUMPY = {"TYPE_INT64": np.int64, "TYPE_FP32": np.float32, "TYPE_FP16": np.float16, "TYPE_BOOL": np.bool_}


@pytest.fixture(scope="session")
def schema() -> ModuleType:
    """Triton's `model_config.proto`, as its client package carries it; the package itself would also want grpc."""
    pytest.importorskip("google.protobuf")
    try:
        files = importlib.metadata.files("tritonclient") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs tritonclient, for the schema of config.pbtxt")
    path = next(str(file.locate()) for file in files if file.name == "model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_config(folder: Path, schema: ModuleType) -> Any:
    """A model's configuration; the schema refuses unknown fields, enumerators and types."""
    from google.protobuf import text_format

    config = text_format.Parse((folder / "config.pbtxt").read_text(), schema.ModelConfig())
    assert config.name == folder.name
    assert (folder / "1" / config.default_model_filename).is_file()
    return config


class Server:
    """Serves one model of a repository as Triton's onnxruntime backend would, one request at a time."""

    def __init__(self, folder: Path, schema: ModuleType) -> None:
        self.folder, self.schema = folder, schema
        self.config = read_config(folder, schema)
        self.session = onnxruntime.InferenceSession(str(folder / "1" / self.config.default_model_filename))
        batch = ["batch"] if self.config.max_batch_size else []
        states = self.config.sequence_batching.state
        # The server refuses a model whose tensors are not the configured ones.
        taken = {tensor.name: [*batch, *self.dims(tensor)] for tensor in self.config.input}
        taken |= {state.input_name: [*batch, *state.dims] for state in states}
        given = {tensor.name: [*batch, *self.dims(tensor)] for tensor in self.config.output}
        given |= {state.output_name: [*batch, *state.dims] for state in states}
        self.check(taken, self.session.get_inputs(), whole=True)
        self.check(given, self.session.get_outputs(), whole=False)

    @staticmethod
    def dims(tensor: Any) -> list[int]:
        return list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)

    @staticmethod
    def check(configured: dict[str, list[Any]], values: list[Any], *, whole: bool) -> None:
        real = {value.name: [-1 if isinstance(size, str) else size for size in value.shape] for value in values}
        assert configured.keys() == real.keys() if whole else configured.keys() <= real.keys()
        for name, dims in configured.items():
            assert [-1 if size == "batch" else size for size in dims] == real[name], name

    def type_name(self, number: int) -> str:
        return str(self.schema.DataType.Name(number))

    def start(self) -> dict[str, np.ndarray]:
        found = {}
        for state in self.config.sequence_batching.state:
            (initial,) = state.initial_state
            assert initial.name  # the server insists on it
            assert (initial.data_type, list(initial.dims)) == (state.data_type, list(state.dims))
            dtype = _NUMPY[self.type_name(initial.data_type)]
            if initial.WhichOneof("state_data") == "zero_data":
                found[state.input_name] = np.zeros(initial.dims, dtype)
            else:
                content = (self.folder / "initial_state" / initial.data_file).read_bytes()
                found[state.input_name] = np.frombuffer(content, dtype).reshape(initial.dims)
        return found

    def sequence(self, requests: list[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
        """The responses to one sequence of requests."""
        state = self.start()
        wanted = {tensor.name for tensor in self.config.input}
        names = [value.name for value in self.session.get_outputs()]
        for request in requests:
            assert request.keys() == wanted
            outputs = dict(zip(names, self.session.run(names, {**request, **state}), strict=True))
            state = {entry.input_name: outputs[entry.output_name] for entry in self.config.sequence_batching.state}
            yield {tensor.name: outputs[tensor.name] for tensor in self.config.output}


def test_static_model(tiny_model: Path, tmp_path: Path, schema: ModuleType, localattn: Command) -> None:
    made = localattn("bundle", tiny_model, "-o", tmp_path / "b", "--triton", "--triton-instances", "2")
    assert made.code == 0, made.err
    server = Server(tmp_path / "b/triton/tiny", schema)
    assert server.config.backend == "onnxruntime"
    assert server.config.max_batch_size == 0
    assert not server.config.HasField("dynamic_batching")
    assert [(group.count, group.kind) for group in server.config.instance_group] == [(2, 0)]  # KIND_AUTO
    tokens = np.load(tmp_path / "b/samples/tiny.0.inputs.npz")["tokens"]
    (response,) = server.sequence([{"tokens": tokens}])
    np.testing.assert_array_equal(response["logits"], np.load(tmp_path / "b/samples/tiny.0.outputs.npz")["logits"])
    assert verify_bundle(tmp_path / "b").report["code"] == 0
    # The bundle's own model is the served one: its weights are there once.
    assert len(list((tmp_path / "b").rglob("*.onnx"))) == 1
    assert "tritonserver --model-repository=triton" in (tmp_path / "b/README.md").read_text()


def test_open_batch_is_batched(open_model: Path, tmp_path: Path, schema: ModuleType) -> None:
    create_bundle(BundleRequest(open_model, tmp_path / "b", triton=Serving(max_batch=5)))
    server = Server(tmp_path / "b/triton/open", schema)
    assert server.config.max_batch_size == 5
    assert server.config.HasField("dynamic_batching")
    assert list(server.config.input[0].dims) == [-1]
    assert list(server.config.output[0].dims) == [-1, 23]
    assert verify_bundle(tmp_path / "b").report["code"] == 0


@pytest.fixture
def step_model(tmp_path: Path) -> Path:
    """A step file and its prefill file, one of whose caches starts at -1."""
    (tmp_path / "step").mkdir()
    step = write(tmp_path / "step", vocabulary=50)
    for model in step.parent.glob("*.onnx"):
        sidecar = json.loads(sidecar_path(model).read_text())
        sidecar_path(model).write_text(json.dumps(sidecar | {"model_sha256": sha256(model)}))
    return step


def test_step_graph_streams_with_the_servers_state(step_model: Path, tmp_path: Path, schema: ModuleType) -> None:
    created = create_bundle(BundleRequest(step_model, tmp_path / "b", samples=3, triton=Serving(sequences=4)))
    assert {model["path"].split("/")[-1] for model in created.manifest["models"]} == {
        "model_step.onnx",
        "model_step.prefill.onnx",
    }
    server = Server(tmp_path / "b/triton/model_step", schema)
    assert server.config.sequence_batching.oldest.max_candidate_sequences == 4
    assert [tensor.name for tensor in server.config.input] == ["tokens"]
    assert [tensor.name for tensor in server.config.output] == ["logits"]
    assert {state.input_name for state in server.config.sequence_batching.state} == {"position", "ring", "age"}
    tokens = np.random.default_rng(0).integers(0, 50, (1, 20))
    responses = list(server.sequence([{"tokens": tokens[:, t : t + 1]} for t in range(20)]))
    logits = np.concatenate([response["logits"] for response in responses], axis=1)
    np.testing.assert_allclose(logits, expected_logits(tokens, 50), atol=1e-5)
    again = list(server.sequence([{"tokens": tokens[:, :1]}]))  # another sequence starts afresh
    np.testing.assert_array_equal(again[0]["logits"], logits[:, :1])


def test_step_samples_carry_real_caches(step_model: Path, tmp_path: Path) -> None:
    create_bundle(BundleRequest(step_model, tmp_path / "b", samples=3))
    positions = [int(np.load(tmp_path / f"b/samples/model_step.{i}.inputs.npz")["position"][0]) for i in range(3)]
    assert positions[0] == 0
    assert positions[2] > positions[1] > 3  # the ring of 3 has wrapped
    first, later = (np.load(tmp_path / f"b/samples/model_step.{i}.inputs.npz") for i in (0, 2))
    assert (first["age"] == -1).all()
    assert (later["age"] == positions[2] - 1).all()
    report = verify_bundle(tmp_path / "b").report
    assert report["code"] == 0
    assert {row["output"] for row in report["rows"]} == {"logits", "next_ring", "next_age"}


def test_exported_step_file_streams(tiny_model: Path, tmp_path: Path, schema: ModuleType, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)
    exported = localattn("export", checkpoint, "-o", tmp_path / "s.onnx", "--mode", "step")
    if exported.code == 2 and "--mode" in exported.err:
        pytest.skip("needs export --mode step")
    assert exported.code == 0, exported.err
    assert localattn("bundle", tmp_path / "s.onnx", "-o", tmp_path / "b", "--triton").code == 0
    assert verify_bundle(tmp_path / "b").report["code"] == 0
    tokens = np.random.default_rng(0).integers(0, 23, (1, 64))
    full = onnxruntime.InferenceSession(str(tiny_model))  # the same weights
    expected = full.run(["logits"], {"tokens": tokens})[0]
    server = Server(tmp_path / "b/triton/s", schema)
    responses = server.sequence([{"tokens": tokens[:, t : t + 1]} for t in range(64)])
    logits = np.concatenate([response["logits"] for response in responses], axis=1)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_prefill_file_alone_is_not_said_to_generate(step_model: Path, tmp_path: Path) -> None:
    for model, expected in ((step_model, True), (step_model.with_name("model_step.prefill.onnx"), False)):
        notes = create_bundle(BundleRequest(model, tmp_path / model.stem, samples=0)).notes
        assert any("localattn generate" in note for note in notes) is expected


def test_no_token_is_drawn_from_logits_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file that runs in the server's Python, which would answer a token outside the vocabulary."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    spec = importlib.util.spec_from_file_location("served", Path(serving.__file__).with_name("stream_model.py"))
    assert spec is not None and spec.loader is not None
    served = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(served)
    model = object.__new__(served.TritonPythonModel)
    for temperature in (0.0, 1.0):
        work = served.Work(served.Sequence({}), {"tokens": np.zeros((1, 1), np.int64)}, 1, 2, temperature)
        work.done, work.outputs = 1, [np.full((1, 1, 5), np.nan, np.float32)]
        assert not model._goes_on(work)
        assert "not finite" in work.error and work.generated == []


def test_external_weights_are_shared_by_the_served_copy(step_model: Path, tmp_path: Path, schema: ModuleType) -> None:
    model = onnx.load(step_model)
    onnx.save(model, step_model, save_as_external_data=True, location="step.weights", size_threshold=200)
    sidecar = json.loads(sidecar_path(step_model).read_text())
    sidecar["step"]["prefill"] = None
    sidecar_path(step_model).write_text(json.dumps(sidecar | {"model_sha256": sha256(step_model)}))
    create_bundle(BundleRequest(step_model, tmp_path / "b", triton=Serving()))
    assert [path.name for path in (tmp_path / "b").rglob("*.weights")] == ["step.weights"]
    tokens = np.arange(4).reshape(1, 4)
    server = Server(tmp_path / "b/triton/model_step", schema)
    logits = [response["logits"] for response in server.sequence([{"tokens": tokens[:, t : t + 1]} for t in range(4)])]
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected_logits(tokens, 50), atol=1e-5)


@pytest.mark.parametrize(("backend", "served"), [("tensorrt", True), ("tensorrt-rtx", False)])
def test_engines(tiny_model: Path, tmp_path: Path, schema: ModuleType, backend: str, served: bool) -> None:
    engine = tmp_path / "orin.engine"
    engine.write_bytes(b"an engine")
    engine_sidecar(engine, tiny_model, backend=backend, library_version="10.3.0.30", targets=["sm_87"])
    created = create_bundle(BundleRequest(tiny_model, tmp_path / "b", engines=(engine,), triton=Serving()))
    folder = tmp_path / "b/triton/tiny_orin_tensorrt"
    assert folder.is_dir() is served
    if served:
        config = read_config(folder, schema)
        assert config.backend == "tensorrt"
        assert [group.kind for group in config.instance_group] == [1]  # KIND_GPU
        assert created.manifest["models"][1]["path"] == "triton/tiny_orin_tensorrt/1/orin.engine"
    else:
        assert "no backend" in created.notes[0]


def test_tensor_names_of_any_kind_survive(schema: ModuleType) -> None:
    from google.protobuf import text_format

    name = 'a"b\\c\n\tdé/:0\x7f'
    text = model_config(
        "m",
        "onnxruntime",
        "m.onnx",
        [TensorSpec(name, "float16", ("batch",))],
        [TensorSpec("y", "bool", ())],
        Serving(),
    )
    config = text_format.Parse(text, schema.ModelConfig())
    assert config.input[0].name == name
    assert list(config.input[0].dims) == [-1]
    assert list(config.output[0].dims) == [1]
    assert not config.output[0].HasField("reshape")
    assert served_name("my model/ü.v2") == "my_model__.v2"
    assert served_name("...") == "model"


@pytest.mark.parametrize(
    ("inputs", "outputs", "batched"),
    [
        ([("batch", 4)], [("batch", 4)], True),
        ([("batch", 4), ("batch",)], [("batch", "seq")], True),
        ([("batch", 4)], [(1, 4)], False),
        ([("batch", 4)], [("seq", 4)], False),
        ([("?", 4)], [("?", 4)], False),
        ([(4, "batch")], [(4, "batch")], False),
        ([("batch", 4), ()], [("batch", 4)], False),
    ],
)
def test_batching_only_where_every_first_axis_is_the_same_open_one(inputs: Any, outputs: Any, batched: bool) -> None:
    specs = [[TensorSpec(f"t{i}", "float32", shape) for i, shape in enumerate(side)] for side in (inputs, outputs)]
    assert open_batch(*specs) is batched


def test_an_engine_of_a_step_file_leaves_the_position_to_the_client(schema: ModuleType) -> None:
    from google.protobuf import text_format

    cache = CacheRecord(input="c", output="next_c", shape=[1, 2], dtype="float16", fill=0.5)
    step = StepRecord(
        mode="step", chunk=1, token_input="tokens", logits_output="logits", caches=[cache], in_place=False
    )
    inputs = [
        TensorSpec("tokens", "int64", (1, 1)),
        TensorSpec("position", "int64", (1,)),
        TensorSpec("c", "float16", (1, 2)),
    ]
    outputs = [TensorSpec("logits", "float32", (1, 1, 9)), TensorSpec("next_c", "float16", (1, 2))]
    text = model_config("m", "tensorrt", "m.engine", inputs, outputs, Serving(), step)
    config = text_format.Parse(text, schema.ModelConfig())
    assert [tensor.name for tensor in config.input] == ["tokens", "position"]
    assert [state.input_name for state in config.sequence_batching.state] == ["c"]
    assert config.sequence_batching.state[0].initial_state[0].data_file == "cache_0"


def test_served_copy_is_not_needed_to_verify(step_model: Path, tmp_path: Path) -> None:
    """Deleting the repository's own files is noticed all the same: they are listed."""
    create_bundle(BundleRequest(step_model, tmp_path / "b", triton=Serving()))
    shutil.rmtree(tmp_path / "b/triton/model_step/initial_state")
    with pytest.raises(Exception, match="is missing"):
        verify_bundle(tmp_path / "b")
