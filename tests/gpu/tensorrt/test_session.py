"""The session of an engine, on a stand-in for CUDA and TensorRT. What TensorRT itself computes needs a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.documents.engine_sidecar import ProfileRecord
from localattn.core.errors import MissingDependency, UsageError
from localattn.runtime.backends.tensorrt.library import open_library
from localattn.runtime.backends.tensorrt.session import EngineSession
from localattn.runtime.session import load

from ...support.models.engine_models import needs_rtx
from ..simulators.engine_stand_in import Bench, Context, Engine, doubling_engine

pytestmark = needs_rtx


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    open_library("tensorrt-rtx")  # Polygraphy's modules hold on to the library they are imported for
    yield Bench(tmp_path, monkeypatch)
    gc.collect()


def opened(folder: Path, shape: tuple[int | str, ...] = (2, 3), provider: str = "auto") -> EngineSession:
    session = load(doubling_engine(folder, shape=shape), provider)
    assert isinstance(session, EngineSession)
    return session


def inputs(start: float = 0, shape: tuple[int, ...] = (2, 3)) -> dict[str, Any]:
    x = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
    return {"x": x, "flag": x % 3 != 1}


def expected(given: dict[str, Any]) -> np.ndarray:
    return np.where(given["flag"], 2 * given["x"] + 1, np.float32(0))


def test_results_outlive_the_next_run(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path)
    first, second = session.run(inputs()), session.run(inputs(10))
    np.testing.assert_array_equal(first["y"], expected(inputs()))
    np.testing.assert_array_equal(second["y"], expected(inputs(10)))
    assert (session.backend, session.provider, session.device.name) == ("tensorrt-rtx", "cuda", "Orin")


def test_places_in_gpu_memory_are_kept(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path)
    session.run(inputs())
    allocated = set(bench.gpu.memory)
    bench.gpu.copies.clear()
    session.run(inputs(1))
    assert set(bench.gpu.memory) == allocated and len(allocated) == 3
    assert bench.gpu.copies == [("up", 24), ("up", 6), ("down", 24)]


def test_inputs_are_checked_by_the_sidecar(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path)
    with pytest.raises(UsageError, match="does not fit"):
        session.run(inputs(shape=(2, 4)))


def test_dynamic_sizes_grow_and_shrink(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path, ("batch", "n"))
    for shape in ((1, 3), (4, 50), (2, 2), (3, 0), (4, 50)):
        given = inputs(shape=shape)
        np.testing.assert_array_equal(session.run(given)["y"], expected(given))
    assert len(bench.gpu.memory) == 3, "places that were too small are freed"


def test_errors_say_what_the_library_logged(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(tmp_path)
    engine = bench.engines["model.engine"]
    engine.starts = False
    with pytest.raises(UsageError) as caught:
        session.run(inputs())
    assert caught.value.why == "TensorRT did not start it."
    engine.starts = True
    np.testing.assert_array_equal(session.run(inputs())["y"], expected(inputs()))
    bench.gpu.room, room = 0, bench.gpu.room
    with pytest.raises(UsageError, match="did not run") as caught:
        opened(tmp_path).run(inputs())
    assert caught.value.why == "CUDA Error: 2"
    bench.gpu.room = room
    monkeypatch.setattr(type(bench.messages), "clear", lambda self: None)
    bench.messages.errors.append("out of memory\nmore")
    monkeypatch.setattr(Engine, "create_execution_context", lambda self: None)
    with pytest.raises(MissingDependency, match="does not start on Orin") as missing:
        opened(tmp_path)
    assert missing.value.why == "out of memory"


def test_it_is_closed_with_the_session(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path)
    session.run(inputs())
    session.close()
    session.close()
    assert not bench.gpu.memory and bench.gpu.streams == 0
    session = opened(tmp_path)
    session.run(inputs())
    del session
    assert not bench.gpu.memory and bench.gpu.streams == 0


def test_an_engine_that_wants_tensors_elsewhere_is_refused(bench: Bench, tmp_path: Path) -> None:
    bench.location = "HOST"
    with pytest.raises(UsageError, match="elsewhere than in GPU memory"):
        opened(tmp_path)


def test_a_session_takes_the_profile_that_fits(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path, (1, "n"))
    ranges = [(1, 8, 64), (1, 4, 8), (65, 128, 256)]
    session.sidecar.options.profiles = [
        ProfileRecord(profile=number, input="x", min=(1, low), opt=(1, opt), max=(1, high))
        for number, (low, opt, high) in enumerate(ranges)
    ]
    for length in (16, 3, 5, 100, 9):
        given = inputs(shape=(1, length))
        np.testing.assert_array_equal(session.run(given)["y"], expected(given))
    (context,) = bench.engines["model.engine"].contexts
    assert isinstance(context, Context) and context.profiles == [1, 2, 0], "the narrowest; nothing where it is set"
    with pytest.raises(UsageError, match="none of its 3 profiles"):
        session.run(inputs(shape=(1, 300)))


def test_a_session_on_another_gpu_sets_it_in_every_thread(bench: Bench, tmp_path: Path) -> None:
    session = opened(tmp_path, provider="cuda:1")
    assert session.provider == "cuda:1"
    bench.gpu.handle.devices.clear()
    thread = threading.Thread(target=session.run, args=(inputs(),))
    thread.start()
    thread.join()
    assert bench.gpu.handle.devices == [1]
