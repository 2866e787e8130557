"""Read step files' sidecars, and check that file, prefill file and sidecars agree."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.error_texts import HOW_TO_EXPORT_STEPS
from ...core.errors import UsageError
from ...core.tensors import BATCH, SEQUENCE, TensorSpec
from ...onnx_graph.onnx_file import OnnxFile

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar
    from ...core.documents.step_record import StepRecord

# The prefill file of a step file, already read if it is an ONNX file, and its sidecar's entries.
Prefill: TypeAlias = "tuple[Path | OnnxFile, StepRecord]"

_EXPORTED = ".onnx"
EXPORT_AGAIN = "Export the step file again; it writes both. Engines are built from both."


class Described(Protocol):
    """An open file, or a sidecar: anything that lists inputs and outputs."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The tensors in the file's order."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The tensors in the file's order."""


def step_record(sidecar: Sidecar, name: str = "The file", how: str = HOW_TO_EXPORT_STEPS) -> StepRecord:
    """Return the sidecar's entries for step files.

    Args:
        sidecar: of any model.
        name: of the file, for the error.
        how: the commands that make a step file, for the error.

    Raises:
        UsageError: there are none, because the file needs whole sequences.
    """
    if sidecar.step is None:
        checkpoint = _module_of(sidecar) if ":" in sidecar.class_name else sidecar.checkpoint_name or "CHECKPOINT"
        ahead = any(not window.causal for window in sidecar.windows)
        raise UsageError(
            f"{name} is not a step file.",
            why=f"It needs whole sequences of {sidecar.seq_len} positions and has no caches.",
            fix="None can be made of its model: its attention is not causal, so each output depends on later tokens."
            if ahead
            else how.replace("CHECKPOINT", checkpoint),
        )
    return sidecar.step


def _module_of(sidecar: Sidecar) -> str:
    """Return the words that export a module of the user's own again: its function, weights and inputs."""
    options = [("factory", sidecar.class_name)]
    options += [("factory-args", json.dumps(sidecar.kwargs))] if sidecar.kwargs else []
    options += [("weights", sidecar.checkpoint_name)] if sidecar.checkpoint_name else []
    sizes = {BATCH: sidecar.batch, SEQUENCE: sidecar.seq_len}
    for spec in sidecar.inputs:
        usual = (BATCH, SEQUENCE, *[""] * len(spec.shape))
        named = [size if isinstance(size, str) else name for name, size in zip(usual, spec.shape, strict=False)]
        axes = [
            f"{name}={sizes.get(name, 1) if isinstance(size, str) else size}" if name else str(size)
            for name, size in zip(named, spec.shape, strict=True)
        ]
        options.append(("input", f"{spec.name}:{_FP32.get(spec.dtype, spec.dtype)}:[{','.join(axes)}]"))
    return " ".join(f"--{name} {shlex.quote(value)}" for name, value in options)


_FP32 = {"float16": "float32"}


def other_tensors(file: Described, record: StepRecord) -> tuple[list[TensorSpec], TensorSpec]:
    """Return the inputs other than position and caches, and the output that is not a cache."""
    output = next(spec for spec in file.outputs if spec.name == record.logits_output)
    return data_inputs(file, record), output


def data_inputs(file: Described, record: StepRecord) -> list[TensorSpec]:
    """Return the inputs other than position and caches."""
    fed = {record.position_input, *(cache.input for cache in record.caches)}
    return [spec for spec in file.inputs if spec.name not in fed]


def zeros(spec: TensorSpec) -> NDArray[Any]:
    """Return an array for a tensor of fixed sizes."""
    return np.zeros(tuple(int(size) for size in spec.shape), dtype=spec.dtype)


def check_caches(file: Described, record: StepRecord, path: Path, *, output: bool = True) -> None:
    """Check that the file has the caches that its sidecar states, and with `output` its output.

    Raises:
        UsageError: they differ.
    """
    inputs = {spec.name: spec for spec in file.inputs}
    outputs = {spec.name: spec for spec in file.outputs}
    fits = record.logits_output in outputs or not output
    fits &= inputs.get(record.position_input) == TensorSpec(record.position_input, "int64", (1,))
    for cache in record.caches:
        for tensors, name in ((inputs, cache.input), (outputs, cache.output)):
            fits &= tensors.get(name) == TensorSpec(name, cache.dtype, tuple(cache.shape))
    if not fits:
        raise UsageError(
            f"{path} is not the file that its sidecar describes.",
            why="The names or shapes of its caches differ.",
            fix="Export the model again, or copy both files together.",
        )


def prefill_path(path: Path, record: StepRecord) -> Path | None:
    """Return the path of a step file's prefill file, or of the engine built from it; None if none was exported.

    Raises:
        UsageError: the sidecar names something that is not a file name.
    """
    if record.prefill is None:
        return None
    if not record.prefill or Path(record.prefill).name != record.prefill or "\0" in record.prefill:
        raise UsageError(
            f"The sidecar of {path} names the prefill file {record.prefill[:100]!r}.",
            why="That is not a file name in the same folder.",
            fix=EXPORT_AGAIN,
        )
    prefill = path.with_name(record.prefill)
    built, exported = path.suffix.lower(), prefill.suffix.lower()  # the sidecar names the ONNX file
    return prefill.with_suffix(built) if exported == _EXPORTED != built else prefill
