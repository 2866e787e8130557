"""Attributes that were renamed answer under their former names, with a warning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localattn.core.documents.engine_sidecar import EngineSidecar
from localattn.exporter.export_report import ExportReport
from localattn.runtime.backends.engines import BuildReport
from localattn.runtime.backends.step_session import StepSession
from localattn.runtime.backends.tensorrt.session import EngineSession

SIDECAR = EngineSidecar.model_construct(library_version="1.7")
PREFILL = ExportReport(Path("m.prefill.onnx"), SimpleNamespace(), [])  # type: ignore[arg-type]
RENAMED: list[tuple[Any, str, str]] = [
    (ExportReport(Path("m.onnx"), SimpleNamespace(), [], prefill=PREFILL), "companion", "prefill"),  # type: ignore[arg-type]
    (BuildReport(Path("m.engine"), SIDECAR, []), "facts", "sidecar"),
]


@pytest.mark.parametrize(("instance", "former", "today"), RENAMED)
def test_a_report_answers_under_its_former_name(instance: Any, former: str, today: str) -> None:
    with pytest.warns(FutureWarning, match=f"{type(instance).__name__}.{former} is called {today} now"):
        assert getattr(instance, former) is getattr(instance, today) is not None


@pytest.mark.parametrize(("kind", "today"), [(StepSession, "record"), (EngineSession, "sidecar")])
def test_a_session_answers_under_its_former_name(kind: Any, today: str) -> None:
    session = object.__new__(type("Named", (kind,), dict.fromkeys(kind.__abstractmethods__)))
    setattr(session, today, SIDECAR)
    with pytest.warns(FutureWarning, match=f"facts is called {today} now"):
        assert session.facts is SIDECAR
