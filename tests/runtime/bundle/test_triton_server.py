"""What `bundle --triton` writes, loaded by a real Triton server: its answers are those of the file itself."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from localattn.core.tolerance import tolerance_for
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.triton import Serving

from ...conftest import TINY, Finished, save_upstream
from ...support.models.bundles import open_model, tiny_model  # noqa: F401
from ...support.models.step_model import expected_logits, write
from ...support.serving.client import Refused, infer, infer_by_grpc, protocol
from ...support.serving.triton import Running, serve

_V = 50  # tokens of the step file made by hand


@dataclass(frozen=True)
class Served:
    """The server, the bundles it serves, and where it writes how many requests it joined."""

    server: Running
    bundles: dict[str, Path]
    joined: Path

    @property
    def url(self) -> str:
        return self.server.url

    def sample(self, name: str, index: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        inputs, outputs = (
            dict(np.load(self.bundles[name] / f"samples/{name}.{index}.{side}.npz")) for side in ("inputs", "outputs")
        )
        return inputs, outputs

    def session(self, name: str) -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(self.bundles[name] / f"triton/{name}/1/{name}.onnx")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, open_model: Path) -> Iterator[Served]:
    """One server for this module, with a bundle of each kind."""
    folder = tmp_path_factory.mktemp("triton")
    joined = folder / "joined"
    joined.touch()
    half = folder / "half.onnx"
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", {**TINY, "depth": 1})
    export(ExportRequest(checkpoint, half, dtype="fp16", shapes=ShapeRequest(mask=True), checks="quick"))
    steps, rows = folder / "steps", folder / "rows"
    for place, batch in ((steps, 1), (rows, 3)):
        place.mkdir()
        write(place, vocabulary=_V, batch=batch, max_positions=40)
        for path in place.iterdir():
            path.rename(path.with_name(path.name.replace("model_step", place.name)))
        step = place / f"{place.name}.onnx"
        sidecar = json.loads(step.with_suffix(".onnx.json").read_text())
        sidecar["step"]["prefill"] = f"{place.name}.prefill.onnx"
        step.with_suffix(".onnx.json").write_text(json.dumps(sidecar))
        for model in place.glob("*.onnx"):
            _seal(model)
    bundles: dict[str, Path] = {}
    (folder / "bundles").mkdir()
    for path, count in (
        (tiny_model, 2),
        (open_model, 2),
        (half, 2),
        (_scalar(folder / "scalar.onnx"), 2),
        (_mixing(folder / "mixing.onnx"), 2),
        (_bf16(folder / "wide.onnx"), 0),
        (steps / "steps.onnx", 3),
        (rows / "rows.onnx", 3),
    ):
        bundles[path.stem] = folder / "bundles" / path.stem
        serving = Serving(sequences=3 if path.stem == "steps" else 16)
        given = sorted(folder.glob(f"{path.stem}.npz"))
        request = BundleRequest(path, bundles[path.stem], samples=count, load_inputs=tuple(given), triton=serving)
        create_bundle(request)
    repositories = [bundle / "triton" for bundle in bundles.values()] + [_impatient(steps, folder / "impatient")]
    with serve(
        repositories, folder, {"LOCALATTN_TEST_JOINED": str(joined), "LOCALATTN_TEST_HOLD": str(folder)}
    ) as server:
        yield Served(server, bundles, joined)


def _impatient(steps: Path, folder: Path) -> Path:
    """A repository whose one place is free again when its sequence was silent for a second, not a minute."""
    folder.mkdir()
    for path in steps.glob("steps*"):
        shutil.copy(path, folder / path.name.replace("steps", "idle"))
    sidecar = json.loads((folder / "idle.onnx.json").read_text())
    sidecar["step"]["prefill"] = "idle.prefill.onnx"
    (folder / "idle.onnx.json").write_text(json.dumps(sidecar))
    for model in folder.glob("*.onnx"):
        _seal(model)
    create_bundle(BundleRequest(folder / "idle.onnx", folder / "b", samples=1, triton=Serving(sequences=1)))
    repository = folder / "b/triton"
    for path, stated, wanted in (
        ("idle/config.pbtxt", "microseconds: 60000000", "microseconds: 1000000"),
        ("idle_stream/config.pbtxt", "microseconds: 60000000", "microseconds: 1000000"),
        ("idle_stream/1/stream.json", '"idle_seconds": 60', '"idle_seconds": 1'),
    ):
        text = (repository / path).read_text()
        assert text.count(stated) == 1
        (repository / path).write_text(text.replace(stated, wanted))
    return repository


def _seal(model: Path) -> None:
    from localattn.core.storage.files import sha256

    sidecar = model.with_suffix(".onnx.json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"model_sha256": sha256(model)}))


def _save(path: Path, nodes: list[onnx.NodeProto], inputs: list[object], outputs: list[object]) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def _scalar(path: Path) -> Path:
    """Squares, and their mean as a tensor without dimensions."""
    tensor = helper.make_tensor_value_info
    nodes = [helper.make_node("Mul", ["x", "x"], ["y"]), helper.make_node("ReduceMean", ["y"], ["mean"], keepdims=0)]
    outputs = [tensor("y", TensorProto.FLOAT, [2, 3]), tensor("mean", TensorProto.FLOAT, [])]
    return _save(path, nodes, [tensor("x", TensorProto.FLOAT, [2, 3])], outputs)


def _mixing(path: Path) -> Path:
    """Running sums along axis 0, which its author called batch: the time of a module [T, B, D]."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy")
    nodes = [
        helper.make_node("Constant", [], ["zero"], value_int=0),
        helper.make_node("CumSum", ["x", "zero"], ["y"]),
    ]
    np.savez(path.with_suffix(".npz"), x=np.random.default_rng(0).standard_normal((4, 3), np.float32))
    return _save(path, nodes, [x], [y])


def _bf16(path: Path) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [2, 3]) for name in "xy")
    weight = onnx.numpy_helper.from_array(np.ones((3, 3), np.float32), "w")
    nodes = [
        helper.make_node("Cast", ["w"], ["v"], to=TensorProto.BFLOAT16),
        helper.make_node("MatMul", ["x", "v"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def assert_within(actual: np.ndarray, expected: np.ndarray) -> None:
    """Within the tolerance that the proof of independent rows states for fp32."""
    limits = tolerance_for("fp32", None, None)
    np.testing.assert_allclose(actual, expected, atol=limits.atol, rtol=limits.rtol)


def test_a_file_of_whole_sequences_answers_exactly(served: Served) -> None:
    inputs, expected = served.sample("tiny")
    for answer in (infer(served.url, "tiny", inputs), _by_grpc(served, "tiny", inputs)):
        np.testing.assert_array_equal(answer["logits"], expected["logits"])


def _by_grpc(served: Served, model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    protocol()
    return infer_by_grpc(served.server.grpc, model, inputs)


def test_requests_that_were_joined_get_their_own_answers(served: Served) -> None:
    generator = np.random.default_rng(0)
    tokens = [generator.integers(0, 23, (1, 16)) for _ in range(48)]
    session = served.session("open")
    hold = served.joined.with_name("open.hold")
    hold.touch()
    with ThreadPoolExecutor(8) as pool:
        try:
            asked = [pool.submit(infer, served.url, "open", {"tokens": each}) for each in tokens]
            # Of the first eight one or two are being answered: the rest is in the queue.
            end = time.monotonic() + 60
            while served.server.waiting("open") < 4 and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            hold.unlink()
        answers = [each.result()["logits"] for each in asked]
    for each, answer in zip(tokens, answers, strict=True):
        (alone,) = session.run(["logits"], {"tokens": each})
        assert_within(answer, alone)
        # Bit for bit the file's own answer for a batch of some size, in some row of it.
        batches = (session.run(["logits"], {"tokens": np.repeat(each, count, 0)})[0] for count in range(1, 9))
        rows = {row.tobytes() for batch in batches for row in batch}
        assert answer.tobytes() in rows
    assert "open" in served.joined.read_text(), "the server joined no requests"


def test_half_precision_with_a_mask_over_grpc(served: Served) -> None:
    inputs, expected = served.sample("half", 1)
    assert inputs["mask"].dtype == np.bool_ and not inputs["mask"].all()
    answer = _by_grpc(served, "half", inputs)
    np.testing.assert_array_equal(answer["logits"], expected["logits"])


def test_a_scalar_arrives_as_one_element(served: Served) -> None:
    inputs, expected = served.sample("scalar")
    answer = infer(served.url, "scalar", inputs)
    assert expected["mean"].shape == () and answer["mean"].shape == (1,)
    np.testing.assert_array_equal(answer["mean"][0], expected["mean"])


def test_rows_that_interact_are_not_joined(served: Served) -> None:
    config = (served.bundles["mixing"] / "triton/mixing/config.pbtxt").read_text()
    assert "max_batch_size: 0" in config and "dynamic_batching" not in config
    assert "does not join requests" in (served.bundles["mixing"] / "README.md").read_text()
    inputs = {"x": np.random.default_rng(0).standard_normal((5, 3), np.float32)}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: infer(served.url, "mixing", inputs)["y"], range(24)))
    for answer in answers:
        np.testing.assert_allclose(answer, inputs["x"].cumsum(0), atol=1e-5)


def test_bf16_stays_away_from_a_server_without_a_gpu_and_the_others_are_served(served: Served) -> None:
    assert not served.server.ready("wide")
    assert "KIND_GPU" in (served.bundles["wide"] / "triton/wide/config.pbtxt").read_text()
    assert "GPUs only" in (served.bundles["wide"] / "README.md").read_text()
    assert served.server.ready("tiny") and served.server.ready("steps") and served.server.ready("steps_stream")


def test_two_sequences_interleaved_equal_each_alone(served: Served) -> None:
    tokens = np.random.default_rng(1).integers(0, _V, (2, 12))
    got: list[list[np.ndarray]] = [[], []]
    for t in range(12):
        for row in range(2):
            flags = {"sequence_id": 7 + row, "sequence_start": t == 0, "sequence_end": t == 11}
            answer = infer(served.url, "steps", {"tokens": tokens[row : row + 1, t : t + 1]}, **flags)
            got[row].append(answer["logits"])
    for row in range(2):  # one of the caches starts at -1: the server gave it its initial state
        expected = expected_logits(tokens[row : row + 1], _V)
        np.testing.assert_allclose(np.concatenate(got[row], 1), expected, atol=1e-5)
    with pytest.raises(Refused, match=r"START|start|correlation"):  # it ended: a call after the end is an error
        infer(served.url, "steps", {"tokens": tokens[:1, :1]}, sequence_id=7)


def test_two_sequences_over_grpc(served: Served) -> None:
    """The server's own states over gRPC, and between them the Python model's."""
    tokens = np.random.default_rng(6).integers(0, _V, (2, 8))
    protocol()
    got: list[list[np.ndarray]] = [[], []]
    for t in range(8):
        for row, model in enumerate(("steps", "steps_stream")):
            flags = {"sequence_id": 70 + row, "sequence_start": t == 0, "sequence_end": t == 7}
            one = {"tokens": tokens[row : row + 1, t : t + 1]}
            got[row].append(infer_by_grpc(served.server.grpc, model, one, **flags)["logits"])
    for row in range(2):
        np.testing.assert_allclose(np.concatenate(got[row], 1), expected_logits(tokens[row : row + 1], _V), atol=1e-5)


def test_a_silent_sequence_ends_and_makes_room(served: Served) -> None:
    token = {"tokens": np.array([[1]])}
    for model in ("idle", "idle_stream"):
        infer(served.url, model, token, sequence_id=1, sequence_start=True)
    for model in ("idle", "idle_stream"):  # the second sequence waits for the one place
        second = infer(served.url, model, token, sequence_id=2, sequence_start=True)
        np.testing.assert_allclose(second["logits"], expected_logits(token["tokens"], _V), atol=1e-5)
        with pytest.raises(Refused, match=r"START|start"):
            infer(served.url, model, token, sequence_id=1)
        infer(served.url, model, token, sequence_id=2, sequence_end=True)


@pytest.mark.parametrize("model", ["steps_stream", "rows_stream"])
def test_prompts_in_pieces_of_any_size(served: Served, model: str) -> None:
    tokens = np.random.default_rng(2).integers(0, _V, (1, 30))
    got, at = [], 0
    for size in (1, 13, 4, 12):
        flags = {"sequence_id": 21, "sequence_start": at == 0, "sequence_end": at + size == 30}
        got.append(infer(served.url, model, {"tokens": tokens[:, at : at + size]}, **flags)["logits"])
        assert got[-1].shape == (1, size, _V)
        at += size
    np.testing.assert_allclose(np.concatenate(got, 1), expected_logits(tokens, _V), atol=1e-5)


def test_sequences_at_one_position_share_a_call_and_keep_their_own_answers(served: Served) -> None:
    tokens = np.random.default_rng(3).integers(0, _V, (6, 20))

    def ask(row: int) -> np.ndarray:
        halves = [tokens[row : row + 1, :9], tokens[row : row + 1, 9:]]
        flags = [{"sequence_start": True}, {"sequence_end": True}]
        pairs = zip(halves, flags, strict=True)
        return np.concatenate(
            [infer(served.url, "rows_stream", {"tokens": x}, sequence_id=40 + row, **f)["logits"] for x, f in pairs], 1
        )

    with ThreadPoolExecutor(6) as pool:
        answers = np.concatenate(list(pool.map(ask, range(6))))
    np.testing.assert_allclose(answers, expected_logits(tokens, _V), atol=1e-5)


def test_the_model_goes_on_by_itself(served: Served) -> None:
    prompt = np.random.default_rng(4).integers(0, _V, (1, 7))
    tokens = prompt
    for _ in range(9):  # greedily, from the formula
        tokens = np.concatenate([tokens, expected_logits(tokens, _V)[:, -1:].argmax(-1)], 1)
    new = {"new_tokens": np.array([[6]], np.int32)}
    start = infer(served.url, "steps_stream", {"tokens": prompt, **new}, sequence_id=3, sequence_start=True)
    np.testing.assert_array_equal(start["generated"], tokens[:, 7:13])
    np.testing.assert_allclose(start["logits"], expected_logits(prompt, _V), atol=1e-5)
    more = {"tokens": start["generated"][:, -1:], "new_tokens": np.array([[3]], np.int32)}
    then = infer(served.url, "steps_stream", more, sequence_id=3, sequence_end=True)
    np.testing.assert_array_equal(then["generated"], tokens[:, 13:16])


def test_past_the_last_position_is_an_error_that_says_so_and_consumes_nothing(served: Served) -> None:
    tokens = np.random.default_rng(5).integers(0, _V, (1, 41))
    flags = {"sequence_id": 5}
    first = infer(served.url, "steps_stream", {"tokens": tokens[:, :38]}, sequence_start=True, **flags)
    with pytest.raises(Refused, match="The model has 40 positions: 38 are used, and this request needs 3 more"):
        infer(served.url, "steps_stream", {"tokens": tokens[:, 38:]}, **flags)
    with pytest.raises(Refused, match=r"outside 0 to 49"):
        infer(served.url, "steps_stream", {"tokens": np.array([[50]])}, **flags)
    rest = infer(served.url, "steps_stream", {"tokens": tokens[:, 38:40]}, sequence_end=True, **flags)
    logits = np.concatenate([first["logits"], rest["logits"]], 1)
    np.testing.assert_allclose(logits, expected_logits(tokens[:, :40], _V), atol=1e-5)


def test_one_sequence_too_many_waits_until_another_ends(served: Served) -> None:
    """`--max-sequences` is 3 for this model."""
    token = {"tokens": np.array([[1]])}
    for sequence in (61, 62, 63):
        infer(served.url, "steps_stream", token, sequence_id=sequence, sequence_start=True)
    with ThreadPoolExecutor(1) as pool:
        fourth = pool.submit(
            infer, served.url, "steps_stream", token, sequence_id=64, sequence_start=True, sequence_end=True
        )
        with pytest.raises(TimeoutError):
            fourth.result(1)
        for sequence in (61, 62, 63):
            infer(served.url, "steps_stream", token, sequence_id=sequence, sequence_end=True)
        np.testing.assert_allclose(fourth.result(20)["logits"], expected_logits(token["tokens"], _V), atol=1e-5)


def test_bundle_verify_asks_the_server(served: Served, localattn: Callable[..., Finished]) -> None:
    for name in ("tiny", "open", "half", "scalar", "mixing", "steps", "rows"):
        found = localattn("bundle", "verify", served.bundles[name], "--server", served.url, "--format", "json")
        assert found.code == 0, (name, found.out, found.err)
        rows = json.loads(found.out)["rows"]
        assert rows and all(row["passed"] for row in rows)
        models = {row["model"] for row in rows}
        assert models == ({name, f"{name}_stream"} if name in ("steps", "rows") else {name})
    other = served.bundles["steps"], "--server", served.url, "--model", "rows_stream"
    assert localattn("bundle", "verify", *other).code == 0  # the same weights
    wrong = served.bundles["scalar"], "--server", served.url, "--model", "mixing"
    assert localattn("bundle", "verify", *wrong).code == 1
    missing = served.bundles["tiny"], "--server", served.url, "--model", "nobody"
    assert localattn("bundle", "verify", *missing).code == 3
    silent = served.bundles["tiny"], "--server", "http://127.0.0.1:9"
    assert localattn("bundle", "verify", *silent).code == 3
    assert localattn("bundle", "verify", served.bundles["tiny"], "--server", "localhost").code == 2


def test_the_example_client(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("client", Path(__file__).parents[3] / "examples/serving/client.py")
    assert spec is not None and spec.loader is not None
    client = module_from_spec(spec)
    spec.loader.exec_module(client)
    prompt = [1, 2, 3]
    new = client.ask(served.url, "steps_stream", prompt, 5, sequence_id=9, sequence_start=True, sequence_end=True)
    tokens = np.array([prompt])
    for _ in range(5):
        tokens = np.concatenate([tokens, expected_logits(tokens, _V)[:, -1:].argmax(-1)], 1)
    assert new == tokens[0, 3:].tolist()


def test_the_server_warmed_up_with_the_sample(served: Served) -> None:
    config = json.load(urllib.request.urlopen(f"{served.url}/v2/models/open/config", timeout=60))
    (warmup,) = config["model_warmup"]
    assert warmup["inputs"]["tokens"]["input_data_file"] == "input_0"
    tokens = served.sample("open")[0]["tokens"]
    raw = (served.bundles["open"] / "triton/open/warmup/input_0").read_bytes()
    np.testing.assert_array_equal(np.frombuffer(raw, np.int64), tokens[0])


@pytest.mark.slow
def test_the_compiled_kernel_is_found_by_its_bare_name(tiny_model: Path, tmp_path: Path) -> None:
    from localattn.core.machine.processor import host_arch

    from ...support.native.cpu_build import library

    bundle = tmp_path / "b"
    create_bundle(BundleRequest(tiny_model, bundle, plugins=(Path(library()),), triton=Serving()))
    config = (bundle / "triton/tiny/config.pbtxt").read_text()
    assert 'op_library_filename: ["liblocalattn_onnxruntime.so"]' in config and "KIND_CPU" in config
    readme = (bundle / "README.md").read_text()
    assert f'export LD_LIBRARY_PATH="$PWD/kernels/{host_arch()}:$LD_LIBRARY_PATH"' in readme
    profile = tmp_path / "profile"
    profile.mkdir()
    settings = {"LD_LIBRARY_PATH": str(bundle / "kernels" / host_arch()), "LOCALATTN_TEST_PROFILE": str(profile)}
    inputs = dict(np.load(bundle / "samples/tiny.0.inputs.npz"))
    with serve([bundle / "triton"], tmp_path, settings) as server:
        answer = infer(server.url, "tiny", inputs)
    expected = np.load(bundle / "samples/tiny.0.outputs.npz")["logits"]
    np.testing.assert_allclose(answer["logits"], expected, atol=1e-4)
    (events,) = [json.loads(path.read_text()) for path in profile.iterdir()]
    assert "WindowedAttention" in {e["args"].get("op_name") for e in events if e.get("cat") == "Node"}
    (tmp_path / "without").mkdir()
    with serve([bundle / "triton"], tmp_path / "without") as server:  # not found: refused, and the server goes on
        assert not server.ready("tiny")


def test_the_manifests_serve_the_repository() -> None:
    yaml = pytest.importorskip("yaml")
    examples = Path(__file__).parents[3] / "examples/serving"
    (kserve,) = yaml.safe_load_all((examples / "kserve.yaml").read_text())
    model = kserve["spec"]["predictor"]["model"]
    assert model["modelFormat"] == {"name": "triton"} and model["protocolVersion"] == "v2"
    assert model["storageUri"].endswith("/triton")
    deployment, service = yaml.safe_load_all((examples / "triton.yaml").read_text())
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    (container,) = pod["spec"]["containers"]
    assert "--model-repository=/bundle/triton" in container["args"][0]
    assert container["volumeMounts"][0]["mountPath"] == "/bundle"
