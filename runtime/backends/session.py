"""A model that is ready to run, in whatever runtime, and the checks of the arrays that it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.tensors import UNNAMED_DIMENSION, TensorSpec, format_shape

Arrays = dict[str, NDArray[Any]]


class Session(ABC):
    """A model that is ready to run.

    Attributes:
        backend: the runtime's name, as in `registry.py`: "onnxruntime".
        provider: the provider that really runs ("cpu", "cuda", …); under "auto" it may be slower than the best one.
        plugin: path of the library whose compiled kernels compute the attention nodes; None if their ONNX functions do.
        inputs: what `run` takes, in the file's order.
        outputs: what `run` returns, in the file's order.
        notes: what a user should know of how it runs, a sentence each.
        watched: values whose size the session measures: the name in the file, and the module that computes it.
        peaks: the largest magnitude so far of each of these.
        not_finite: which of these were infinite or NaN.
        peaks_without_overflow: the largest magnitudes in the runs with one beyond fp16, had it not become infinite.
        overflow_shows: whether an output of such a run was not finite, or has another bit where nothing overflows.
        load_seconds: how long it took to open, where that is less than its opener took; else None.
    """

    backend: str
    provider: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    notes: tuple[str, ...] = ()
    plugin: str | None = None
    watched: Sequence[tuple[str, str]] = ()
    peaks: NDArray[np.float32] | Sequence[float] = ()
    not_finite: NDArray[np.bool_] | Sequence[bool] = ()
    peaks_without_overflow: NDArray[np.float32] | Sequence[float] = ()
    overflow_shows: bool = False
    load_seconds: float | None = None

    def __repr__(self) -> str:
        """Return the file, where it runs, and its inputs."""
        source = getattr(self, "_source", "")
        return f"<{source or type(self).__name__} on {self.backend}, {self.runs_on}: " + (
            f"{'; '.join(spec.describe() for spec in self.inputs)}>"
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """Which compiled kernels were loaded for the GPU, a line each; empty where a session does not tell."""
        return ()

    @property
    def runs_on(self) -> str:
        """Provider and kind of kernels for reports: "cpu, compiled kernel"."""
        return place(self.provider, self.plugin)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Run the model once. Several threads may call this at the same time.

        Args:
            inputs: one array for each of `self.inputs`, of its dtype and shape. Nothing is cast, with
                two exact exceptions: a narrower integer where a wider one is wanted (int32 tokens for
                int64), and bool for uint8 or uint8 holding only 0 and 1 for bool.

        Returns:
            One array for each of `self.outputs`, by name.

        Raises:
            UsageError: an input is missing, unknown, or of the wrong dtype or shape, or the engine
                refuses its values.
        """
        return self._execute(check_inputs(self.inputs, inputs))

    def run_in_part(self, inputs: Mapping[str, NDArray[Any]], part: Callable[[NDArray[Any]], NDArray[Any]]) -> Arrays:
        """Run the model once, and keep a part of each output; inputs and errors as of `run`.

        Args:
            inputs: as of `run`.
            part: called with each output, whose memory may be another's afterwards; returns a copy of what is kept, or
                the output itself.
        """
        return {name: part(output) for name, output in self.run(inputs).items()}

    def run_on_gpu(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run the model once on arrays in GPU memory, and leave the results there; sessions of engines can.

        Raises:
            UsageError: this session cannot, or as of `run`.
        """
        raise self._without_gpu("takes no arrays in GPU memory")

    def use_cuda_graph(self) -> None:
        """Record calls that come again as CUDA graphs; sessions of engines can.

        Raises:
            UsageError: this session cannot.
        """
        raise self._without_gpu("records no CUDA graphs")

    def bound(self, inputs: Arrays) -> Callable[[], None] | None:
        """Put inputs that fit where the engine reads them; return a call that only computes, None if there is none."""
        return None

    @property
    def replays_graph(self) -> bool:
        """Whether its runs are replayed as a CUDA graph."""
        return False

    def end_profiling(self) -> str:
        """End the profile of a session that `Backend.open_tuned` opened for it; return its file.

        Raises:
            UsageError: it makes none.
        """
        raise UsageError(f"A session of {self.backend} makes no profile.")

    def _without_gpu(self, what: str) -> UsageError:
        return UsageError(f"A session of {self.backend} {what}.", fix="Open an engine: localattn build makes one.")

    def rest(self) -> None:
        """Free memory until `wake` or the next run, where the session can; most sessions keep theirs."""
        return None

    def wake(self) -> None:
        """Prepare to run again after a `rest`."""
        return None

    @abstractmethod
    def _execute(self, inputs: Arrays) -> Arrays:
        """Run on inputs that already fit the model."""


def place(provider: str, plugin: str | None) -> str:
    """Describe where a session runs: its provider, and whether compiled kernels compute the attention nodes."""
    return f"{provider}, compiled kernel" if plugin else provider


def check_inputs(specs: Sequence[TensorSpec], inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the inputs as the engine needs them: in order, contiguous, in native byte order.

    Raises:
        UsageError: a name, dtype or shape does not fit `specs`; the error gives both. Sizes of dynamic axes must agree
            wherever the same name occurs.
    """
    check_names(specs, inputs)
    dynamic_sizes: dict[str, int] = {}
    ready: Arrays = {}
    for spec in specs:
        array = inputs[spec.name]
        if not isinstance(array, np.ndarray):
            raise misfit(spec, f"a {type(array).__name__}, not a numpy array")
        check_shape(spec, array.shape, dynamic_sizes)
        ready[spec.name] = _exact(spec, array)
    return ready


def check_names(specs: Sequence[TensorSpec], inputs: Mapping[str, Any]) -> None:
    """Refuse inputs of which one is missing or unknown.

    Raises:
        UsageError: it says which.
    """
    if not isinstance(inputs, Mapping):
        raise UsageError(
            f"The inputs came as a {type(inputs).__name__}.",
            why="A model's inputs have names.",
            fix=f"Give a dict of arrays: {'; '.join(spec.describe() for spec in specs) or 'nothing'}.",
        )
    known = {spec.name for spec in specs}
    unknown = [name for name in inputs if name not in known]
    missing = [spec.describe() for spec in specs if spec.name not in inputs]
    if missing or unknown:
        wrong = [f"Missing: {', '.join(missing)}."] if missing else []
        wrong += [f"Unknown: {', '.join(map(repr, unknown))}."] if unknown else []
        raise UsageError(
            "The inputs do not match the model's.",
            why=" ".join(wrong),
            fix=f"The model takes: {'; '.join(spec.describe() for spec in specs) or 'nothing'}.",
        )


def check_shape(spec: TensorSpec, shape: tuple[int, ...], dynamic_sizes: dict[str, int]) -> None:
    """Compare sizes; `dynamic_sizes` stores the first size seen of each named dimension.

    Raises:
        UsageError: they differ.
    """
    fits = len(shape) == len(spec.shape)
    for wanted, size in zip(spec.shape, shape, strict=False):
        if isinstance(wanted, str) and wanted != UNNAMED_DIMENSION:
            wanted = dynamic_sizes.setdefault(wanted, size)
        fits = fits and wanted in (size, UNNAMED_DIMENSION)
    if not fits:
        sizes = ", ".join(f"{name} = {size}" for name, size in dynamic_sizes.items())
        raise misfit(spec, f"shape {format_shape(shape)}" + (f" (with {sizes})" if sizes else ""))


_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _exact(spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
    """Convert an array to the wanted dtype, if that changes no value."""
    came, wanted = array.dtype.name, spec.dtype
    if came != wanted:
        widens = {came, wanted} <= _INTEGERS and np.can_cast(came, wanted)
        flags = {came, wanted} == {"bool", "uint8"} and bool((array <= 1).all())
        if not (widens or flags):
            raise misfit(spec, f"dtype {came}")
        array = array.astype(wanted)
    # Not `ascontiguousarray`, which turns a scalar into a vector.
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def misfit(spec: TensorSpec, came: str) -> UsageError:
    """Return the error for an input that `came` otherwise than the model takes it."""
    return UsageError(
        f"Input {spec.name!r} does not fit the model.",
        why=f"It came as {came}; wanted: {spec.dtype} {format_shape(spec.shape)}.",
        fix="Convert the array, or export the model for these shapes.",
    )
