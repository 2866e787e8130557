"""One of two files that are compared: run on whole sequences, whatever it takes in a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core.engine_facts import ENGINE_SUFFIX, EngineFacts, read_engine_facts
from ..core.errors import UsageError
from ..core.sidecar import Sidecar, read_sidecar
from ..core.tensors import TensorSpec
from ..core.tolerance import coarsest
from ..onnx_graph.onnx_file import OnnxFile
from .open_axes import SEQUENCE_AXES
from .session import BACKENDS, Arrays, Session, load, read_once
from .shared_inputs import fitted

if TYPE_CHECKING:
    from .step_session import StepSession

# What a step file's sequence is called, which its sidecar has no name for.
STEP_SEQUENCE = "seq"
# Element types of weights that tell the precision of a file without facts; the rest is fp32.
_WEIGHTS = {"int8": "int8", "bfloat16": "bf16", "float16": "fp16"}
# The axis of the sequence in the outputs of a class of models; of all others it is the last but one.
_SEQUENCE_AXES = {"labml_nn.AFTLocal": 0}

Run = Callable[[Arrays], Arrays]


class Side(ABC):
    """A file that runs on whole sequences.

    Args:
        path: the file.
        sidecar: of the file, or of the ONNX file that it was built from.
        engine: the facts of an engine; None of an ONNX file.
        session: the file, opened.
        plugin: path of the library whose compiled kernels compute the attention nodes; None if their body does.

    Attributes:
        inputs: what a run takes; sizes that the file leaves open have names.
        outputs: names of what it returns.
        backend: what runs it.
        provider: where it really runs.
        notes: what the user should know of how it runs.
        file: what `read_once` gave.
    """

    inputs: list[TensorSpec]
    outputs: list[str]

    def __init__(
        self,
        path: Path,
        sidecar: Sidecar | None,
        engine: EngineFacts | None,
        session: Session | StepSession,
        plugin: str | None,
    ) -> None:
        self.file: Path | OnnxFile = path
        self.path, self.sidecar, self.engine, self.plugin = path, sidecar, engine, plugin
        self.backend, self.provider, self.notes = session.backend, session.provider, list(session.notes)

    @property
    def precision(self) -> str:
        """What chooses the tolerance: "fp32", "fp16", "bf16" or "int8"."""
        if self.sidecar is not None:
            return str(self.sidecar.options.get("weights", self.sidecar.dtype))
        if self.engine is not None:
            return self.engine.dtype
        from ..onnx_graph.facts import inspect_onnx

        return coarsest(["fp32", *(_WEIGHTS[x] for x in inspect_onnx(self.file).weight_bytes if x in _WEIGHTS)])

    @property
    def onnx_sha256(self) -> str:
        """SHA-256 of the ONNX file that it is, or that it was built from."""
        if self.engine is not None:
            return self.engine.onnx_sha256
        return OnnxFile.read(self.file).sha256

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """The smallest and the largest size of an open axis of an input; None where nothing tells it."""
        for profile in () if self.engine is None else self.engine.options.profiles:
            if profile.input == name:
                return max(1, profile.min[axis]), profile.max[axis]
        return 1, None

    def ways(self) -> list[tuple[str, Run]]:
        """The ways in which it can be run, each with what tells it from the others."""
        return [("", self.run)]

    @abstractmethod
    def run(self, inputs: Arrays) -> Arrays:
        """Its outputs on whole sequences.

        Args:
            inputs: one array for each of `self.inputs`, of another float type too.

        Raises:
            UsageError: an input does not fit.
        """

    @abstractmethod
    def sequence_axis(self, output: str) -> int:
        """The axis that counts positions in an output; whether it does, its size has to show."""


class WholeSide(Side):
    """A file that takes whole sequences.

    Args:
        path: the file.
        sidecar: as of `Side`.
        engine: as of `Side`.
        session: the file, opened.
    """

    def __init__(self, path: Path, sidecar: Sidecar | None, engine: EngineFacts | None, session: Session) -> None:
        super().__init__(path, sidecar, engine, session, session.plugin)
        self._session = session
        self.inputs, self.outputs = session.inputs, [spec.name for spec in session.outputs]

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """An engine's profile, else the longest sequence of the export."""
        low, high = super().limits(name, axis)
        spec = next(spec for spec in self.inputs if spec.name == name)
        if self.sidecar is not None and spec.shape[axis] in SEQUENCE_AXES:
            high = self.sidecar.seq_len if high is None else min(high, self.sidecar.seq_len)
        return low, high

    def run(self, inputs: Arrays) -> Arrays:
        """Once."""
        return self._session.run(fitted(inputs, self.inputs))

    def sequence_axis(self, output: str) -> int:
        """By the class it was exported from."""
        return _SEQUENCE_AXES.get("" if self.sidecar is None else self.sidecar.class_name, -2)


class StepSide(Side):
    """A step file, fed call by call from empty caches on; a prefill file likewise.

    Args:
        path: the file.
        sidecar: as of `Side`.
        engine: as of `Side`.
        session: the file, opened.
        plugin: as of `Side`.

    Raises:
        UsageError: the sidecar tells of an input that the file does not have.
    """

    def __init__(
        self, path: Path, sidecar: Sidecar, engine: EngineFacts | None, session: StepSession, plugin: str | None
    ) -> None:
        super().__init__(path, sidecar, engine, session, plugin)
        self.session, self.facts = session, session.facts
        ranks = {spec.name: len(spec.shape) for spec in session.inputs}
        if self.facts.sequence_axis >= ranks.get(self.facts.token_input, 0):
            raise UsageError(
                f"{path} is not the file that its sidecar describes.",
                why=f"It has no input {self.facts.token_input!r} with an axis {self.facts.sequence_axis}.",
                fix="Export it again, or copy both files together.",
            )
        self.inputs = [session.resized(spec, STEP_SEQUENCE) for spec in session.inputs]
        self.outputs = [session.output.name]
        if session.missing_prefill is not None:
            self.notes.append(f"{session.missing_prefill} does not lie beside {path.name} and is not judged with it")

    @property
    def slots(self) -> int:
        """Positions that its caches hold: the longest of them."""
        axis = 0 if self.facts.sequence_axis == 0 else -2
        return max((cache.shape[axis] for cache in self.facts.caches if len(cache.shape) > 1), default=1)

    @property
    def window(self) -> int:
        """The largest window of its layers; that of its caches where no layer tells."""
        assert self.sidecar is not None
        return max((window.window_size for window in self.sidecar.windows), default=self.slots)

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """The positions that the model has."""
        return self.facts.chunk, self.facts.max_positions

    def ways(self) -> list[tuple[str, Run]]:
        """In the file's own calls; and with the prefill file beside it, chunks first and single tokens after."""
        longest = max(self.session.chunks)
        own: list[tuple[str, Run]] = [("", self.run)]
        return own if longest == self.facts.chunk else [*own, (f", {longest} a call first", self._run_in_chunks)]

    def run(self, inputs: Arrays) -> Arrays:
        """In the file's own calls."""
        return self._fed(inputs, self.facts.chunk)

    def _run_in_chunks(self, inputs: Arrays) -> Arrays:
        return self._fed(inputs, None)

    def _fed(self, inputs: Arrays, largest: int | None) -> Arrays:
        self.session.reset()
        # Copies: the next call writes into the same buffer.
        parts = [output.copy() for output in self.session.calls(fitted(inputs, self.inputs), largest)]
        return {self.outputs[0]: np.concatenate(parts, axis=self.facts.sequence_axis)}

    def sequence_axis(self, output: str) -> int:
        """As the sidecar tells."""
        return self.facts.sequence_axis


def open_side(path: Path, provider: str = "auto", plugin: str = "auto", *, companion: bool = True) -> Side:
    """Open a file, altered or not: its numbers judge it.

    Args:
        path: an ONNX file or an engine.
        provider: as for `runtime.session.load`.
        plugin: likewise.
        companion: of a step file in onnxruntime, take the prefill file beside it along.

    Raises:
        UsageError: no such file, a suffix no backend runs, a file that is broken or not what its facts say.
        CheckFailed: its facts were altered.
        MissingDependency: the engine is not installed, or the provider asked for does not start.
    """
    suffix = path.suffix.lower()
    file = read_once(path)
    engine = read_engine_facts(path) if suffix == ENGINE_SUFFIX else None
    sidecar = read_sidecar(path) if engine is None else engine.model
    if sidecar is None or sidecar.step is None:
        side: Side = WholeSide(path, sidecar, engine, load(file, provider, plugin=plugin, verify=False))
        side.file = file
        return side
    BACKENDS[suffix].require()
    if engine is not None:
        from .engine_step import open_step_engine

        return StepSide(path, sidecar, engine, open_step_engine(path, sidecar, provider, None), None)
    from .onnxruntime_session import open_file
    from .onnxruntime_step import OnnxRuntimeStep
    from .step_file import find_prefill

    opened = open_file(file, provider, None, plugin)
    prefill = find_prefill(path, sidecar) if companion else None
    session = OnnxRuntimeStep(path, sidecar, opened, prefill, None, plugin)
    if not companion:
        session.missing_prefill = None
    side = StepSide(path, sidecar, None, session, opened.plugin)
    side.file = file
    return side


def steps_of(sides: Sequence[Side]) -> list[StepSide]:
    """Those that are fed call by call."""
    return [side for side in sides if isinstance(side, StepSide)]
