"""Step sessions on engines: built for real; run on a stand-in for CUDA and TensorRT that computes with onnxruntime.

What TensorRT itself computes needs a GPU: the last test.
"""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.documents.engine_sidecar import read_engine_sidecar
from localattn.core.documents.sidecar import sidecar_path
from localattn.core.errors import MissingDependency, UsageError
from localattn.runtime.backends.tensorrt.device import find_device_or_none
from localattn.runtime.backends.tensorrt.library import open_library
from localattn.runtime.generation.generator import Generator
from localattn.runtime.generation.step_session import open_step

from ...conftest import Finished, save_upstream
from ...support.models import step_model
from ...support.models.engine_models import SMALL, needs_rtx
from ..simulators.engine_stand_in import AGE, CACHES, CHUNK, LOGITS, RING, VOCABULARY, Bench, as_engine

pytestmark = needs_rtx
no_gpu = pytest.mark.skipif(find_device_or_none() is not None, reason="this machine has a GPU")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    open_library("tensorrt-rtx")  # Polygraphy's modules hold on to the library they are imported for
    yield Bench(tmp_path, monkeypatch)
    gc.collect()  # sessions that an exception's traceback holds give their memory back to this GPU


def tokens_of(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCABULARY, (batch, length))


BOTH = {target: source for source, target in CACHES.items()}


@pytest.mark.parametrize("aliases", [None, {}, BOTH, {"next_age": "age"}], ids=["old", "none", "all", "one"])
@pytest.mark.parametrize(("batch", "chunk"), [(1, 4), (3, 5), (2, 1)])
def test_logits_are_those_of_the_formula_however_tokens_come(
    bench: Bench, aliases: dict[str, str] | None, batch: int, chunk: int
) -> None:
    bench.aliases = aliases
    generator = Generator.open(bench.write(batch=batch, chunk=chunk))
    assert (generator.session.backend, generator.session.provider) == ("tensorrt-rtx", "cuda")
    tokens = tokens_of(batch, 29)
    step_model.check_logits(generator, tokens, VOCABULARY, ([29], [1] * 29, [13, 1, 1, 4, 7, 3]))


def test_only_tokens_and_position_go_up_and_only_logits_come_down(bench: Bench) -> None:
    generator = Generator.open(bench.write())
    generator.reset()
    bench.gpu.copies.clear()
    generator.prefill(tokens_of(1, 2 * CHUNK + 1))
    a_chunk = [("up", 8 * CHUNK), ("up", 8), ("down", CHUNK * LOGITS)]
    a_step = [("up", 8), ("up", 8), ("down", LOGITS)]
    assert bench.gpu.copies == [*a_chunk, *a_chunk, *a_step]
    allocated = set(bench.gpu.memory)
    bench.gpu.copies.clear()
    for token in range(20):
        generator.step(token)
    assert bench.gpu.copies == 20 * a_step
    assert set(bench.gpu.memory) == allocated, "a call allocates nothing"
    bench.gpu.copies.clear()
    generator.reset()
    assert bench.gpu.copies == [("up", RING), ("up", AGE)]


def test_two_buffers_of_a_cache_take_turns_across_both_engines(bench: Bench) -> None:
    generator = Generator.open(bench.write())
    generator.prefill(tokens_of(1, 2 * CHUNK + 3))
    assert list(bench.engines) == ["model_step.engine", "model_step.prefill.engine"]
    calls = bench.gpu.calls
    assert len(calls) == 5
    for source, target in CACHES.items():
        assert all(call[source] != call[target] for call in calls)
        assert all(now[target] == after[source] for now, after in itertools.pairwise(calls))
        assert len({call[source] for call in calls}) == 2


def test_one_buffer_serves_where_the_engine_says_so(bench: Bench) -> None:
    """The step engine writes a cache where it reads it, the prefill engine does not: they still share it."""
    bench.aliases = BOTH
    generator = Generator.open(bench.write())
    generator.step(1)
    bench.aliases = {}
    tokens = tokens_of(1, CHUNK + 2)
    generator.prefill(tokens)
    expected = step_model.expected_logits(np.concatenate([[[1]], tokens], axis=1), VOCABULARY)
    np.testing.assert_allclose(generator.logits, expected[:, -1], rtol=1e-5, atol=1e-5)
    one, chunk, *steps = bench.gpu.calls
    assert one["ring"] == one["next_ring"] == chunk["ring"] != chunk["next_ring"]
    assert [call["ring"] for call in steps] == [chunk["next_ring"]] * 2


def test_a_call_that_does_not_start_consumes_nothing(bench: Bench) -> None:
    generator = Generator.open(bench.write())
    tokens = tokens_of(1, CHUNK + 2)
    generator.prefill(tokens[:, :-1])
    engine = bench.engines["model_step.engine"]
    engine.starts = False
    bench.messages.errors.append("an older error")
    with pytest.raises(UsageError, match=f"did not run at position {CHUNK + 1}") as caught:
        generator.step(tokens[:, -1])
    assert caught.value.why == "TensorRT did not start it." and generator.position == CHUNK + 1
    engine.starts = True
    expected = step_model.expected_logits(tokens, VOCABULARY)
    np.testing.assert_allclose(generator.step(tokens[:, -1]), expected[:, -1], rtol=1e-5, atol=1e-5)


def test_memory_is_given_back(bench: Bench) -> None:
    session: Any = open_step(bench.write())
    session.consume({"tokens": tokens_of(1, CHUNK + 1)})
    assert bench.gpu.memory and bench.gpu.streams == 1
    session.close()
    session.close()
    assert not bench.gpu.memory and bench.gpu.streams == 0
    session = open_step(bench.path)
    del session
    assert not bench.gpu.memory and bench.gpu.streams == 0


@pytest.mark.parametrize("room", range(7))
def test_too_little_memory_is_told(bench: Bench, room: int) -> None:
    """Two caches of two buffers, tokens, position, logits."""
    bench.write()
    bench.gpu.room = room
    with pytest.raises(MissingDependency, match="does not start on Orin") as caught:
        open_step(bench.path)
    assert caught.value.why == "CUDA Error: 2" and "`workspace`" in (caught.value.fix or "")
    del caught
    bench.gpu.room = 7
    assert open_step(bench.path).position == 0


def test_a_prefill_engine_without_memory_leaves_nothing_behind(bench: Bench) -> None:
    """It is opened again with every prompt: each time it would keep an execution context."""
    generator = Generator.open(bench.write())
    tokens, room = tokens_of(1, CHUNK + 1), bench.gpu.room
    bench.gpu.room = 1  # for one of tokens, position and logits
    for _ in range(2):
        with pytest.raises(MissingDependency, match="does not start on Orin"):
            generator.prefill(tokens)
        assert not bench.engines["model_step.prefill.engine"].contexts
    bench.gpu.room = room
    expected = step_model.expected_logits(tokens, VOCABULARY)
    np.testing.assert_allclose(generator.prefill(tokens), expected[:, -1], rtol=1e-5, atol=1e-5)


def test_without_its_prefill_engine_it_reads_token_by_token(bench: Bench) -> None:
    bench.write()
    bench.path.with_name("model_step.prefill.engine").unlink()
    generator = Generator.open(bench.path)
    assert generator.session.missing_prefill == "model_step.prefill.engine" and generator.session.chunks == (1,)
    tokens = tokens_of(1, 9)
    expected = step_model.expected_logits(tokens, VOCABULARY)
    np.testing.assert_allclose(generator.prefill(tokens), expected[:, -1], rtol=1e-5, atol=1e-5)


def test_positions_end(bench: Bench) -> None:
    """An engine has no error of its own past the last position: nothing may reach it."""
    generator = Generator.open(bench.write(max_positions=10))
    generator.prefill(tokens_of(1, 10))
    calls = len(bench.gpu.calls)
    with pytest.raises(UsageError, match="no position 11"):
        generator.step(1)
    assert len(bench.gpu.calls) == calls


def test_engines_that_do_not_belong_together_are_refused(bench: Bench, tmp_path: Path) -> None:
    path = bench.write()
    (tmp_path / "other").mkdir()
    other = as_engine(step_model.write(tmp_path / "other", vocabulary=VOCABULARY, batch=2))
    prefill = as_engine(other.with_name("model_step.prefill.onnx"))
    for file in (prefill, sidecar_path(prefill)):
        shutil.copy(file, tmp_path)
    with pytest.raises(UsageError, match=r"prefill\.engine does not belong to model_step\.engine"):
        open_step(path)


@pytest.mark.parametrize(
    ("aliases", "location"), [({"next_ring": "age"}, "DEVICE"), ({"next_age": "ring"}, "DEVICE"), ({}, "HOST")]
)
def test_engines_that_keep_tensors_elsewhere_are_refused(bench: Bench, aliases: dict[str, str], location: str) -> None:
    bench.aliases, bench.location = aliases, location
    with pytest.raises(UsageError, match="cannot be run here" if location == "HOST" else "cannot be stepped"):
        open_step(bench.write())


def test_what_cannot_be_stepped_is_refused_before_the_gpu_is_looked_for(bench: Bench) -> None:
    path = bench.write()
    with pytest.raises(UsageError, match="is a prefill file"):
        open_step(path.with_name("model_step.prefill.engine"))
    with pytest.raises(UsageError, match="cannot run on 'cpu'"):
        open_step(path, "cpu")
    with pytest.raises(UsageError, match="takes no number of threads"):
        open_step(path, threads=2)
    sidecar = read_engine_sidecar(path)
    assert sidecar.model is not None
    full = sidecar.model.model_copy(update={"step": None})
    for model, why in ((None, "without the sidecar"), (full, "whole sequences")):
        sidecar_path(path).write_text(sidecar.model_copy(update={"model": model}).to_json())
        with pytest.raises(UsageError) as caught:
            open_step(path)
        assert why in caught.value.why
        assert "--mode step" in caught.value.fix and "localattn build model_step.onnx" in caught.value.fix
    changed = [spec for spec in sidecar.inputs if spec.name != "age"]
    sidecar_path(path).write_text(sidecar.model_copy(update={"inputs": changed}).to_json())
    with pytest.raises(UsageError, match="not the file that its sidecar describes"):
        open_step(path)
    assert not bench.gpu.calls


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step file of a LocalTransformer with its prefill file."""
    from localattn.exporter.export import ExportRequest

    from ...support.steps import export_steps

    folder = tmp_path_factory.mktemp("step")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", SMALL, "small.pt")
    export_steps(ExportRequest(checkpoint, folder / "model_step.onnx"), "step", 8)
    return folder / "model_step.onnx"


@pytest.fixture
def built(exported: Path, tmp_path: Path, localattn: Callable[..., Finished]) -> Path:
    """The step engine of a copy of these files, and its prefill engine."""
    for file in exported.parent.iterdir():
        shutil.copy(file, tmp_path)
    for name in ("model_step.onnx", "model_step.prefill.onnx"):
        finished = localattn("build", tmp_path / name, "--backend", "tensorrt-rtx", "--plugin", "none")
        assert finished.code == 0, finished.err
    return tmp_path / "model_step.engine"


def test_both_files_are_built_and_no_input_is_wanted_in_host_memory(built: Path) -> None:
    """`position` chooses slots and rotations; did it choose shapes, TensorRT would want it in host memory."""
    from localattn.runtime.backends.step_file import check_caches
    from localattn.runtime.backends.tensorrt.builder.network import parse
    from localattn.runtime.backends.tensorrt.builder.source import read_source
    from localattn.runtime.generation.step_session import find_prefill

    sidecar = read_engine_sidecar(built)
    assert sidecar.model is not None and sidecar.model.step is not None
    check_caches(sidecar, sidecar.model.step, built)
    found = find_prefill(built, sidecar.model)
    assert found is not None and found[0] == built.with_name("model_step.prefill.engine") and found[1].chunk == 8
    for name in ("model_step.onnx", "model_step.prefill.onnx"):
        network = parse(open_library("tensorrt-rtx"), read_source(built.with_name(name)), "none", []).definition
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        assert {"tokens", "position"} < {tensor.name for tensor in inputs}
        assert not any(tensor.is_shape_tensor for tensor in inputs)


@no_gpu
def test_without_a_driver_nothing_is_generated(built: Path, localattn: Callable[..., Finished]) -> None:
    finished = localattn("generate", built, "--prompt-ids", "1,2,3")
    assert (finished.code, finished.out) == (3, "")
    assert "No NVIDIA driver is installed" in finished.err
    refused = localattn("generate", built, "--prompt-ids", "1,2,3", "--provider", "cpu")
    assert refused.code == 2 and "runs on the GPU" in refused.err


@pytest.mark.skipif(find_device_or_none() is None, reason="no GPU: engines cannot run")
def test_engine_and_onnx_file_give_the_same_logits(built: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, SMALL["num_tokens"], (1, 61))
    onnx, engine = Generator.open(built.with_suffix(".onnx"), "cpu"), Generator.open(built)
    for _ in range(2):  # the second time after a reset
        for start, stop in [(0, 19), (19, 20), (20, 44), *((i, i + 1) for i in range(44, 61))]:
            expected = onnx.prefill(tokens[:, start:stop])
            np.testing.assert_allclose(engine.prefill(tokens[:, start:stop]), expected, rtol=1e-4, atol=1e-4)
        onnx.reset()
        engine.reset()
