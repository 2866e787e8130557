"""Step and chunk files at any position, in 64-bit integers and in 32: onnxruntime and OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
from numpy.typing import NDArray

from localattn.core.errors import UsageError
from localattn.core.limits import LARGEST_SIZE
from localattn.exporter.export import ExportReport, ExportRequest, export
from localattn.exporter.jobs.steps import open_steps
from localattn.exporter.options import ShapeRequest
from localattn.runtime import load
from localattn.runtime.generation.step_session import open_step

from ..conftest import TINY, save_upstream

Arrays = dict[str, NDArray[Any]]
Run = Callable[[Mapping[str, NDArray[Any]]], Arrays]
LENGTH, CHUNK = 48, 8
# The longest that a test reaches in a model of learned positions.
LEARNED = 100_000 + LENGTH
ENDLESS = {"num_tokens": None, "max_seq_len": None, "use_xpos": True}


def in_onnxruntime(path: Path) -> Run:
    return load(path, provider="cpu").run


def in_openvino(path: Path) -> Run:
    """OpenVINO computes int64 in 32 bits, divides in fp32, takes no functions, and may compute in bf16 if not told."""
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    plain = onnx.inliner.inline_local_functions(onnx.load(path))
    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(plain.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    names = [x.name for x in plain.graph.output]
    return lambda inputs: {name: compiled(dict(inputs))[name] for name in names}


@pytest.fixture(scope="module", params=["learned positions", "endless"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[ExportReport], Any]:
    """Step and chunk file, and the model they were exported from."""
    options = ENDLESS if request.param == "endless" else {"max_seq_len": LEARNED}
    checkpoint = save_upstream(tmp_path_factory.mktemp("far"), "local_attention.LocalTransformer", TINY | options)
    asked = ExportRequest(checkpoint, checkpoint.with_name("m_step.onnx"), mode="step", chunk=CHUNK)
    _, files = open_steps(asked)
    report = export(asked)
    assert report.prefill is not None
    return [report, report.prefill], next(iter(files.values())).source


def reference(source: Any, first: int, data: Arrays) -> NDArray[np.float64]:
    """The model on tokens from position `first` on: only learned positions tell where that is."""
    state, args = dict(source.state), source.args
    if "pos_emb.weight" in state:
        state["pos_emb.weight"] = state["pos_emb.weight"][first : first + LENGTH]
        args = args.model_copy(update={"max_seq_len": LENGTH})
    there = type(source)(source.class_name, args, state, source.mixes_residuals, ShapeRequest(LENGTH))
    return next(iter(there.reference(data).values()))


@pytest.mark.parametrize("open_file", [in_onnxruntime, in_openvino])
def test_every_position_is_that_of_the_reference(exported: tuple[list[ExportReport], Any], open_file: Any) -> None:
    """Chunks and single tokens, from several positions on; the last ones cross the highest digit, and end all."""
    (step, prefill), source = exported
    record = step.sidecar.step
    assert record is not None
    runs = {1: open_file(step.path), CHUNK: open_file(prefill.path)}
    rng, endless = np.random.default_rng(0), source.args.num_tokens is None
    tokens = rng.standard_normal((1, LENGTH, 16)).astype(np.float32) if endless else rng.integers(0, 23, (1, LENGTH))
    name = record.token_input
    calls = [CHUNK] * (LENGTH // 2 // CHUNK) + [1] * (LENGTH // 2)
    for first in (0, 1000, 100_000, *((10**9, 59 * 2**24 - LENGTH // 2, LARGEST_SIZE - LENGTH) if endless else ())):
        held = {cache.input: np.full(cache.shape, cache.fill, cache.dtype) for cache in record.caches}
        outputs, done = [], 0
        for size in calls:
            given = {name: tokens[:, done : done + size], "position": np.array([first + done])}
            out = runs[size]({**given, **held})
            outputs.append(out[record.logits_output].copy())
            held = {cache.input: out[cache.output].copy() for cache in record.caches}
            done += size
        # Before, a ring that began in the middle still holds no keys where the window has some.
        settled = 0 if first == 0 else 2 * record.caches[0].shape[2]
        expected = reference(source, first, {name: tokens})
        got = np.concatenate(outputs, axis=1)
        np.testing.assert_allclose(got[:, settled:], expected[:, settled:], atol=1e-4, rtol=1e-4, err_msg=str(first))


def test_no_cosine_is_left_to_the_runtime(exported: tuple[list[ExportReport], Any]) -> None:
    """A GPU's may be off by 2⁻¹¹; and the tables lie in the file of weights, once for both graphs and all layers."""
    reports, _ = exported
    tables = []
    for report in reports:
        model = onnx.inliner.inline_local_functions(onnx.load(report.path, load_external_data=False))
        assert not {"Cos", "Sin"} & {node.op_type for node in model.graph.node}
        large = [x for x in model.graph.initializer if "rel_pos" in x.name and np.prod(x.dims) > 1000]
        assert large and all(x.data_location == onnx.TensorProto.EXTERNAL for x in large)
        tables.append({(entry.value, *x.dims) for x in large for entry in x.external_data if entry.key == "offset"})
    assert tables[0] == tables[1]


def test_the_last_position_is_the_last(exported: tuple[list[ExportReport], Any]) -> None:
    """A session says so before, and the file itself finds no row of its table."""
    (step, _), source = exported
    session = open_step(step.path, "cpu", 1)
    endless = source.args.num_tokens is None
    last = LARGEST_SIZE if endless else LEARNED
    assert session.max_positions == last
    token = np.zeros((1, 1, 16), np.float32) if endless else np.zeros((1, 1), np.int64)
    session.position = last - 1
    session.advance({session.record.token_input: token})
    with pytest.raises(UsageError, match="the largest number in 32 bits" if endless else "exported for 100048"):
        session.advance({session.record.token_input: token})
    session.reset()
    session.advance({session.record.token_input: token})
    held = {cache.input: np.zeros(cache.shape, cache.dtype) for cache in session.record.caches}
    position = np.array([2**31 + 2**24 if endless else last])
    with pytest.raises(UsageError, match="Gather"):
        load(step.path, provider="cpu").run({session.record.token_input: token, "position": position, **held})
