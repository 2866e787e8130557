"""Where onnxruntime runs a model: its execution providers, and what each needs besides the model."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ....core.errors import MissingDependency
from ....core.machine import process
from ....core.machine.execution_providers import CPU, CUDA, TENSORRT, short_name
from ....core.machine.processor import machine
from ....core.storage.cpu_library import computes
from ....core.versions import parse

if TYPE_CHECKING:
    from ....onnx_graph.onnx_file import OnnxFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Provider:
    """A place to run a model.

    Args:
        name: as users call it.
        chain: onnxruntime's execution providers, best first; the CPU is added as the last.
        options: options of the first of the chain.
        functions: whether it takes models with functions.
        precision: element type of a model → options that the first of the chain needs to compute in it.
        package: Python package that brings libraries which the first of the chain links to.
        device: onnxruntime's name of the device that holds its tensors.
        on_cpu: operator type that it leaves to the CPU → the first release of onnxruntime with a kernel; "" for none.
        cuda_graph: options with which the first of the chain captures and replays a CUDA graph; empty if it cannot.
        compiles: whether it compiles the graph into its own form, which onnxruntime cannot save as it runs.
        sums_halves: processor on which it sums products of fp16 in fp16 → the first release that does so.
    """

    name: str
    chain: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)
    functions: bool = True
    precision: Mapping[str, dict[str, str]] = field(default_factory=dict)
    package: str = ""
    device: str = "cpu"
    on_cpu: Mapping[str, str] = field(default_factory=dict)
    cuda_graph: Mapping[str, str] = field(default_factory=dict)
    compiles: bool = False
    sums_halves: Mapping[str, str] = field(default_factory=dict)

    def sums_halves_in_fp16(self, release: str) -> bool:
        """Return whether products of fp16 lose digits on this machine in this release of onnxruntime."""
        first = self.sums_halves.get(machine())
        return first is not None and parse(release) >= parse(first)

    def notes(self, op_types: Iterable[str], release: str) -> tuple[str, ...]:
        """Return notes for users of a model with these operators, for this release of onnxruntime."""
        notes = []
        for op_type in sorted({*self.on_cpu} & {*op_types}):
            first = self.on_cpu[op_type]
            if not first or parse(release) < parse(first):
                since = f" before onnxruntime {first}" if first else ""
                notes.append(f"{op_type} runs on the CPU: {self.name} has no kernel for it{since}")
        return tuple(notes)


_INT8 = dict.fromkeys(("DynamicQuantizeLinear", "MatMulInteger"), "")  # of int8 weights
# The norm of the residual streams in step files: three nodes of other operators cost 7 % of a token on the CPU.
_CUDA_LACKS = {**_INT8, "LpNormalization": "1.27"}

# TF32 is on by default in onnxruntime's CUDA provider and rounds fp32 products to 10 bits: an fp32 model would miss its
# own parity tolerance.
PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("cpu", (), sums_halves={"aarch64": "1.29"}),
        Provider(
            "cuda",
            (CUDA,),
            {"use_tf32": "0"},
            device="cuda",
            on_cpu=_CUDA_LACKS,
            cuda_graph={"enable_cuda_graph": "1"},
        ),
        Provider(
            "tensorrt",
            (TENSORRT, CUDA),
            functions=False,
            precision={"float16": {"trt_fp16_enable": "True"}, "bfloat16": {"trt_bf16_enable": "True"}},
            package="tensorrt",
            device="cuda",
            on_cpu=_INT8,
            cuda_graph={"trt_cuda_graph_enable": "True"},
            compiles=True,
        ),
    )
}

# The providers that "auto" tries, best first. TensorRT is left out, because it builds an engine before the first run,
# which takes minutes.
AUTO_ORDER = ("cuda", "cpu")

SUMMED = "fp16 products are summed in fp32, as elsewhere; onnxruntime by itself sums them in fp16 on this processor"

# Advice for a provider that does not run, by a piece of the reason.
_TENSORRT = "Install the TensorRT 10 that it links to: pip install 'tensorrt<11'."
_REMEDIES = (
    ("install TensorRT libraries", _TENSORRT),
    ("libnvinfer", _TENSORRT),
    ("libnvonnxparser", _TENSORRT),
    ("cannot open shared object", "Install CUDA and cuDNN for it: pip install 'localattn[gpu]'."),
    ("larger than 2 GB", "Build an engine of it: localattn build MODEL."),
)
_OTHER_PACKAGE = (
    "pip uninstall onnxruntime onnxruntime-gpu, then pip install 'localattn[gpu]': "
    "the two packages overwrite each other, keep one."
)


# onnxruntime's severity of messages: only those that end the process.
FATAL = 4


def new_session(ort: Any, given: SessionInput, options: Any) -> Any:
    """Open onnxruntime's session on the providers asked for, or raise its error.

    Up to onnxruntime 1.22 a session that fails on its provider is opened again on the CPU, whatever `enable_fallback`
    says, with a printed message; in every release a run that fails may do the same. This session raises instead, when
    it opens and when it runs.

    onnxruntime's default logger warns for every layer of a step file (CUDA's ScatterND), and no session option changes
    that: it is silenced only in this package's own processes.
    """
    if process.owned:
        ort.set_default_logger_severity(FATAL)

    class Strict(ort.InferenceSession):  # type: ignore[misc]
        _enable_fallback = property(lambda self: False, lambda self, value: None)

    return Strict(given.model, options, providers=given.providers, enable_fallback=0)


def load_libraries(ort: Any, provider: Provider) -> None:
    """Load libraries that pip put outside the system's search path: CUDA, cuDNN, and the provider's own package."""
    preload = getattr(ort, "preload_dlls", None)
    if provider.chain and preload is not None:
        if isinstance(preload, FunctionType):
            # It prints a line for each missing library (see `not_loaded`); here these go to the log.
            names = {**preload.__globals__, "print": _log.debug}
            preload = FunctionType(preload.__code__, names, argdefs=preload.__defaults__)
        preload()
    if provider.package:
        with contextlib.suppress(ImportError, OSError):  # otherwise onnxruntime looks for them itself
            importlib.import_module(provider.package)


@dataclass(frozen=True)
class SessionInput:
    """The arguments of an `InferenceSession`.

    Args:
        model: the model, or a copy that the provider accepts or computes correctly.
        providers: the argument `providers`.
        notes: what users should know of the copy.
    """

    model: bytes
    providers: list[Any]
    notes: tuple[str, ...] = ()


# onnxruntime's key for the folder of external data, used where the model is given as bytes.
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"


def model_for(
    ort: Any, provider: Provider, file: OnnxFile, options: Any, more: Mapping[str, str] | None = None
) -> SessionInput:
    """Return the model and providers to open a session with on this provider.

    Args:
        ort: onnxruntime.
        provider: where it shall run.
        file: the model.
        options: the `SessionOptions` of the session; the folder of external data is added where needed.
        more: options for the provider.

    Raises:
        UsageError: the file is no ONNX model, or its external data cannot be read.
        ValueError: of `OnnxFile.read_weights`.
    """
    if file.folder is not None:
        options.add_session_config_entry(_DATA_FOLDER, str(file.folder))
    model, chosen = file.for_engines(), dict(more or {})
    notes: tuple[str, ...] = ()
    if provider.sums_halves_in_fp16(ort.__version__):
        from ....onnx_graph.precision import fp16_matmul_in_fp32

        wide = fp16_matmul_in_fp32.apply(model)
        if wide is not model:
            _log.info("pass fp16_matmul_in_fp32 applied to %s", file.name)
            model, notes = wide, (SUMMED,)
    elif provider.precision or not provider.functions:
        from ....onnx_graph import inlining
        from ....onnx_graph.graph_values import element_types, outside_weights

        for name in element_types(model) & provider.precision.keys():
            chosen = {**provider.precision[name], **chosen}
        if model.functions:
            model = inlining.apply(file.read_weights(file.parse()))
            _log.info("pass inlining applied to %s for %s", file.name, provider.name)
        elif outside_weights(model):
            with contextlib.suppress(ValueError):  # too large: the provider may find them itself
                model = file.read_weights(file.parse())
    chain: list[Any] = [*provider.chain, CPU]
    chosen = {**provider.options, **chosen}
    if chosen:
        chain[0] = (chain[0], chosen)
    return SessionInput(model.SerializeToString(), chain, notes)


def emulating_bf16(file: OnnxFile, *, compiled: bool) -> bytes | None:
    """Return the model in fp32 (`onnx_graph.precision.half_to_fp32`), or None if it has no bf16.

    Args:
        file: the model.
        compiled: leave the nodes that the library of compiled kernels computes as they are.
    """
    from ....onnx_graph import inlining
    from ....onnx_graph.precision import half_to_fp32

    model = file.for_engines()
    copy = half_to_fp32.apply(model, computes if compiled else inlining.no_calls)
    if copy is model:
        return None
    _log.info("pass half_to_fp32 applied to %s", file.name)
    serialized: bytes = copy.SerializeToString()
    return serialized


def watching_fp16(file: OnnxFile, *, compiled: bool) -> tuple[bytes, list[tuple[str, str]]] | None:
    """Return the model in fp32, watched where the file is fp16, or None if nothing in it is.

    Args:
        file: the model.
        compiled: leave the nodes that the library of compiled kernels computes as they are.

    Returns:
        The copy, and the values that it watches, as `onnx_graph.precision.half_to_fp32.watch` has them.
    """
    from ....onnx_graph import inlining
    from ....onnx_graph.precision import half_to_fp32

    model = file.for_engines()
    copy = half_to_fp32.watch(model, computes if compiled else inlining.no_calls)
    if copy.model is model:
        return None
    _log.info("pass half_to_fp32 applied to %s", file.name)
    return copy.model.SerializeToString(), copy.values


def not_loaded(ort: Any, execution_provider: str) -> str:
    """Return what an execution provider's library lacks, as the system's loader reports it; "" if it loads.

    onnxruntime itself only logs it.
    """
    name = short_name(execution_provider).lower()
    library = Path(str(getattr(ort, "__file__", ""))).parent / "capi" / f"libonnxruntime_providers_{name}.so"
    if not library.is_file():
        return ""
    try:
        # Its functions come from the library that both share; a missing dependency is reported before them.
        ctypes.CDLL(str(library.with_name("libonnxruntime_providers_shared.so")), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return ""


def not_running(ort: Any, provider: Provider, reason: str) -> MissingDependency:
    """Return the error for a provider that did not start."""
    have = ", ".join(ort.get_available_providers())
    return MissingDependency(
        f"The provider {provider.name!r} does not run here.",
        why=f"{reason} (onnxruntime {ort.__version__} has: {have}).",
        fix=next((fix for piece, fix in _REMEDIES if piece in reason), _OTHER_PACKAGE),
    )
