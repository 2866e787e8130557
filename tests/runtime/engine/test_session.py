"""The session of an engine, with a stand-in for the GPU: its runner. What the runner itself does needs a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from localattn.core.errors import MissingDependency, UsageError
from localattn.runtime.engine.library import Messages, open_library
from localattn.runtime.engine.open import OpenEngine
from localattn.runtime.engine.session import EngineSession

from ...support.models.engine_models import needs_rtx
from .test_facts import ORIN, written

pytestmark = needs_rtx


class Runner:
    """As Polygraphy's TrtRunner: every result is written into the same host memory."""

    fails: ClassVar[str] = ""

    def __init__(self, engine: Any) -> None:
        self.memory = np.zeros((1, 64, 23), np.float32)
        self.is_active = False

    def activate(self) -> None:
        self._fail("activate")
        self.is_active = True

    def deactivate(self) -> None:
        self.is_active = False

    def infer(self, feed_dict: dict[str, Any], check_inputs: bool) -> dict[str, Any]:
        self._fail("infer")
        self.memory[:] = feed_dict["tokens"].sum()
        return {"other": None, "logits": self.memory}

    def _fail(self, step: str) -> None:
        from polygraphy.exception import PolygraphyException

        if self.fails == step:
            raise PolygraphyException(f"cannot {step}")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenEngine:
    open_library("tensorrt-rtx")  # Polygraphy's modules hold on to the library they are imported for
    monkeypatch.setattr("polygraphy.backend.trt.TrtRunner", Runner)
    monkeypatch.setattr(Runner, "fails", "")
    _, facts = written(tmp_path)
    library: Any = SimpleNamespace(messages=Messages())
    return OpenEngine(facts, library, ORIN, engine=None)


def tokens(value: int) -> dict[str, Any]:
    return {"tokens": np.full((1, 64), value, np.int64)}


def test_results_outlive_the_next_run(opened: OpenEngine) -> None:
    session = EngineSession(opened, "model.engine")
    first, second = session.run(tokens(1)), session.run(tokens(2))
    assert first.keys() == {"logits"}
    assert (first["logits"] == 64).all() and (second["logits"] == 128).all()
    assert (session.backend, session.provider, session.device) == ("tensorrt-rtx", "cuda", ORIN)


def test_inputs_are_checked_by_the_facts(opened: OpenEngine) -> None:
    session = EngineSession(opened, "model.engine")
    with pytest.raises(UsageError, match="does not fit"):
        session.run({"tokens": np.zeros((1, 65), np.int64)})


def test_errors_say_what_the_library_logged(opened: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = EngineSession(opened, "model.engine")
    monkeypatch.setattr(Runner, "fails", "infer")
    with pytest.raises(UsageError) as caught:
        session.run(tokens(1))
    assert caught.value.why == "cannot infer"
    monkeypatch.setattr(Runner, "fails", "activate")
    opened.opened.messages.errors.append("out of memory\nmore")
    with pytest.raises(MissingDependency) as missing:
        EngineSession(opened, "model.engine")
    assert missing.value.why == "out of memory"


def test_it_is_closed_with_the_session(opened: OpenEngine) -> None:
    session = EngineSession(opened, "model.engine")
    runner = session._runner
    session.close()
    session.close()
    assert not runner.is_active
    other = EngineSession(opened, "model.engine")
    runner = other._runner
    del other
    assert not runner.is_active
