"""Load and run a model with any engine: `load` chooses the backend by the file's suffix.

A backend is a module that defines a `Session`, and an entry in `BACKENDS`; nothing else changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..core.error_texts import argument
from ..core.errors import MissingDependency, UsageError
from ..core.limits import check_threads
from ..core.machine.process import import_without_telemetry
from ..core.storage.publishing import check_unchanged
from ..core.storage.reading import check_plain
from ..core.storage.wrong_file import refuse_wrong_file
from ..core.tensors import UNNAMED_DIMENSION, TensorSpec, format_shape
from ..onnx_graph.onnx_file import OnnxFile

__all__ = ["BACKENDS", "Arrays", "Backend", "Session", "TensorSpec", "check_inputs", "load", "place"]

Arrays = dict[str, NDArray[Any]]


class Session(ABC):
    """A model that is ready to run.

    Attributes:
        backend: the engine: "onnxruntime", "openvino", "tensorrt" or "tensorrt-rtx".
        provider: the provider that really runs ("cpu", "cuda", …); under "auto" it may be slower than the best one.
        plugin: path of the library whose compiled kernels compute the attention nodes; None if their ONNX functions do.
        inputs: what `run` takes, in the file's order.
        outputs: what `run` returns, in the file's order.
        notes: what a user should know of how it runs, a sentence each.
        watched: values whose size the session measures: the name in the file, and the module that computes it.
        peaks: the largest magnitude so far of each of these.
    """

    backend: str
    provider: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    notes: tuple[str, ...] = ()
    plugin: str | None = None
    watched: Sequence[tuple[str, str]] = ()
    peaks: NDArray[np.float32] | Sequence[float] = ()

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


@dataclass(frozen=True)
class Backend:
    """An engine that runs one kind of file.

    Args:
        name: its name in reports.
        module: module of this package that has its `open_file(path, provider, threads, plugin) -> Session`, imported
            only when such a file is opened. A backend that can compute in another precision than the file's takes
            `precision` as one more argument.
        needs: the name of the Python package that it imports.
        has: a name that the package must define; a package that was half removed still imports.
        install: the command that installs it.
        steps: module and class of its `StepSession`, imported only when a step file is opened, and made of
            `(file, sidecar, prefill, provider, threads, plugin)` and the precision.
    """

    name: str
    module: str
    needs: str
    has: str
    install: str
    steps: str = ""

    def require(self) -> Any:
        """Import and return what the backend needs.

        Raises:
            MissingDependency: it is not installed, or is installed and broken.
        """
        try:
            module = import_without_telemetry(self.needs)
        except ImportError as error:
            raise self._missing(str(error)) from error
        if not hasattr(module, self.has):
            raise self._missing(f"{self.needs} is installed only in part: it has no {self.has}.")
        return module

    def _missing(self, why: str) -> MissingDependency:
        return MissingDependency(
            f"{self.needs} is needed to run this file and cannot be imported.", why=why, fix=self.install
        )

    def open(self, path: Path | OnnxFile, provider: str, threads: int | None, plugin: str, *precision: str) -> Session:
        """Open a file with this backend; backends of ONNX files also take a file that was already read."""
        self.require()
        module = import_module(self.module, __package__)
        return cast("Session", module.open_file(path, provider, threads, plugin, *precision))


BACKENDS: dict[str, Backend] = {
    ".onnx": Backend(
        name="onnxruntime",
        module=".ort.session",
        needs="onnxruntime",
        has="InferenceSession",
        install="Install it: pip install onnxruntime (CPU), or pip install 'onnxruntime-gpu[cuda,cudnn]'.",
        steps=".ort.step_session.OnnxRuntimeStep",
    ),
    ".engine": Backend(
        name="tensorrt",
        module=".engine.session",
        needs="polygraphy",
        has="config",
        install="Install it: pip install 'localattn[tensorrt]', or for TensorRT-RTX pip install 'localattn[rtx]'.",
        steps=".engine.step_session.EngineStep",
    ),
}


# Other engines for ONNX files, by the value of `--runtime`.
RUNTIMES: dict[str, Backend] = {
    "onnxruntime": BACKENDS[".onnx"],
    "openvino": Backend(
        name="openvino",
        module=".openvino.session",
        needs="openvino",
        has="Core",
        install="Install it: pip install 'localattn[openvino]'.",
        steps=".openvino.step_session.OpenVinoStep",
    ),
}
# The runtimes that take a precision: "openvino:bf16".
_WITH_PRECISION = ("openvino",)
AUTO_RUNTIME = "auto"


def choose_runtime(suffix: str, runtime: str = AUTO_RUNTIME) -> tuple[Backend, tuple[str, ...]]:
    """Return the backend for files of a suffix, and the precision in the runtime's name, if any.

    Args:
        suffix: in lower case, one of `BACKENDS`.
        runtime: as of `load`.

    Raises:
        UsageError: no runtime has this name, or it does not run such files.
    """
    if runtime == AUTO_RUNTIME:
        return BACKENDS[suffix], ()
    name, _, precision = runtime.partition(":")
    if name not in RUNTIMES or (precision and name not in _WITH_PRECISION):
        raise UsageError(
            f"There is no runtime {runtime[:60]!r}.",
            fix=f"Known: {', '.join((AUTO_RUNTIME, *RUNTIMES))}; openvino:bf16 lets OpenVINO compute in bf16.",
        )
    if suffix != ".onnx":
        raise UsageError(
            f"A file named {suffix} does not run in {name}.",
            why="It runs in the engine that it was built for.",
            fix=f"Leave {argument('runtime')} out.",
        )
    return RUNTIMES[name], (precision,) if precision else ()


def place(provider: str, plugin: str | None) -> str:
    """Describe where a session runs: its provider, and whether compiled kernels compute the attention nodes."""
    return f"{provider}, compiled kernel" if plugin else provider


def load(
    path: str | Path | OnnxFile,
    provider: str = "auto",
    threads: int | None = None,
    *,
    verify: bool = True,
    plugin: str | Path = "auto",
    runtime: str = AUTO_RUNTIME,
) -> Session:
    """Open an exported model.

    Args:
        path: the model file, or an ONNX file that was already read; its suffix chooses the backend.
        provider: where to run it; "auto" takes the best that really starts (see `Session.provider`),
            any other name is used or refused.
        threads: CPU threads for one operator, from 1 to `core.limits.most_threads()`; None leaves it to the engine.
        verify: refuse a file that is not the one its sidecar was written for.
        plugin: library of compiled kernels: "auto" takes one that may be loaded by itself, from the installed package
            or the user's own cache (for the CPU the newest of this release, if it loads; for an engine the one with
            the SHA-256 it was built with); "none" takes none; the path of a library takes that one or fails.
        runtime: what runs an ONNX file: "auto" is onnxruntime; "openvino" computes in fp32, "openvino:bf16" and
            "openvino:fp16" in these. `provider` is then one of OpenVINO's devices: auto, cpu, gpu or npu.

    Raises:
        UsageError: no such file, a suffix no backend runs, a broken model, an unknown provider or runtime.
        CheckFailed: the file or its external data was altered after its facts were written.
        MissingDependency: the engine is not installed, or the provider asked for does not start.
    """
    check_threads(threads)
    file = find_model(path)
    if verify:
        check_file(file)
    suffix = ".onnx" if isinstance(file, OnnxFile) else file.suffix.lower()
    backend, precision = choose_runtime(suffix, runtime)
    return backend.open(file, provider, threads, str(plugin), *precision)


def find_model(path: str | Path | OnnxFile) -> Path | OnnxFile:
    """Return what `load` opens: an ONNX file, read for all that a command asks of it, or the path of an engine.

    Raises:
        UsageError: no such file, or a suffix no backend runs.
    """
    if isinstance(path, OnnxFile):
        return path
    path = Path(path)
    if path.suffix.lower() != ".onnx":  # of an ONNX file `OnnxFile.read` looks at the bytes that it reads
        refuse_wrong_file(path)
    backend = BACKENDS.get(path.suffix.lower())
    if backend is None:
        raise UsageError(
            f"Cannot run {path}.",
            why=f"No backend runs files named {path.suffix or 'without a suffix'}.",
            fix=f"Known: {', '.join(BACKENDS)}.",
        )
    check_plain(path)
    if not path.is_file():
        why = "There is no such file."
        raise UsageError(f"Cannot run {path}.", why=why, fix="Give the path of an exported model.")
    return OnnxFile.read(path) if path.suffix.lower() == ".onnx" else path


def check_file(file: Path | OnnxFile) -> None:
    """Refuse a file that is not the one its sidecar was written for.

    Raises:
        CheckFailed: the SHA-256 of the file or of its external data differs.
    """
    if isinstance(file, OnnxFile):
        file.check_unchanged()
    else:
        check_unchanged(file)


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
