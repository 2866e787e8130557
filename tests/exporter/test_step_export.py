"""Exporting step files: what is written, what is checked, what is refused, and that buffers may be shared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.documents.step_record import StepRecord
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.nodes.step import STEP_VARIANT_BY_OP_TYPE, StepVariant, ring_slots
from localattn.exporter.artifact.publish import prefill_output
from localattn.exporter.export import ExportReport, ExportRequest
from localattn.exporter.jobs.steps import open_steps
from localattn.exporter.lowering import step_function
from localattn.exporter.options import ShapeRequest
from localattn.runtime import load

from ..conftest import TINY, Finished, save_upstream
from ..support.models.opsets import when_run
from ..support.steps import export_steps

MHA = {"dim": 16, "window_size": 4, "dim_head": 8, "heads": 2, "causal": True}
ATTENTION = {"window_size": 4, "dim": 8, "causal": True}
TRANSFORMER = "local_attention.LocalTransformer"


def slow(*values: Any) -> Any:
    """A case for the large grid only: tracing takes seconds."""
    return pytest.param(*values, marks=pytest.mark.slow)


def steps(checkpoint: Path, chunk: int | None = None, mode: str = "step", **options: Any) -> list[ExportReport]:
    request = ExportRequest(checkpoint, checkpoint.with_name("m_step.onnx"), **options)
    return export_steps(request, mode, chunk)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[ExportReport]:
    """A step file with its prefill, of a model whose weights are larger than its graph."""
    folder = tmp_path_factory.mktemp("written")
    return steps(save_upstream(folder, TRANSFORMER, TINY | {"dim": 64, "num_tokens": 256}), 8)


def record_of(report: ExportReport) -> StepRecord:
    assert report.sidecar.step is not None
    return report.sidecar.step


def save_aft(folder: Path) -> Path:
    """A causal AFTLocal of 16 positions and windows of 3."""
    torch.manual_seed(0)
    state = {"pos_bias": torch.randn(16, 16)}
    for name in ("query", "key", "value", "output"):
        state |= {f"{name}.weight": torch.randn(6, 6) / math.sqrt(6), f"{name}.bias": torch.randn(6)}
    below = torch.ones(16, 16, dtype=torch.bool).tril(2)
    torch.save(state | {"local_mask": below & below.T}, folder / "aft.pt")
    kwargs = {"d_model": 6, "seq_len": 16, "local_window_size": 3}
    (folder / "aft.json").write_text(json.dumps({"class": "labml_nn.AFTLocal", "kwargs": kwargs}))
    return folder / "aft.pt"


@pytest.mark.parametrize(
    ("class_name", "kwargs", "shapes", "dtype"),
    [
        (TRANSFORMER, TINY, ShapeRequest(batch=2), "fp32"),
        slow(TRANSFORMER, TINY | {"use_xpos": True, "qk_rmsnorm": True}, ShapeRequest(), "fp32"),
        slow(TRANSFORMER, TINY | {"shared_qk": True, "num_residual_streams": 1}, ShapeRequest(), "fp16"),
        (TRANSFORMER, TINY | {"use_dynamic_pos_bias": True, "num_tokens": None}, ShapeRequest(batch=3), "fp32"),
        ("local_attention.LocalMHA", MHA | {"exact_windowsize": False}, ShapeRequest(attn_bias=True), "fp32"),
        slow("local_attention.LocalMHA", MHA | {"prenorm": True, "look_backward": 0}, ShapeRequest(), "fp32"),
        slow("local_attention.LocalAttention", ATTENTION, ShapeRequest(batch=2, heads=3), "fp32"),
        ("local_attention.LocalAttention", ATTENTION | {"use_xpos": True}, ShapeRequest(heads=2), "fp16"),
    ],
)
def test_every_class_passes_its_checks(
    tmp_path: Path, class_name: str, kwargs: dict[str, Any], shapes: ShapeRequest, dtype: str
) -> None:
    checkpoint = save_upstream(tmp_path, class_name, kwargs)
    step, prefill = steps(checkpoint, 6, shapes=shapes, dtype=dtype)
    names = ("onnx checker", "onnxruntime loads", "parity", "no wide integers")
    for report in (step, prefill):
        assert {check.name: check.status for check in report.sidecar.checks} == dict.fromkeys(
            (*names, *(("fp16 range",) if dtype == "fp16" else ())), "passed"
        )
        session = load(report.path, provider="cpu")
        assert session.inputs == report.sidecar.inputs
        assert session.outputs == report.sidecar.outputs
    assert (record_of(step).mode, record_of(step).chunk, record_of(step).in_place) == ("step", 1, True)
    assert (record_of(prefill).mode, record_of(prefill).chunk, record_of(prefill).in_place) == ("prefill", 6, False)
    assert record_of(step).prefill == "m_step.prefill.onnx"
    assert record_of(step).caches == record_of(prefill).caches
    window = step.sidecar.windows[0]
    assert window.op_type in STEP_VARIANT_BY_OP_TYPE
    geometry = {"LocalTransformer": "local_attn_window_size"}.get(class_name.split(".")[1], "window_size")
    assert window.window_size == kwargs[geometry]


def test_the_ring_holds_the_visible_keys_and_no_more(tmp_path: Path) -> None:
    for exact, slots in ((True, 2 * 4 + 1), (False, 3 * 4)):
        kwargs = MHA | {"exact_windowsize": exact, "look_backward": 2}
        folder = tmp_path / str(exact)
        folder.mkdir()
        step, *_ = steps(save_upstream(folder, "local_attention.LocalMHA", kwargs), 1)
        assert [x.shape for x in record_of(step).caches] == [[1, 2, slots, 8]] * 2


def test_aft_local(tmp_path: Path) -> None:
    checkpoint = save_aft(tmp_path)
    step, prefill = steps(checkpoint, shapes=ShapeRequest(batch=2, causal=True))
    assert [check.status for check in (*step.sidecar.checks, *prefill.sidecar.checks)] == ["passed"] * 8
    assert record_of(step).max_positions == 16 and record_of(step).sequence_axis == 0
    assert [x.shape for x in record_of(step).caches] == [[3, 2, 6], [3, 2, 6], [3, 2, 6]]


def test_weights_are_stored_once(written: list[ExportReport]) -> None:
    step, prefill = written
    folder = step.path.parent
    state = torch.load(folder / "model.pt", weights_only=True)
    weights = sum(x.numel() * 4 for x in state.values())
    assert step.sidecar.external_data == prefill.sidecar.external_data is not None
    data = folder / str(step.sidecar.external_data)
    assert weights * 0.9 < data.stat().st_size < weights + 4096 * len(state)
    assert step.path.stat().st_size + prefill.path.stat().st_size < 0.5 * weights
    assert {path.name for path in folder.iterdir()} == {
        *("model.pt", "model.json", data.name, "m_step.onnx", "m_step.onnx.json"),
        *("m_step.prefill.onnx", "m_step.prefill.onnx.json"),
    }


def test_a_single_file_holds_its_weights(tiny: Path) -> None:
    (prefill,) = steps(tiny, 5, mode="prefill")
    assert prefill.sidecar.external_data is None
    assert (record_of(prefill).mode, record_of(prefill).chunk) == ("prefill", 5)
    assert not prefill_output(prefill.path).exists()


def token_by_token(report: ExportReport, data: dict[str, NDArray[Any]], *, in_place: bool) -> NDArray[np.float32]:
    """Outputs of a step file; `in_place` each cache is one buffer, read and written."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(report.path), providers=["CPUExecutionProvider"])
    record, binding = record_of(report), session.io_binding()
    axis = record.sequence_axis
    held = {x.input: ort.OrtValue.ortvalue_from_numpy(np.full(x.shape, x.fill, x.dtype)) for x in record.caches}
    outputs = []
    for position in range(next(iter(data.values())).shape[axis]):
        for name, x in data.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(np.take(x, [position], axis)))
        binding.bind_cpu_input(record.position_input, np.array([position]))
        binding.bind_output(record.logits_output)
        following = {}
        for cache in record.caches:
            other = np.full(cache.shape, np.nan, cache.dtype)
            following[cache.input] = held[cache.input] if in_place else ort.OrtValue.ortvalue_from_numpy(other)
            binding.bind_ortvalue_input(cache.input, held[cache.input])
            binding.bind_ortvalue_output(cache.output, following[cache.input])
        session.run_with_iobinding(binding)
        outputs.append(binding.get_outputs()[0].numpy().copy())
        held = following
    return np.concatenate(outputs, axis=axis)


@pytest.mark.parametrize("kind", ["block-local", "exact xpos", "aft"])
def test_caches_may_be_updated_in_place(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    if kind == "aft":
        step, *_ = steps(save_aft(tmp_path), 1, shapes=ShapeRequest(batch=2, causal=True))
        data = {name: rng.standard_normal((16, 2, 6)).astype(np.float32) for name in ("query", "key", "value")}
    else:
        options = {"exact_windowsize": kind != "block-local", "use_xpos": "xpos" in kind}
        step, *_ = steps(save_upstream(tmp_path, TRANSFORMER, TINY | options), 1)
        data = {"tokens": rng.integers(0, 23, (1, 40))}
    expected = token_by_token(step, data, in_place=False)
    assert expected.shape[record_of(step).sequence_axis] == (16 if kind == "aft" else 40)
    np.testing.assert_array_equal(token_by_token(step, data, in_place=True), expected)


def test_positions_past_the_learned_ones_are_an_error(written: list[ExportReport]) -> None:
    step = written[0]
    record = record_of(step)
    assert record.max_positions == 64
    held = {x.input: np.full(x.shape, x.fill, x.dtype) for x in record.caches}
    session = load(step.path, provider="cpu")
    session.run({"tokens": np.zeros((1, 1), np.int64), "position": np.array([63]), **held})
    with pytest.raises(UsageError):
        session.run({"tokens": np.zeros((1, 1), np.int64), "position": np.array([64]), **held})


@pytest.mark.parametrize("first", [10**6, 59 * 2**24 - 24])
def test_far_positions_are_as_exact_as_near_ones(tmp_path: Path, first: int) -> None:
    """Without learned positions only distances count: once the ring holds real keys alone, nothing else shows."""
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA | {"use_xpos": True})
    step, prefill = steps(checkpoint, 8)
    _, files = open_steps(ExportRequest(checkpoint, tmp_path / "other.onnx", mode="step", chunk=8))
    single = next(iter(files.values()))
    x = np.random.default_rng(0).standard_normal((1, 48, 16)).astype(np.float32)
    expected = single.source.at(ShapeRequest(48)).reference({"x": x})["out"]
    held: Any = {cache.input: np.zeros(cache.shape, cache.dtype) for cache in record_of(step).caches}
    sessions = {1: load(step.path, provider="cpu"), 8: load(prefill.path, provider="cpu")}
    outputs = []
    for start, size in [*((i, 8) for i in range(0, 24, 8)), *((i, 1) for i in range(24, 48))]:
        position = np.array([first + start])
        out = sessions[size].run({"x": x[:, start : start + size], "position": position, **held})
        outputs.append(out["out"])
        held = {cache.input: out[cache.output] for cache in record_of(step).caches}
    settled = record_of(step).caches[0].shape[2]
    np.testing.assert_allclose(np.concatenate(outputs, axis=1)[:, settled:], expected[:, settled:], atol=1e-4)


def test_a_ring_that_never_fills_is_called_not_proven(tmp_path: Path) -> None:
    checkpoint = save_upstream(tmp_path, TRANSFORMER, TINY | {"local_attn_window_size": 64})
    (step,) = steps(checkpoint, 1)
    assert [check.status for check in step.sidecar.checks] == ["passed", "passed", "not proven", "passed"]


def test_a_failed_check_leaves_nothing(tiny: Path) -> None:
    before = set(tiny.parent.iterdir())
    with pytest.raises(CheckFailed, match="parity"):
        steps(tiny, 1, atol=0.0, rtol=0.0)
    assert set(tiny.parent.iterdir()) == before


def test_a_lost_key_fails_the_check(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that forgets to write: every token sees itself by what it leaves, so the check must see it."""
    body = step_function._body

    def forgetful(variant: StepVariant) -> Any:
        def forgets(op: Any, *inputs: Any) -> Any:
            output, _, values = body(variant)(op, *inputs)
            return output, op.Identity(inputs[3]), values

        return forgets

    monkeypatch.setattr(step_function, "_body", forgetful)
    with pytest.raises(CheckFailed, match="parity"):
        steps(tiny, 1)


@pytest.mark.parametrize("opset", [when_run(18), when_run(24)])
def test_opsets_and_no_function_body(tiny: Path, opset: int) -> None:
    (step,) = steps(tiny, 1, opset=opset, function_body=False)
    model = onnx.load(step.path)
    assert {body.domain for body in model.functions} == {"localattn.fused"}
    assert {x.version for x in model.opset_import if x.domain == ""} == {opset}
    nodes = [node for node in model.graph.node if node.domain == "localattn"]
    assert {node.op_type for node in nodes} == {"WindowedAttentionStep"} and len(nodes) == TINY["depth"]
    names = {attribute.name for attribute in nodes[0].attribute}
    assert {"plugin_namespace", "plugin_version", "scale", "window_size"} <= names


def test_no_tensor_grows_with_the_number_of_positions(written: list[ExportReport]) -> None:
    """Every size of the graph is a constant, and no tensor between the weights is larger than a ring."""
    step = written[0]
    model = onnx.shape_inference.infer_shapes(onnx.load(step.path))
    ring = 2 * ring_slots_of(step.sidecar.windows[0]) * TINY["dim_head"]
    widest = 4 * 64 * 4  # four streams; the feed-forward's middle layer is narrower
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        if value.name in weights:
            continue
        size = [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
        assert all(size) and math.prod(size) <= max(ring, widest), (value.name, size)


def ring_slots_of(window: Any) -> int:
    from localattn.core.geometry import WindowGeometry

    names = ("window_size", "look_backward", "look_forward", "causal", "exact_windowsize")
    return ring_slots(WindowGeometry(**{name: getattr(window, name) for name in names}))


@pytest.mark.parametrize(
    ("class_name", "kwargs", "options", "reason"),
    [
        (TRANSFORMER, TINY | {"causal": False}, (), "not causal"),
        ("local_attention.LocalMHA", MHA | {"causal": False}, (), "not causal"),
        ("local_attention.LocalAttention", ATTENTION | {"causal": False}, ("--heads", 2), "not causal"),
        (TRANSFORMER, TINY, ("--mask",), "--mask does not apply"),
        (TRANSFORMER, TINY, ("--seq-len", 32), "--seq-len does not apply"),
        (TRANSFORMER, TINY, ("--dynamic", "batch"), "--dynamic does not apply"),
        (TRANSFORMER, TINY, ("--chunk", 65), "beyond the model's 64 positions"),
        (TRANSFORMER, TINY, ("--chunk", 0), "--chunk is 0"),
        ("local_attention.LocalMHA", MHA | {"use_xpos": True, "xpos_scale_base": 1}, ("--chunk", 500), "xpos"),
    ],
)
def test_what_cannot_stream_is_refused(
    tmp_path: Path,
    localattn: Callable[..., Finished],
    class_name: str,
    kwargs: dict[str, Any],
    options: tuple[object, ...],
    reason: str,
) -> None:
    checkpoint = save_upstream(tmp_path, class_name, kwargs)
    finished = localattn("export", checkpoint, "--mode", "step", *options)
    assert finished.code == 2 and reason in finished.err
    assert not list(tmp_path.glob("*.onnx*"))


def test_aft_local_asks_for_causal(tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    finished = localattn("export", save_aft(tmp_path), "--mode", "step")
    assert finished.code == 2 and "--causal" in finished.err


def test_chunk_goes_with_a_step_mode(tiny: Path, localattn: Callable[..., Finished]) -> None:
    finished = localattn("export", tiny, "--chunk", 4)
    assert finished.code == 2 and "--mode step" in finished.err


def test_the_command(tiny: Path, localattn: Callable[..., Finished]) -> None:
    planned = localattn("export", tiny, "--mode", "step", "--dry-run")
    assert planned.code == 0 and "model_step.prefill.onnx" in planned.out
    assert not list(tiny.parent.glob("*.onnx*"))
    finished = localattn("export", tiny, "--mode", "step", "--chunk", 8, "--format", "json")
    document = json.loads(finished.out)
    assert finished.code == 0
    assert document["step"]["prefill"] == Path(document["prefill"]["model"]).name == "model_step.prefill.onnx"
    assert document["prefill"]["step"]["chunk"] == 8 and document["companion"] == document["prefill"]
    sidecar = read_sidecar(tiny.with_name("model_step.onnx"))
    assert sidecar is not None and sidecar.step is not None and sidecar.step.model_dump() == document["step"]
    again = localattn("export", tiny, "--mode", "step", "--chunk", 8)
    assert again.code == 2 and "--force" in again.err
    compared = localattn("parity", tiny.with_name("model_step.onnx"), "--against", tiny)
    assert compared.code == 0 and "equal within" in compared.out
    shown = localattn("inspect", tiny.with_name("model_step.onnx"))
    assert shown.code == 0 and "WindowedAttentionStep" in shown.out


def test_the_console_names_caches_in_one_line(tiny: Path, localattn: Callable[..., Finished]) -> None:
    shown = localattn("export", tiny, "--mode", "step", "--chunk", 1)
    assert shown.code == 0 and "64 positions" in shown.out
    assert "  caches  4 of " in shown.out and "key_cache" not in shown.out


def test_tensorrt_rtx_builds_both_files(written: list[ExportReport]) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    logger = trt.Logger(trt.Logger.ERROR)
    for report in written:
        builder = trt.Builder(logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger)
        assert parser.parse_from_file(str(report.path)), [parser.get_error(i).desc() for i in range(parser.num_errors)]
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM86, 0)
        assert builder.build_serialized_network(network, config) is not None
        assert [network.get_output(i).name for i in range(network.num_outputs)] == [
            spec.name for spec in report.sidecar.outputs
        ]
