"""Runners: whatever computes a model's outputs on whole sequences.

`compare` needs to know nothing else of two models. Runners of an ONNX file, an engine, and a step file that is fed call
by call are here; that of a checkpoint's float64 reference is in the exporter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...core.documents.engine_facts import ENGINE_SUFFIX, EngineFacts, read_engine_facts
from ...core.documents.sidecar import Sidecar, read_sidecar
from ...core.errors import UsageError
from ...core.tensors import TensorSpec
from ...core.tolerance import coarsest
from ...onnx_graph.onnx_file import OnnxFile
from ..inputs.dynamic_axes import SEQUENCE_AXES
from ..inputs.vocabulary import vocabulary
from ..session import BACKENDS, Arrays, Session, load, read_once
from .shared_inputs import cast_to

if TYPE_CHECKING:
    from ..generation.step_session import StepSession

# What the sequence of a step file is called, for which its sidecar has no name.
STEP_SEQUENCE = "seq"
# Element types of weights, and what they say of the precision of a file without facts.
_WEIGHTS = {"int8": "int8", "bfloat16": "bf16", "float16": "fp16"}
# The axis of the sequence in the outputs of a class of models; of all others it is the last but one.
_SEQUENCE_AXES = {"labml_nn.AFTLocal": 0}
# Stands for the path of a session's file where only its outputs matter.
NO_FILE = Path("The file")
# By axis of an output, which of its entries are meant: `[size of the axis]`.
Sample = Mapping[int, NDArray[np.bool_]]


class Runner(ABC):
    """A model that runs on whole sequences.

    Attributes:
        name: what texts call it.
        inputs: what a run takes; dynamic axes have names.
        outputs: names of what a run returns.
        batch: sequences a call where that is dynamic, as at export; None where nothing says.
        token_limit: size of the vocabulary; None where nothing says.
    """

    name: str
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[str] = ()
    batch: int | None = None
    token_limit: int | None = None

    @abstractmethod
    def run(self, inputs: Arrays) -> Arrays:
        """Compute the outputs on whole sequences.

        Args:
            inputs: one array for each of `self.inputs`, of another float type too.

        Raises:
            UsageError: an input does not fit.
        """

    def refuses(self, inputs: Arrays) -> str | None:
        """Why the model takes no inputs of these sizes, None if it does."""
        return None

    def sample(self, inputs: Arrays) -> Sample:
        """The part of the outputs that `run` returns on these inputs; axes that it lacks are whole."""
        return {}

    def unsampled(self) -> Runner:
        """The same model, with `run` returning the outputs whole."""
        return self

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """The smallest and the largest size of a dynamic axis of an input; None where nothing says."""
        return 1, None

    def sequence_axis(self, output: str) -> int | None:
        """The axis of an output that counts positions, None where nothing says; whether it does, its size shows."""
        return None


class FileRunner(Runner):
    """A file in an open session.

    Args:
        session: the file, opened.
        file: the same, for its name and for what the facts do not say.
        facts: of the file; None where there are none.

    Attributes:
        sidecar: the facts of the file, or of the ONNX file that it was built from.
        engine: the facts of an engine; None of an ONNX file.
        signature: inputs of one call of the file.
        mode: the run mode in words, for the name of a comparison; empty for the usual one.
        notes: what the user should know of how it runs.
    """

    signature: Sequence[TensorSpec]
    mode = ""

    def __init__(
        self,
        session: Session | StepSession,
        file: Path | OnnxFile = NO_FILE,
        facts: Sidecar | EngineFacts | None = None,
    ) -> None:
        self.file, self.path = file, Path(file)
        self.name = self.path.name
        self.engine = facts if isinstance(facts, EngineFacts) else None
        self.sidecar = facts.model if isinstance(facts, EngineFacts) else facts
        self.backend, self.provider, self.plugin = session.backend, session.provider, session.plugin
        self.notes = list(session.notes)
        self.batch = None if self.sidecar is None else self.sidecar.batch
        self.token_limit = vocabulary(self.sidecar)
        self._results = session.outputs if isinstance(session, Session) else [session.output]
        self.outputs = [spec.name for spec in self._results]

    @property
    def dtype(self) -> str:
        """The element type it was exported in: "fp32", "fp16" or "bf16"."""
        if self.sidecar is not None:
            return self.sidecar.dtype
        if self.engine is not None:
            return self.engine.dtype
        if "bfloat16" in self._weights:
            return "bf16"
        return "fp16" if any(spec.dtype == "float16" for spec in self._results) else "fp32"

    @property
    def precision(self) -> str:
        """What chooses the tolerance: its element type, or "int8" of a file with such weights."""
        if self.sidecar is not None:
            return str(self.sidecar.options.get("weights", self.sidecar.dtype))
        stored = () if self.engine is not None else (_WEIGHTS[x] for x in self._weights if x in _WEIGHTS)
        return coarsest([self.dtype, *stored])

    @property
    def _weights(self) -> Mapping[str, int]:
        from ...onnx_graph.facts import inspect_onnx

        return inspect_onnx(self.file).weight_bytes

    @property
    def onnx_sha256(self) -> str:
        """SHA-256 of the ONNX file that it is, or that it was built from."""
        return OnnxFile.read(self.file).sha256 if self.engine is None else self.engine.onnx_sha256

    def modes(self) -> Sequence[FileRunner]:
        """The same file in each of its run modes."""
        return [self]


class SessionRunner(FileRunner):
    """A file that takes whole sequences; with `rests` its session leaves its memory to the reference after each run."""

    def __init__(
        self,
        session: Session,
        file: Path | OnnxFile = NO_FILE,
        facts: Sidecar | EngineFacts | None = None,
        *,
        rests: bool = False,
    ) -> None:
        super().__init__(session, file, facts)
        self.session, self.inputs, self.signature, self._rests = session, session.inputs, session.inputs, rests

    def run(self, inputs: Arrays) -> Arrays:
        """Run once."""
        outputs = self.session.run(cast_to(inputs, self.inputs))
        if self._rests:
            self.session.rest()
        return outputs

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """An engine's profile, and the longest sequence of the export."""
        low, high = 1, None
        for profile in () if self.engine is None else self.engine.options.profiles:
            if profile.input == name:
                low, high = max(1, profile.min[axis]), profile.max[axis]
                break
        spec = next(spec for spec in self.inputs if spec.name == name)
        if self.sidecar is not None and spec.shape[axis] in SEQUENCE_AXES:
            high = self.sidecar.seq_len if high is None else min(high, self.sidecar.seq_len)
        return low, high

    def sequence_axis(self, output: str) -> int | None:
        """By the class it was exported from."""
        return None if self.sidecar is None else _SEQUENCE_AXES.get(self.sidecar.class_name, -2)


class StepRunner(FileRunner):
    """A step file that is fed call by call, from empty caches on; a prefill file likewise.

    Args:
        session: the file, opened.
        file: as of `FileRunner`.
        facts: likewise.
        singles: feed the longest chunks first, and at least so many positions in the file's own calls after them;
            None feeds in its own calls only.

    Raises:
        UsageError: the facts name an input that the file does not have.
    """

    def __init__(
        self,
        session: StepSession,
        file: Path | OnnxFile = NO_FILE,
        facts: Sidecar | EngineFacts | None = None,
        *,
        singles: int | None = None,
    ) -> None:
        super().__init__(session, file, facts)
        self.session, self.facts, self._singles = session, session.facts, singles
        self.mode = "" if singles is None else f", {max(session.chunks)} a call first"
        ranks = {spec.name: len(spec.shape) for spec in session.inputs}
        if self.facts.sequence_axis >= ranks.get(self.facts.token_input, 0):
            raise UsageError(
                f"{self.path} is not the file that its sidecar describes.",
                why=f"It has no input {self.facts.token_input!r} with an axis {self.facts.sequence_axis}.",
                fix="Export it again, or copy both files together.",
            )
        self.inputs = [session.resized(spec, STEP_SEQUENCE) for spec in session.inputs]
        caches = [TensorSpec(cache.input, cache.dtype, tuple(cache.shape)) for cache in self.facts.caches]
        self.signature = [*session.inputs, TensorSpec(self.facts.position_input, "int64", (1,)), *caches]
        if session.missing_prefill is not None:
            self.notes.append(f"{session.missing_prefill} does not lie beside {self.name} and is not compared with it")

    @property
    def slots(self) -> int:
        """Positions that its caches hold: the longest of them."""
        axis = 0 if self.facts.sequence_axis == 0 else -2
        return max((cache.shape[axis] for cache in self.facts.caches if len(cache.shape) > 1), default=1)

    @property
    def window(self) -> int:
        """The largest window of its layers; that of its caches where no layer says."""
        windows = () if self.sidecar is None else self.sidecar.windows
        return max((window.window_size for window in windows), default=self.slots)

    def modes(self) -> Sequence[FileRunner]:
        """In its own calls; and with the prefill file beside it, chunks first and single tokens after."""
        if max(self.session.chunks) == self.facts.chunk:
            return [self]
        return [self, StepRunner(self.session, self.file, self.engine or self.sidecar, singles=0)]

    def run(self, inputs: Arrays) -> Arrays:
        """Feed the sequence; the output of every call, joined."""
        self.session.reset()
        largest = self.facts.chunk if self._singles is None else None
        calls = self.session.calls(cast_to(inputs, self.inputs), largest, self._singles or 0)
        # Copies: the next call writes into the same buffer.
        parts = [output.copy() for output in calls]
        return {self.outputs[0]: np.concatenate(parts, axis=self.facts.sequence_axis)}

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """The positions that the model has."""
        return self.facts.chunk, self.facts.max_positions

    def sequence_axis(self, output: str) -> int | None:
        """As the facts say."""
        return self.facts.sequence_axis


def open_runner(path: Path, provider: str = "auto", plugin: str = "auto", *, prefill: bool = True) -> FileRunner:
    """Open a file, altered or not: the comparison finds out.

    Args:
        path: an ONNX file or an engine.
        provider: as for `runtime.session.load`.
        plugin: likewise.
        prefill: of a step file, run the prefill file beside it too.

    Raises:
        UsageError: no such file, a suffix no backend runs, a file that is broken or not what its facts say, a provider
            or a plugin that an engine does not run with.
        CheckFailed: its facts were altered.
        MissingDependency: the engine is not installed, or the provider asked for does not start.
    """
    suffix = path.suffix.lower()
    file = read_once(path)
    engine = read_engine_facts(path) if suffix == ENGINE_SUFFIX else None
    sidecar = read_sidecar(path) if engine is None else engine.model
    if sidecar is None or sidecar.step is None:
        return SessionRunner(load(file, provider, plugin=plugin, verify=False), file, engine or sidecar)
    BACKENDS[suffix].require()
    session: StepSession
    if engine is not None:
        from ..engine.step_session import open_step_engine

        session = open_step_engine(path, sidecar, provider, None, plugin)
    else:
        from ..generation.step_file import find_prefill
        from ..ort.session import open_file
        from ..ort.step_session import OnnxRuntimeStep

        opened = open_file(file, provider, None, plugin)
        companion = find_prefill(path, sidecar) if prefill else None
        session = OnnxRuntimeStep(path, sidecar, opened, companion, None, plugin)
    if not prefill:
        session.chunks, session.missing_prefill = (session.facts.chunk,), None
    return StepRunner(session, file, engine or sidecar)
