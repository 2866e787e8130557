"""The onnxruntime backend: choose a provider, start it, and report the one that really runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....core.error_texts import argument
from ....core.errors import LocalAttnError, MissingDependency, UsageError
from ....core.machine.execution_providers import CPU
from ....core.storage.library_store import AUTO, NONE
from ....core.tensors import SEQUENCE, UNNAMED_DIMENSION, TensorSpec
from ....core.versions import too_new
from ....onnx_graph.library_errors import did_not_run
from ....onnx_graph.onnx_file import NotAModel, OnnxFile
from ....onnx_graph.precision.half_to_fp32 import FP16_ROUNDS_UP, LIMIT, NO_LIMIT, PEAKS
from ....onnx_graph.summary import check_nodes
from ..session import Arrays, Session, check_inputs
from .custom_ops import CompiledKernel, choose, fall_back, lacking
from .package import PACKAGE
from .providers import (
    AUTO_ORDER,
    FATAL,
    PROVIDERS,
    Provider,
    emulating_bf16,
    load_libraries,
    model_for,
    new_session,
    not_loaded,
    not_running,
    watching_fp16,
)

# How onnxruntime computes a file of fp16 on the CPU.
Halves = Literal["as usual", "rounded"]
_log = logging.getLogger(__name__)

# onnxruntime's messages for an element type that neither a provider nor a registered library computes in.
_NO_KERNEL = ("Could not find an implementation", "'tensor(bfloat16)' of input parameter")

ROUNDED = "fp16 is rounded here as a GPU rounds it: the numbers are those of fp16, the time is not"
EMULATED = "bf16 products emulated in fp32 by this provider: the numbers are those of bf16, the time is not"

# Characters of a reason that are shown: onnxruntime says what it reads at the end of a long one.
_LONGEST_REASON = 800

# Advice for a node that a compiled kernel refuses.
REFUSED = "Export the model again; localattn does not write such a node."

# Advice for a refused model, by a piece of onnxruntime's message.
_REMEDIES = (
    ("rotobuf parsing failed", "The file is cut or is not ONNX: copy it again, or export it again."),
    ("No graph was found", "The file holds no model: copy it again, or export it again."),
    ("not a registered function/op", "Export with the function definition, or register a kernel for that node."),
    ("External data path", "Keep the external data file next to the model, under its original name."),
    ("External initializer", "The external data file is cut: copy it again, or export the model again."),
)


@dataclass(frozen=True)
class _Setup:
    """A way to run a file, and the settings of its session.

    Args:
        file: the model.
        provider: where it runs.
        kernel: compiled kernels to register, on the CPU.
        threads: of one operator; None leaves it to onnxruntime.
        lean: use as little memory as onnxruntime can, and keep none of it between runs.
        arranged: keep a copy of each constant matrix, in the order in which products read it.
        halves: how fp16 is computed on the CPU.
    """

    file: OnnxFile
    provider: Provider
    kernel: CompiledKernel | None = None
    threads: int | None = None
    lean: bool = False
    arranged: bool = True
    halves: Halves = "as usual"

    @property
    def place(self) -> str:
        """Where it runs, for the log."""
        return self.provider.name if self.kernel is None else f"{self.provider.name} with {self.kernel.library.path}"


class OnnxRuntimeSession(Session):
    """An onnxruntime `InferenceSession` behind the common interface.

    Args:
        session: the onnxruntime session.
        provider: the name in `PROVIDERS` of the provider that really runs.
        source: the file's name, for errors.
        notes: as of `Session`.
        kernel: the compiled kernels that it uses.
        reopen: opens a lean session again; such a session frees memory after each run and can `rest`.
        watched: of a copy that `half_to_fp32.watch` made, the values that it counts; None for other models. Its input
            `LIMIT` and its output `PEAKS` are not the file's.
        path: of the file, next to which its sidecar lies; None where there is none.

    Attributes:
        peaks: the largest magnitude so far of each watched value, before it was rounded to fp16.

    Raises:
        UsageError: an input or output is no tensor of a numpy type.
    """

    backend = "onnxruntime"

    def __init__(
        self,
        session: Any,
        provider: str,
        source: str,
        notes: Sequence[str] = (),
        kernel: CompiledKernel | None = None,
        reopen: Callable[[], Any] | None = None,
        watched: Sequence[tuple[str, str]] | None = None,
        path: Path | None = None,
    ) -> None:
        self._path = path
        self._open, self._reopen = session, reopen
        self._source = source
        self._run_options = None if reopen is None else _giving_back()
        self.provider = provider
        self.notes = tuple(notes)
        self.kernel = kernel
        self.plugin = None if kernel is None else str(kernel.library.path)
        self._rounds, self.watched = watched is not None, list(watched or ())
        own = (LIMIT, PEAKS) if self._rounds else ()
        self.inputs = [_spec(value, source) for value in session.get_inputs() if value.name not in own]
        self.outputs = [_spec(value, source) for value in session.get_outputs() if value.name not in own]
        self.peaks, self.peaks_without_overflow = (np.zeros(len(self.watched), np.float32) for _ in range(2))
        self.not_finite = np.zeros(len(self.watched), np.bool_)

    @property
    def _session(self) -> Any:
        """onnxruntime's session, opened again after a `rest`."""
        if self._open is None:
            assert self._reopen is not None
            self._open = self._reopen()
        return self._open

    def rest(self) -> None:
        """Close a lean session to free its memory; the next run opens the file again."""
        if self._reopen is not None:
            self._open = None

    def wake(self) -> None:
        """Open the file again after a `rest`."""
        _ = self._session

    def run_in_part(self, inputs: Mapping[str, NDArray[Any]], part: Callable[[NDArray[Any]], NDArray[Any]]) -> Arrays:
        """As `Session.run_in_part`; a lean session copies that part alone."""
        if self.watched:
            return super().run_in_part(inputs, part)
        return self._run_once(check_inputs(self.inputs, inputs), NO_LIMIT, part)[0]

    def _execute(self, inputs: Arrays) -> Arrays:
        outputs, peaks = self._run_once(inputs, NO_LIMIT)
        if peaks is None:
            return outputs
        self.peaks = np.fmax(self.peaks, peaks)
        self.not_finite = np.logical_or(self.not_finite, ~np.isfinite(peaks))
        if not (peaks < FP16_ROUNDS_UP).all():
            overflows = bool((np.isfinite(peaks) & (peaks >= FP16_ROUNDS_UP)).any())  # the others follow, or are masks
            without, larger = self._run_once(inputs, FP16_ROUNDS_UP)
            assert larger is not None, "the same values are watched"
            self.peaks_without_overflow = np.fmax(self.peaks_without_overflow, larger)
            self.overflow_shows |= any(
                not np.array_equal(found, without[name], equal_nan=True) or (overflows and not np.isfinite(found).all())
                for name, found in outputs.items()
            )
        return outputs

    def _run_once(
        self, inputs: Arrays, limit: float, part: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
    ) -> tuple[Arrays, NDArray[np.float32] | None]:
        """Run on checked inputs; return the outputs, and the sizes of the watched values, None if there are none.

        Args:
            inputs: of the file.
            limit: from where on a session that rounds fp16 does not round.
            part: returns what is kept of an output.
        """
        names = [spec.name for spec in self.outputs] + [PEAKS] * bool(self.watched)
        fed = {**inputs, LIMIT: np.array(limit, np.float32)} if self._rounds else inputs
        try:
            results = self._session.run(names, fed, self._run_options)
        except Exception as error:
            raise (self._too_long(inputs) or self._did_not_run(error)) from error
        # A lean session's outputs are copied: otherwise each would keep part of the arena as long as it is used.
        outputs: Arrays = {}
        for spec, result in zip(self.outputs, results, strict=False):
            kept = part(np.asarray(result))
            shares = self._reopen is not None and np.may_share_memory(kept, result)
            outputs[spec.name] = kept.copy() if shares else kept
        return outputs, results[-1] if self.watched else None

    def bound(self, inputs: Arrays) -> Callable[[], None]:
        """Put inputs and outputs where the provider reads and writes them; return a call that only computes."""
        binding = self.io_binding()
        device = PROVIDERS[self.provider].device
        make = PACKAGE.require().OrtValue.ortvalue_from_numpy
        values = {name: make(array, device, 0) for name, array in inputs.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for spec in self.outputs:
            binding.bind_output(spec.name, device, 0)
        self._run_first(binding)  # the outputs are allocated in this run; all later runs write to the same place

        def call(_keep: object = values) -> None:  # on the CPU the buffers share the arrays' memory without owning it
            self.run_bound(binding)

        return call

    def _run_first(self, binding: Any) -> None:
        """Run once on bound buffers before others do."""
        self.run_bound(binding)

    def io_binding(self) -> Any:
        """Return onnxruntime's `IOBinding` of this session: buffers that `run_bound` reads and writes."""
        return self._session.io_binding()

    def run_bound(self, binding: Any) -> None:
        """Run once on bound buffers.

        Raises:
            UsageError: the engine refuses their values.
        """
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise self._did_not_run(error) from error

    def _too_long(self, inputs: Arrays) -> UsageError | None:
        """Return the error for an input that is longer than the file's longest sequence; None if none is."""
        from ....core.documents.sidecar import read_sidecar

        try:
            sidecar = None if self._path is None else read_sidecar(self._path)
        except LocalAttnError:  # a broken sidecar tells nothing
            return None
        longest = None if sidecar is None else sidecar.seq_len
        for spec in self.inputs:
            for size, given in zip(spec.shape, inputs[spec.name].shape, strict=True):
                if size == SEQUENCE and longest is not None and given > longest:
                    return UsageError(
                        f"Input {spec.name!r} has {given} on its axis {SEQUENCE!r}.",
                        why=f"{self._source} takes 1 to {longest}.",
                        fix=f"Cut it, or export the file for longer sequences: {argument('seq_len', given)}.",
                    )
        return None

    def _did_not_run(self, error: Exception) -> LocalAttnError:
        return did_not_run(str(self._source), error, one_line(error))


def open_file(
    path: str | Path | OnnxFile,
    provider: str = "auto",
    threads: int | None = None,
    plugin: str = AUTO,
    *,
    lean: bool = False,
    arranged: bool = True,
    halves: Halves = "as usual",
) -> OnnxRuntimeSession:
    """Open an ONNX file; external data is looked for next to it. Arguments as of `runtime.session.load`.

    A lean session uses less memory than others on the CPU, and keeps none between runs. One that is not arranged opens
    faster and keeps no copies of matrices, which each run then arranges anew.

    On the CPU onnxruntime does not round between two operators of fp16. With "rounded" it computes what the file says,
    as a GPU does, and watches how large the values are. Inputs on which one is beyond fp16 run a second time without
    overflow, and the outputs are compared.

    Raises:
        UsageError: the file is broken or unsupported.
        CheckFailed: the file was changed meanwhile.
        MissingDependency: onnxruntime is missing, the provider or library asked for does not start, or the file needs
            compiled kernels and there are none.
    """
    file = OnnxFile.read(path)
    file.check()
    kernel = choose(plugin, file.operators)
    ort = PACKAGE.require()
    failures: list[tuple[_Setup, Exception]] = []
    for known, registered in _candidates(ort, provider, kernel):
        setup = _Setup(file, known, registered, threads, lean and not known.chain, arranged, halves)
        _log.debug("trying %s", setup.place)
        try:
            session, notes, watched = _create(ort, setup)
        except Exception as error:
            _log.info("%s does not open on %s: %s", file.name, setup.place, _reason(error))
            failures.append((setup, error))
            continue
        file.check_same()
        _log.info("%s runs on %s", file.name, setup.place)
        without = next((error for failed, error in failures if failed.kernel is not None), None)
        if without is not None:
            fall_back(_reason(without))  # the model is not at fault: it opens without the library
        used = registered if registered is not None and registered.used else None
        reopen = partial(_create_again, setup) if setup.lean else None
        return OnnxRuntimeSession(session, known.name, file.name, notes, used, reopen, watched, Path(file))
    raise _report(ort, failures)


def open_bytes(
    model: bytes, provider: str = "auto", threads: int | None = None, plugin: str = NONE
) -> OnnxRuntimeSession:
    """Open a serialized model without external data; raises what `open_file` raises."""
    return open_file(OnnxFile.of_bytes(model), provider, threads, plugin)


def _candidates(
    ort: Any, provider: str, kernel: CompiledKernel | None
) -> Iterator[tuple[Provider, CompiledKernel | None]]:
    """Yield the ways to run a file, best first: providers, and for the CPU the compiled kernels to register.

    A library that the user did not name is skipped if it does not load. A library or provider that the user named has
    no fallback.

    Raises:
        UsageError: a library was named with a provider that cannot use it.
    """
    asked = kernel if kernel is not None and kernel.asked else None
    if asked is not None and provider == "auto":
        provider = "cpu"
    for known in [PROVIDERS[name] for name in (AUTO_ORDER if provider == "auto" else (provider,))]:
        if asked is not None and known.chain:
            raise UsageError(
                f"The library {asked.library.path} cannot be used on the provider {provider!r}.",
                why="Its kernels run in onnxruntime on the CPU.",
                fix=f"Leave {argument('plugin')} out, or choose {argument('provider', 'cpu')}.",
            )
        if provider == "auto" and known.chain and known.chain[0] not in ort.get_available_providers():
            _log.info("%s is not in this onnxruntime build", known.chain[0])
            continue
        if kernel is not None and not known.chain:
            yield known, kernel
        if asked is None:
            yield known, None


def _create_again(setup: _Setup) -> Any:
    session, *_ = _create(PACKAGE.require(), setup)
    setup.file.check_same()
    return session


def _report(ort: Any, failures: Sequence[tuple[_Setup, Exception]]) -> LocalAttnError:
    """Return the error of the last way to run a file, where none opened it."""
    setup, error = failures[-1]
    file, reason = setup.file, _reason(error)
    if isinstance(error, MissingDependency | UsageError) and not isinstance(error, NotAModel):
        return error
    if setup.provider.chain:
        # If the CPU refuses the model too, the model is at fault and not the provider.
        cpu = _Setup(file, PROVIDERS["cpu"])
        try:
            _create(ort, cpu)
        except Exception as on_cpu:
            return _report(ort, [(cpu, on_cpu)])
        refused = not_running(ort, setup.provider, reason)
        refused.__cause__ = error
        return refused
    unusable: LocalAttnError | None = _invalid_node(file) or lacking(file.name, reason)
    if isinstance(unusable, MissingDependency):
        refused_by = (e for failed, e in failures[:-1] if failed.kernel and not isinstance(e, MissingDependency))
        refusal = next(refused_by, None)
        if refusal is not None:  # there is a kernel, and it refuses the node, which has no ONNX function
            unusable = UsageError(f"{file.name} cannot be loaded.", why=_reason(refusal), fix=REFUSED)
    if unusable is None:
        known = (fix for piece, fix in _REMEDIES if piece in reason)
        fix = too_new(reason) or next(known, "Check it with onnx.checker.")
        unusable = UsageError(f"{file.name} cannot be loaded.", why=reason, fix=fix)
    unusable.__cause__ = error
    return unusable


def _invalid_node(file: OnnxFile) -> UsageError | None:
    """Return the error that names the invalid attention node of a file, which onnxruntime's does not; None if none is.

    A model in memory is left to the engine: its caller made the node.
    """
    if file.path is None:
        return None
    try:
        check_nodes(file.name, file.model)
    except NotAModel:  # onnxruntime's message already names the problem of the file
        return None
    except UsageError as error:
        return error
    return None


def _reason(error: Exception) -> str:
    return error.why if isinstance(error, MissingDependency) else one_line(error)


def _create(ort: Any, setup: _Setup) -> tuple[Any, tuple[str, ...], Sequence[tuple[str, str]] | None]:
    """Create onnxruntime's session, notes for its user, and what it watches, None where it does not round fp16."""
    provider, kernel = setup.provider, setup.kernel
    wanted = (*provider.chain, CPU)[0]
    if wanted not in ort.get_available_providers():
        raise not_running(ort, provider, f"{wanted} is not in this onnxruntime build")
    load_libraries(ort, provider)
    options = session_options(ort, setup.threads, kernel)
    # Memory reuse keeps a buffer for each shape until the last layer; the memory pattern adds another block from the
    # second run on. The arena stays: without it every tensor is new memory, whose page faults took as long as the run.
    options.enable_mem_reuse = options.enable_mem_pattern = not setup.lean
    if not setup.arranged:
        options.add_session_config_entry("session.disable_prepacking", "1")
    failure: Exception | None = None
    given = model_for(ort, provider, setup.file, options)
    rounds = setup.halves == "rounded" and not provider.chain
    watching = watching_fp16(setup.file, compiled=kernel is not None) if rounds else None
    if watching is not None:
        copy, watched = watching
        return new_session(ort, replace(given, model=copy), options), (ROUNDED,), watched
    try:
        session = new_session(ort, given, options)
        started = session.get_providers()[0]
        if provider.chain and started != wanted:
            reason, lacks = f"{wanted} did not start; {started} did", not_loaded(ort, wanted)
            raise not_running(ort, provider, f"{reason}: {lacks}" if lacks else reason)
        tensors = (*session.get_inputs(), *session.get_outputs())
        if provider.chain or not any("bfloat16" in tensor.type for tensor in tensors):
            on_cpu = provider.notes((op_type for _, op_type in setup.file.operators), ort.__version__)
            return session, (*given.notes, *on_cpu), None
    except Exception as error:
        if provider.chain or not any(text in str(error) for text in _NO_KERNEL):
            raise
        failure = error
    in_fp32 = emulating_bf16(setup.file, compiled=kernel is not None)
    if in_fp32 is None:
        assert failure is not None
        raise failure
    return new_session(ort, replace(given, model=in_fp32), options), (EMULATED,), None


def _giving_back() -> Any:
    """Return `RunOptions` with which the CPU's arena is freed after the run."""
    options = PACKAGE.require().RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def session_options(ort: Any, threads: int | None, kernel: CompiledKernel | None = None) -> Any:
    """Return the `SessionOptions` that every session here starts from.

    Raises:
        MissingDependency: onnxruntime does not load the library of the kernel.
    """
    options = ort.SessionOptions()
    options.log_severity_level = FATAL  # onnxruntime logs on stderr what it also raises
    if threads is not None:
        options.intra_op_num_threads = threads
    if kernel is not None:
        kernel.register(ort, options)
    return options


_NUMPY_NAMES = {"float": "float32", "double": "float64"}
_TENSOR = re.compile(r"tensor\((float|double|float16|bfloat16|bool|u?int(?:8|16|32|64))\)")


def _spec(value: Any, source: str) -> TensorSpec:
    """Describe an input or output of onnxruntime with numpy's type names."""
    match = _TENSOR.fullmatch(value.type)
    if match is None:
        raise UsageError(f"{source} cannot be run.", why=f"{value.name!r} is a {value.type}, not a tensor of numbers.")
    shape = (size if isinstance(size, int) or size else UNNAMED_DIMENSION for size in value.shape)
    return TensorSpec(value.name, _NUMPY_NAMES.get(match[1], match[1]), tuple(shape))


# What an onnxruntime message adds to its reason: code, path, source line and C++ signature.
_WRAPPING = (
    re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : "),
    re.compile(r"^Load model from .*? failed:", re.DOTALL),
    re.compile(r"/onnxruntime_src/\S+ .*?\)(?: const)? (?=[A-Z])"),
)


def one_line(error: Exception) -> str:
    """Return the reason in an onnxruntime error, without what it adds, in one line of limited length."""
    text = str(error)
    for wrapping in _WRAPPING:
        text = wrapping.sub("", text)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
