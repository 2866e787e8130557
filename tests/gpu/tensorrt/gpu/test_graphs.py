"""CUDA graphs of engines, on a stand-in that refuses what NVIDIA's documentation calls undefined."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from localattn.core.errors import UsageError
from localattn.runtime.backends.tensorrt.library import open_library
from localattn.runtime.bench.worker import Worker
from localattn.runtime.generation.generator import Generator
from localattn.runtime.session import load

from ....conftest import Finished
from ....support.models import step_model
from ....support.models.engine_models import needs_rtx
from ...simulators.engine_stand_in import CHUNK, VOCABULARY, Bench, Context, doubling_engine
from ..test_session import expected, inputs, opened

pytestmark = needs_rtx


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    open_library("tensorrt-rtx")
    yield Bench(tmp_path, monkeypatch)
    gc.collect()


def test_the_third_call_of_a_shape_is_a_graph(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path, ("batch", "n"))
    session.use_cuda_graph()
    launches = []
    for call, shape in enumerate([(4, 2), (4, 2), (4, 2), (2, 3), (4, 2), (2, 3), (2, 3), (4, 2)]):
        given = inputs(call, shape)
        np.testing.assert_array_equal(session.run(given)["y"], expected(given))
        launches.append(len(bench.gpu.handle.launches))
    assert launches == [0, 0, 1, 1, 2, 2, 3, 4]
    assert session.notes == ()
    assert bench.gpu.handle.alive == 2


def test_memory_of_contexts_is_shared_and_everything_is_freed(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path, ("batch", "n"))
    session.use_cuda_graph()
    for _ in range(3):
        for length in (8, 7, 6, 5, 4, 3):
            given = inputs(shape=(1, length))
            np.testing.assert_array_equal(session.run(given)["y"], expected(given))
    assert bench.gpu.handle.alive == 4, "the others were freed"
    assert len(bench.gpu.memory) == 4, "inputs, output, and one memory for all contexts"
    session.close()
    assert not bench.gpu.memory and bench.gpu.handle.alive == 0 and bench.gpu.streams == 0


def test_a_place_that_moved_is_recorded_anew(bench: Bench, tmp_path: Path) -> None:
    """Larger inputs get another place: graphs of the old one never match again."""
    session = opened(tmp_path, ("batch", "n"))
    session.use_cuda_graph()
    for shape in 3 * [(1, 3)] + [(5, 500)] + 3 * [(1, 3)]:
        given = inputs(1, shape)
        np.testing.assert_array_equal(session.run(given)["y"], expected(given))
    assert len(bench.gpu.handle.launches) == 2


@pytest.mark.parametrize(
    "function", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiateWithFlags"]
)
def test_without_a_graph_calls_run_as_before(
    bench: Bench, tmp_path: Path, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = opened(tmp_path)
    session.use_cuda_graph()
    bench.gpu.handle.fails[function] = 901
    with caplog.at_level(logging.WARNING, "localattn"):
        for call in range(5):
            np.testing.assert_array_equal(session.run(inputs(call))["y"], expected(inputs(call)))
    assert [record.getMessage() for record in caplog.records] == [f"CUDA graphs are not used: {_words(function)}"]
    assert session.notes == (f"CUDA graphs are not used: {_words(function)}",)
    assert not bench.gpu.handle.launches and not bench.gpu.handle.alive and bench.gpu.handle.last_error == 0


def _words(function: str) -> str:
    ended = function == "cudaStreamEndCapture"
    return "CUDA error 901 ended it." if ended else f"{function} returned CUDA error 901."


def test_too_little_memory_for_more_contexts(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path)
    session.use_cuda_graph()
    bench.engines["model.engine"].room = 0
    for call in range(4):
        np.testing.assert_array_equal(session.run(inputs(call))["y"], expected(inputs(call)))
    assert session.notes == ("CUDA graphs are not used: It makes no execution context.",)
    session = opened(tmp_path)
    bench.gpu.room = 0
    session.use_cuda_graph()
    assert session.notes == ("CUDA graphs are not used: CUDA Error: 2",)
    bench.gpu.room = 100
    np.testing.assert_array_equal(session.run(inputs())["y"], expected(inputs()))


def test_tensorrt_rtx_is_asked_whether_it_can(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "is_stream_capturable", lambda self, stream: False)
    session = opened(tmp_path)
    session.use_cuda_graph()
    for call in range(3):
        np.testing.assert_array_equal(session.run(inputs(call))["y"], expected(inputs(call)))
    assert "TensorRT-RTX says" in session.notes[0]


def test_a_bound_call_moves_nothing(bench: Bench, tmp_path: Path) -> None:
    """What `bench` times."""
    session = opened(tmp_path)
    session.use_cuda_graph()
    call = session.bound(inputs(4))
    bench.gpu.copies.clear()
    for _ in range(4):
        call()
    assert bench.gpu.copies == [] and len(bench.gpu.handle.launches) == 3
    np.testing.assert_array_equal(session.run(inputs(5))["y"], expected(inputs(5)))


@pytest.mark.parametrize("aliases", [{}, {"next_ring": "ring", "next_age": "age"}], ids=["two places", "one place"])
def test_steps_are_graphs_and_caches_stay(bench: Bench, aliases: dict[str, str]) -> None:
    bench.aliases = aliases
    generator = Generator.open(bench.write(max_positions=64))
    generator.session.use_cuda_graph()
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (1, 37))
    step_model.check_logits(generator, tokens, VOCABULARY, ([37], [1] * 37, [13, 1, 1, 4, 7, *[1] * 11]))
    assert bench.gpu.handle.alive == (2 if aliases else 4)
    bench.gpu.copies.clear()
    generator.reset()
    calls = len(bench.gpu.calls)
    generator.prefill(tokens[:, : 2 * CHUNK + 1])
    for token in range(8):
        generator.step(token)
    assert len(bench.gpu.calls) == calls, "all of them are launches"


def test_a_step_engine_on_another_gpu(bench: Bench) -> None:
    generator = Generator.open(bench.write(), "cuda:1")
    assert generator.session.provider == "cuda:1"
    bench.gpu.handle.devices.clear()
    generator.step(1)
    assert set(bench.gpu.handle.devices) == {1}


@pytest.mark.parametrize("fails", [False, True])
def test_bench_times_the_graph_alone(bench: Bench, tmp_path: Path, fails: bool) -> None:
    path = doubling_engine(tmp_path)
    np.savez(tmp_path / "in.npz", **inputs())
    if fails:
        bench.gpu.handle.fails["cudaStreamEndCapture"] = 901
    worker = Worker()
    worker.open(str(path), "auto", None, True, None)
    answer = worker.bind(str(tmp_path / "in.npz"), True, 0)
    assert (answer["bound"], answer["cuda_graph"]) == (True, not fails)
    bench.gpu.copies.clear()
    worker.turn(0, 7)
    assert bench.gpu.copies == [] and len(bench.gpu.handle.launches) == (0 if fails else 9)


def test_run_and_generate_record_graphs(bench: Bench, tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    finished = localattn("run", doubling_engine(tmp_path), "--cuda-graph", "--iterations", 5)
    assert finished.code == 0, finished.err
    assert len(bench.gpu.handle.launches) == 3
    bench.gpu.handle.fails["cudaStreamEndCapture"] = 901
    finished = localattn("run", tmp_path / "model.engine", "--cuda-graph", "--iterations", 5, "--force")
    assert "Note: CUDA graphs are not used: CUDA error 901 ended it." in finished.out
    bench.gpu.handle.fails.clear()
    before = len(bench.gpu.handle.launches)
    asked = ("--prompt-ids", "1,2,3", "--max-tokens", 12, "--cuda-graph", "--format", "json")
    texts = [localattn("generate", bench.write(), *asked[:-3], *rest) for rest in (asked[-3:], asked[-2:])]
    assert [text.code for text in texts] == [0, 0], texts[0].err
    assert len(bench.gpu.handle.launches) > before
    assert json.loads(texts[0].out)["tokens"] == json.loads(texts[1].out)["tokens"]


def test_other_sessions_say_that_they_cannot(bench: Bench, tmp_path: Path) -> None:
    opened(tmp_path)
    session = load(tmp_path / "model.onnx", "cpu")
    with pytest.raises(UsageError, match="A session of onnxruntime records no CUDA graphs"):
        session.use_cuda_graph()
    with pytest.raises(UsageError, match="takes no arrays in GPU memory"):
        session.run_on_gpu(inputs())
    with pytest.raises(UsageError, match="do not support CUDA graphs"):
        Generator.open(bench.write().with_suffix(".onnx"), "cpu").session.use_cuda_graph()
