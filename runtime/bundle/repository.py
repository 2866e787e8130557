"""Lay a bundle's models out as a model repository for Triton, which uses the bundle's own files without copies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .parts import EnginePart, ModelPart
from .triton import (
    NEXT_POSITION,
    Serving,
    initial_states,
    model_config,
    served_name,
    write_stateful,
)

if TYPE_CHECKING:
    from ...core.documents.step_facts import StepFacts

from ...core.tensors import TensorSpec


class Files(Protocol):
    """What a repository needs of the bundle that it is written into."""

    folder: Path

    def add(self, path: str, content: bytes, role: str) -> None:
        """Write a file with generated content."""


class Repository:
    """The folder `triton` of a bundle.

    Args:
        files: the bundle.
        serving: batching, instances, sequences.
        part: the model that is served.
        name: the bundle's name, from which the served models take theirs.

    Attributes:
        home: the folder of the bundle's ONNX files: the version folder of the served model.
        served: folders of the repository.
        notes: what cannot be served, and why.
    """

    def __init__(self, files: Files, serving: Serving, part: ModelPart, name: str) -> None:
        self._files, self._serving, self._part = files, serving, part
        self._name = served_name(name)
        self.home = f"triton/{self._name}/1"
        self.served: list[str] = []
        self.notes: list[str] = []

    def write_model(self) -> None:
        """Write the configuration of the ONNX file; for a step file also its served copy and the initial states.

        Raises:
            UsageError: an element type that Triton does not serve.
        """
        part, filename = self._part, self._part.path.name
        outputs = part.outputs
        step = part.sidecar.step if part.sidecar else None
        if step is not None:
            filename = f"{part.path.stem}.served.onnx"
            path = f"{self.home}/{filename}"
            write_stateful(part.file, self._files.folder / path, step)
            self._files.add(path, (self._files.folder / path).read_bytes(), "triton")
            self._start_values(self._name, step)
            outputs = [*outputs, TensorSpec(NEXT_POSITION, "int64", (1,))]
            self.notes.append(
                "Triton keeps the caches of each sequence: send every token of it, the prompt's too, as one request "
                "with the same sequence id, the first with sequence_start. A prefill file is not served: its caches "
                "could not be handed to another model there."
            )
        text = model_config(self._name, "onnxruntime", filename, part.inputs, outputs, self._serving, step)
        self._configure(self._name, text)

    def engine_home(self, engine: EnginePart) -> str:
        """Configure an engine and return its folder, which is outside the repository if Triton cannot run it."""
        facts = engine.facts
        if facts.backend != "tensorrt":
            self.notes.append(f"{engine.path.name} is a {facts.backend} engine, which Triton has no backend for.")
            return "engines"
        name = served_name(f"{self._name}_{engine.path.stem}_tensorrt")
        step = self._part.sidecar.step if self._part.sidecar else None
        filename = engine.path.name
        text = model_config(name, "tensorrt", filename, facts.inputs, facts.outputs, self._serving, step)
        self._configure(name, text)
        if step is not None:
            self._start_values(name, step)
            self.notes.append(
                f"{name}: the client sends `{step.position_input}`, the tokens sent before, with each request."
            )
        return f"triton/{name}/1"

    def _configure(self, name: str, text: str) -> None:
        self._files.add(f"triton/{name}/config.pbtxt", text.encode(), "triton")
        self.served.append(name)

    def _start_values(self, name: str, step: StepFacts) -> None:
        for filename, content in initial_states(step).items():
            self._files.add(f"triton/{name}/initial_state/{filename}", content, "triton")
