"""Write a model repository for Triton that uses the bundle's own files without copies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import LocalAttnError
from ...core.tensors import TensorSpec
from ..backends import registry
from ..backends.step_file import other_tensors
from ..inputs.rows import ROWS, check_rows, open_batch, rows_stay_apart, spans_the_batch
from ..inputs.vocabulary import vocabulary
from ..session import Session, load
from .parts import EnginePart, ModelPart, PluginPart
from .place import BundleFiles
from .samples import Sample, example_inputs
from .triton import (
    IDLE_SECONDS,
    NEXT_POSITION,
    Served,
    Serving,
    initial_states,
    model_config,
    served_name,
    stateful,
    stream_config,
    warmup_files,
)

if TYPE_CHECKING:
    from ...core.documents.step_record import StepRecord

# A file instead of Python's cache folder: a server that imports the model writes nothing into the bundle, and reads
# nothing that another put there.
_NO_BYTECODE = b"This file keeps Python from writing bytecode into the bundle.\n"
_STREAM = Path(__file__).parent / "serving" / "stream_model.py"


class Repository:
    """The folder `triton` of a bundle.

    Args:
        files: the bundle.
        serving: batching, instances, sequences.
        parts: the model that is served, and the prefill file of a step file.
        name: the bundle's name, from which the served models take theirs.
        plugins: the libraries of the bundle.

    Attributes:
        home: the folder of the bundle's ONNX files: the version folder of the served model.
        served: folders of the repository.
        notes: what cannot be served, and why.
    """

    def __init__(
        self,
        files: BundleFiles,
        serving: Serving,
        parts: Sequence[ModelPart],
        name: str,
        plugins: Sequence[PluginPart] = (),
    ) -> None:
        self._files, self._serving, self._part, self._parts = files, serving, parts[0], list(parts)
        self._name = served_name(name)
        self.home = f"triton/{self._name}/1"
        self.served: list[str] = []
        self.notes: list[str] = []
        self._served = Served(libraries=self._kernels(plugins), gpu=_is_bf16(self._part))

    def write_model(self, samples: Sequence[Sample]) -> None:
        """Write the configuration of the ONNX file; for a step file also its served copy and the initial states.

        Args:
            samples: of the model.

        Raises:
            UsageError: an element type that Triton does not serve.
        """
        part, filename = self._part, self._part.path.name
        outputs = part.outputs
        step = part.step
        if self._served.gpu:
            self.notes.append(
                f"{filename} is bf16, which onnxruntime computes on GPUs only: {self._name} does not load in a server "
                "without one. If started as the README says, the server still serves the other models."
            )
        if step is None:
            self._prove_rows(samples)
        else:
            filename = f"{part.path.stem}.served.onnx"
            path = f"{self.home}/{filename}"
            self._files.add(path, stateful(part.file, step), "triton")
            self._start_values(self._name, step)
            outputs = [*outputs, TensorSpec(NEXT_POSITION, "int64", (1,))]
            self.notes += [
                f"{self._name} keeps the caches of each sequence in the server: send every token, also of the "
                "prompt, as one request with the same sequence id, the first with sequence_start.",
                f"An instance serves {self._serving.sequences} sequences at a time. The next one waits until "
                f"one of them ends with sequence_end or is silent for {IDLE_SECONDS} seconds: give clients a timeout.",
            ]
        served = self._served
        text = model_config(self._name, "onnxruntime", filename, part.inputs, outputs, self._serving, step, served)
        self._configure(self._name, text)
        if served.sample and step is None:
            for name, content in warmup_files(served.sample, served.batched).items():
                self._files.add(f"triton/{self._name}/warmup/{name}", content, "triton")
        if step is not None:
            self._write_stream(step, samples)

    def _kernels(self, plugins: Sequence[PluginPart]) -> tuple[str, ...]:
        """Return the names of the libraries of kernels, which are the same for every processor."""
        by_arch: dict[str, set[str]] = {}
        for plugin in plugins:
            if plugin.kind == "kernels":
                by_arch.setdefault(plugin.arch, set()).add(plugin.path.name)
        common = set.intersection(*by_arch.values()) if by_arch else set()
        left = set().union(*by_arch.values()) - common
        if left:
            self.notes.append(
                f"Triton does not load {', '.join(sorted(left))}, because the bundle lacks it for some processors."
            )
        return tuple(sorted(common))

    def _prove_rows(self, samples: Sequence[Sample]) -> None:
        """Find out whether requests may be joined; note the reason if not."""
        part, rows, batched = self._part, 1, False
        first = next((sample.inputs for sample in samples), {})
        if open_batch(part.inputs, part.outputs):
            rows = max((len(array) for sample in samples for array in sample.inputs.values()), default=1)
            try:
                session = load(part.file, provider="cpu", plugin="none")
                examples = example_inputs(session, part, samples)
                record = check_rows(session.run, examples, part.dtype, spans_the_batch(part.file.model))
                batched, why = record.status == "passed", record.detail
            except LocalAttnError as error:  # a file that does not run on this machine is served unchanged
                why = error.what
            if not batched:
                self.notes.append(f"Triton does not join requests to {self._name}: no proof of {ROWS}. {why}.")
        self._served = replace(self._served, batched=batched, rows=rows, sample=first)

    def _write_stream(self, step: StepRecord, samples: Sequence[Sample]) -> None:
        """Write the Python model that takes any number of positions a request, or note why there is none."""
        name, part = f"{self._name}_stream", self._part
        data, output = other_tensors(part, step)
        if self._served.gpu or any(spec.name == "attn_bias" for spec in data):
            self.notes.append(f"{name} is not written: numpy has no bf16, and a bias is not a sequence.")
            return
        rows = self._rows_of_step(step, data, samples)
        limit = vocabulary(part.sidecar) if data[0].dtype == "int64" else None
        draws = bool(rows and limit) and output.shape[-1] == limit
        serving, axis = self._serving, step.sequence_axis
        self._configure(name, stream_config(name, data, output, serving, axis, rows, draws))
        home = f"../../{self._name}/1"
        settings = {
            "files": {str(x.step.chunk): f"{home}/{x.path.name}" for x in self._parts if x.step},
            "libraries": list(self._served.libraries),
            "threads": serving.threads_of(True),
            "idle_seconds": IDLE_SECONDS,
            "inputs": [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in data],
            "output": output.name,
            "position": step.position_input,
            "sequence_axis": axis,
            "caches": [cache.model_dump() for cache in step.caches],
            "max_positions": step.max_positions,
            "vocabulary": limit,
            "rows": rows,
        }
        text = json.dumps(settings, indent=1, allow_nan=False).encode() + b"\n"
        self._files.add(f"triton/{name}/1/stream.json", text, "triton")
        self._files.add(f"triton/{name}/1/model.py", _STREAM.read_bytes(), "triton")
        self._files.add(f"triton/{name}/1/__pycache__", _NO_BYTECODE, "triton")
        joined = f"Up to {rows} sequences at the same position share a call" if rows > 1 else "Sequences are not joined"
        self.notes.append(
            f"{name} accepts any number of positions per request, such as a whole prompt. It needs numpy and "
            "onnxruntime in the "
            f"server's Python. {joined}."
        )

    def _rows_of_step(self, step: StepRecord, data: Sequence[TensorSpec], samples: Sequence[Sample]) -> int:
        """Return how many sequences a call takes, one per row; 0 if axis 0 is not proven to count them."""
        batch = data[0].shape[0]
        shapes = [spec.shape for spec in data] + [tuple(cache.shape) for cache in step.caches]
        if step.sequence_axis == 0 or not isinstance(batch, int) or any(shape[:1] != (batch,) for shape in shapes):
            return 0
        if batch == 1:
            return 1
        try:
            session: Session = load(self._part.file, provider="cpu", plugin="none")
            proven = bool(samples) and all(
                rows_stay_apart(session.run, sample.inputs, [step.position_input]) for sample in samples
            )
        except LocalAttnError:
            proven = False
        return batch if proven and not spans_the_batch(self._part.file.model) else 0

    def engine_home(self, engine: EnginePart) -> str:
        """Configure an engine and return its folder, which is outside the repository if Triton cannot run it."""
        sidecar = engine.sidecar
        backend = registry.named(sidecar.backend).triton_backend
        if not backend:
            self.notes.append(f"{engine.path.name} is a {sidecar.backend} engine, for which Triton has no backend.")
            return "engines"
        name = served_name(f"{self._name}_{engine.path.stem}_tensorrt")
        step = self._part.step
        filename = engine.path.name
        batched = self._served.batched and open_batch(sidecar.inputs, sidecar.outputs)
        served = replace(self._served, batched=batched, libraries=(), sample={})
        text = model_config(name, backend, filename, sidecar.inputs, sidecar.outputs, self._serving, step, served)
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

    def _start_values(self, name: str, step: StepRecord) -> None:
        for filename, content in initial_states(step).items():
            self._files.add(f"triton/{name}/initial_state/{filename}", content, "triton")


def _is_bf16(part: ModelPart) -> bool:
    return part.dtype == "bf16" or any(spec.dtype == "bfloat16" for spec in (*part.inputs, *part.outputs))
