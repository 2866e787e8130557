"""Define runners, which compute a model's outputs on whole sequences.

`compare` uses nothing else of two models. The runners of an ONNX file, an engine, and a step file that is fed call by
call are here; the runner of a checkpoint's float64 reference is in the exporter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.documents.engine_sidecar import EngineSidecar
from ...core.documents.sidecar import Sidecar
from ...core.documents.window_view import WindowView
from ...core.dtypes import SHORT_NAME
from ...core.errors import UsageError
from ...core.tensors import SEQUENCE, SEQUENCE_AXES, TensorSpec
from ...core.tolerance import TOLERANCES, coarsest
from ...onnx_graph import block_weights
from ...onnx_graph.onnx_file import OnnxFile
from ...onnx_graph.summary import inspect_onnx
from ..backends import registry
from ..backends.backend import AUTO
from ..inputs.vocabulary import rows_of_table, vocabulary
from ..session import Arrays, Session, find_model, load
from .shared_inputs import cast_to

if TYPE_CHECKING:
    from ..generation.step_session import StepSession

# Element types of weights, and the resulting precision of a file without a sidecar.
_WEIGHTS = {"int4": "int4", "uint4": "int4", "int8": "int8", "float8_e4m3fn": "fp8"} | {
    name: short for name, short in SHORT_NAME.items() if short != "fp32"
}
# Replaces the path of a session's file if only its outputs matter.
NO_FILE = Path("The file")
# By axis of an output: a flag for each entry, True = compared.
Sample = Mapping[int, NDArray[np.bool_]]


def take_sample(output: NDArray[Any], sample: Sample) -> NDArray[Any]:
    """Return the sampled part of an output.

    An output of another size is returned whole, so that the comparison reports its shape.
    """
    for axis, chosen in sample.items():
        if not -output.ndim <= axis < output.ndim or output.shape[axis] != len(chosen):
            return output
        output = np.compress(chosen, output, axis)
    return output


class Runner(ABC):
    """A model that runs on whole sequences.

    Attributes:
        name: used in reports and errors.
        inputs: what a run takes; dynamic axes have names.
        outputs: names of what a run returns.
        batch: sequences a call where that is dynamic, as at export; None where unknown.
        token_limit: size of the vocabulary; None where unknown.
        token_limits: that of each input of integers, where they may differ.
    """

    name: str
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[str] = ()
    batch: int | None = None
    token_limit: int | None = None
    token_limits: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def run(self, inputs: Arrays) -> Arrays:
        """Compute the outputs on whole sequences.

        Args:
            inputs: one array for each of `self.inputs`, of another float type too.

        Raises:
            UsageError: an input does not fit.
        """

    def run_sampled(self, inputs: Arrays, sample: Sample) -> Arrays:
        """Compute the sampled part of the outputs."""
        return {name: take_sample(output, sample) for name, output in self.run(inputs).items()}

    def refuses(self, inputs: Arrays) -> str | None:
        """Return why the model does not accept inputs of these sizes; None if it does."""
        return None

    def sample(self, inputs: Arrays) -> Sample:
        """Return the part of the outputs that `run` returns on these inputs; axes that are not listed are whole."""
        return {}

    def counted(self, inputs: Arrays, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Return which rows of an output of this shape are meaningful; None for all."""
        return None

    def unsampled(self) -> Runner:
        """Return the same model with a `run` that returns the outputs whole."""
        return self

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """Return the smallest and the largest size of a dynamic axis of an input; None if unknown."""
        return 1, None

    def sequence_axis(self, output: str) -> int | None:
        """Return the axis of an output that may count positions, None if unknown; the caller checks its size."""
        return None


class FileRunner(Runner):
    """A file in an open session.

    Args:
        session: the file, opened.
        file: the same file, for its name and for properties that are not in the sidecar.
        sidecar: its sidecar; None if there is none.

    Attributes:
        sidecar: the sidecar of the file, or of the ONNX file that it was built from.
        engine: an engine's sidecar; None for an ONNX file.
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
        sidecar: Sidecar | EngineSidecar | None = None,
    ) -> None:
        self.file, self.path = file, Path(file)
        self.name = self.path.name
        self.engine = sidecar if isinstance(sidecar, EngineSidecar) else None
        self.sidecar = sidecar.model if isinstance(sidecar, EngineSidecar) else sidecar
        self.backend, self.provider, self.plugin = session.backend, session.provider, session.plugin
        self.notes = list(session.notes)
        self.batch = None if self.sidecar is None else self.sidecar.batch
        self.token_limit = vocabulary(self.sidecar)
        self.token_limits = {} if self.sidecar is None else self.sidecar.token_limits
        takes_tokens = any(spec.dtype.startswith("int") for spec in session.inputs)
        if takes_tokens and self.token_limit is None and self.engine is None and file is not NO_FILE:
            self.token_limit = rows_of_table(OnnxFile.read(file))
        self._results = session.outputs if isinstance(session, Session) else [session.output]
        self.outputs = [spec.name for spec in self._results]

    @property
    def dtype(self) -> str:
        """The element type it was exported in: "fp32", "fp16" or "bf16"."""
        if self.sidecar is not None:
            return self.sidecar.dtype
        if self.engine is not None:
            return self.engine.dtype
        if "bfloat16" in inspect_onnx(self.file).weight_bytes:
            return "bf16"
        return "fp16" if any(spec.dtype == "float16" for spec in self._results) else "fp32"

    @property
    def precision(self) -> str:
        """The precision that sets the tolerance: its element type, or that of weights or attention with 8 or 4 bits.

        Raises:
            UsageError: its sidecar names no known type.
        """
        if self.sidecar is not None:
            usual = {"weight_dtype": self.sidecar.dtype, "attention_dtype": "fp32"}
            stated = {name: self.sidecar.options.get(name, dtype) for name, dtype in usual.items()}
            wrong = [name for name, dtype in stated.items() if dtype not in list(TOLERANCES)]  # of any JSON type
            if wrong:
                raise UsageError(
                    f"The sidecar of {self.path} names no known precision.",
                    why=f"options.{wrong[0]} must be one of {', '.join(TOLERANCES)}.",
                    fix="Export the model again, or remove its sidecar.",
                )
            return coarsest(stated.values())
        if self.engine is not None:
            return self.dtype
        summary = inspect_onnx(self.file)
        stored = [_WEIGHTS[name] for name in summary.weight_bytes if name in _WEIGHTS]
        if f"{block_weights.DOMAIN}::{block_weights.OP_TYPE}" in summary.nodes:  # it has pairs of numbers in bytes
            stored.append("int4")
        return coarsest([self.dtype, *stored])

    @property
    def windows(self) -> list[WindowView]:
        """The windows of its attention nodes; for an engine or a step file, those in its sidecar."""
        from ...onnx_graph.windows import windows_of_file, windows_of_sidecar

        found = [] if self.engine is not None else windows_of_file(inspect_onnx(self.file))
        return found or windows_of_sidecar(self.sidecar)

    @property
    def onnx_sha256(self) -> str:
        """SHA-256 of the ONNX file, or of the one it was built from."""
        return OnnxFile.read(self.file).sha256 if self.engine is None else self.engine.onnx_sha256

    @property
    def sessions(self) -> Sequence[Session]:
        """Its sessions that watch their values."""
        return []

    def modes(self) -> Sequence[FileRunner]:
        """Return the same file in each of its run modes."""
        return [self]


class SessionRunner(FileRunner):
    """A file for whole sequences; with `rests` its session frees its memory after each run."""

    def __init__(
        self,
        session: Session,
        file: Path | OnnxFile = NO_FILE,
        sidecar: Sidecar | EngineSidecar | None = None,
        *,
        rests: bool = False,
    ) -> None:
        super().__init__(session, file, sidecar)
        self.session, self.inputs, self.signature, self._rests = session, session.inputs, session.inputs, rests

    @property
    def sessions(self) -> Sequence[Session]:
        """The one session."""
        return [self.session]

    def run(self, inputs: Arrays) -> Arrays:
        """Run the file once on cast inputs."""
        return self.run_sampled(inputs, {})

    def run_sampled(self, inputs: Arrays, sample: Sample) -> Arrays:
        """Run the file once on cast inputs, and keep the sampled part of its outputs alone."""
        outputs = self.session.run_in_part(cast_to(inputs, self.inputs), lambda output: take_sample(output, sample))
        if self._rests:
            self.session.rest()
        return outputs

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """Return the limits of an engine's profile, and at most the longest sequence of the export."""
        profiles = [] if self.engine is None else self.engine.options.profiles
        ranges = ((max(1, x.min[axis]), x.max[axis]) for x in profiles if x.input == name)
        low, high = next(ranges, (1, None))
        spec = next(spec for spec in self.inputs if spec.name == name)
        if self.sidecar is not None and spec.shape[axis] in SEQUENCE_AXES:
            high = self.sidecar.seq_len if high is None else min(high, self.sidecar.seq_len)
        return low, high

    def sequence_axis(self, output: str) -> int | None:
        """Return the last axis but one, unless only an earlier one or, of two, the last has the sequence's size."""
        if self.sidecar is None:
            return None
        shape = next((spec.shape for spec in self._results if spec.name == output), ())
        end = 0 if len(shape) == 2 else -1  # [batch, n]: a score a position
        counts = [axis for axis in range(-len(shape), end) if shape[axis] in (self.sidecar.seq_len, *SEQUENCE_AXES)]
        return counts[0] if counts and -2 not in counts else -2


class StepRunner(FileRunner):
    """A step file that is fed call by call, starting from empty caches; also a prefill file.

    Args:
        session: the file, opened.
        file: as of `FileRunner`.
        sidecar: as of `FileRunner`.
        singles: feed the longest chunks first, and at least this many positions in the file's own calls after them;
            None uses the file's own calls only.

    Raises:
        UsageError: the sidecar names an input that the file does not have.
    """

    def __init__(
        self,
        session: StepSession,
        file: Path | OnnxFile = NO_FILE,
        sidecar: Sidecar | EngineSidecar | None = None,
        *,
        singles: int | None = None,
    ) -> None:
        super().__init__(session, file, sidecar)
        self.session, self.record, self._singles = session, session.record, singles
        self.mode = "" if singles is None else f", first {max(session.chunks)} per call"
        ranks = {spec.name: len(spec.shape) for spec in session.inputs}
        if self.record.sequence_axis >= ranks.get(self.record.token_input, 0):
            raise UsageError(
                f"{self.path} is not the file that its sidecar describes.",
                why=f"It has no input {self.record.token_input!r} with an axis {self.record.sequence_axis}.",
                fix="Export the model again, or copy both files together.",
            )
        self.inputs = [session.resized(spec, SEQUENCE) for spec in session.inputs]
        caches = [TensorSpec(cache.input, cache.dtype, tuple(cache.shape)) for cache in self.record.caches]
        self.signature = [*session.inputs, TensorSpec(self.record.position_input, "int64", (1,)), *caches]
        if session.missing_prefill is not None:
            self.notes.append(f"{session.missing_prefill} is missing in the folder of {self.name} and is not compared")

    @property
    def sessions(self) -> Sequence[Session]:
        """The sessions of the step file and of its prefill file, if they pass their caches as arrays."""
        from ..generation.array_step import ArrayStep

        return list(self.session.sessions.values()) if isinstance(self.session, ArrayStep) else []

    @property
    def slots(self) -> int:
        """Positions that its caches hold: the length of the longest."""
        axis = 0 if self.record.sequence_axis == 0 else -2
        return max((cache.shape[axis] for cache in self.record.caches if len(cache.shape) > 1), default=1)

    @property
    def window(self) -> int:
        """The largest window of its layers; the length of its caches if no layer states a window."""
        windows = () if self.sidecar is None else self.sidecar.windows
        return max((window.window_size for window in windows), default=self.slots)

    def modes(self) -> Sequence[FileRunner]:
        """Return the file in its own calls and, with a prefill file, in chunks followed by single tokens."""
        if max(self.session.chunks) == self.record.chunk:
            return [self]
        return [self, StepRunner(self.session, self.file, self.engine or self.sidecar, singles=0)]

    def run(self, inputs: Arrays) -> Arrays:
        """Feed the sequence call by call, and join the outputs."""
        self.session.reset()
        largest = self.record.chunk if self._singles is None else None
        calls = self.session.calls(cast_to(inputs, self.inputs), largest, self._singles or 0)
        # Copies: the next call writes into the same buffer.
        parts = [output.copy() for output in calls]
        return {self.outputs[0]: np.concatenate(parts, axis=self.record.sequence_axis)}

    def refuses(self, inputs: Arrays) -> str | None:
        """Return why a length is not a whole number of calls; None if it is."""
        length, chunk = inputs[self.record.token_input].shape[self.record.sequence_axis], self.record.chunk
        return (
            f"it needs {chunk} positions per call, and {length} is not a multiple of that" if length % chunk else None
        )

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """Return the positions of one call and the most that the model has."""
        return self.record.chunk, self.record.max_positions

    def sequence_axis(self, output: str) -> int | None:
        """Return the axis that the sidecar states."""
        return self.record.sequence_axis


def open_runner(
    path: Path,
    provider: str = "auto",
    plugin: str = "auto",
    *,
    prefill: bool = True,
    runtime: str = AUTO,
    rounds: bool = False,
) -> FileRunner:
    """Open a file as a runner, even if it was changed: the comparison shows the effect.

    Args:
        path: an ONNX file or an engine.
        provider: as for `runtime.session.load`.
        plugin: as for `runtime.session.load`.
        prefill: also run the prefill file of a step file.
        runtime: as for `runtime.session.load`.
        rounds: round fp16 on the CPU as a GPU does, and watch how large values are, where onnxruntime runs the file.

    Raises:
        UsageError: no such file, a suffix no backend runs, a file that is broken or not what its sidecar says, a
            provider or a plugin that an engine does not run with.
        CheckFailed: its sidecar was changed.
        MissingDependency: the engine is not installed, or the provider asked for does not start.
    """
    file = find_model(path)
    backend, _ = registry.choose(path, runtime)
    own = backend.sidecar(path)
    sidecar = own.model if isinstance(own, EngineSidecar) else own
    if sidecar is None or sidecar.step is None:
        session_of_file = load(file, provider, plugin=plugin, verify=False, runtime=runtime)
        runner = SessionRunner(session_of_file, file, own)
        rounding = backend.open_rounding(file, session_of_file, plugin) if rounds and runner.dtype == "fp16" else None
        return runner if rounding is None else SessionRunner(rounding, file, own)
    from ..generation.step_session import open_session

    session = open_session(file, sidecar, provider, None, plugin, runtime, prefill=prefill)
    if not prefill:
        session.missing_prefill = None
    step = StepRunner(session, file, own)
    rounding = backend.open_rounding(file, session, plugin) if rounds and step.dtype == "fp16" else None
    if rounding is None:
        return step
    from ..generation.array_step import ArrayStep
    from ..generation.step_session import find_prefill

    sessions = {sidecar.step.chunk: rounding}
    found = find_prefill(Path(file), sidecar) if prefill else None
    if found is not None:
        opened = backend.open_rounding(found[0], session, plugin)
        assert opened is not None, "what rounds one file rounds the other"
        sessions[found[1].chunk] = opened
    arrays = ArrayStep(sidecar.step, sessions)
    arrays.missing_prefill, arrays.plugin = session.missing_prefill, session.plugin
    return StepRunner(arrays, file, own)
