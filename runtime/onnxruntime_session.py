"""The onnxruntime backend: choose a provider, start it, and say truthfully which one runs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import MissingDependency, UsageError
from ..core.tensors import UNNAMED_DIMENSION, TensorSpec
from .onnx_calls import check_calls
from .session import BACKENDS, Arrays, Session

_BACKEND = BACKENDS[".onnx"]


@dataclass(frozen=True)
class Provider:
    """One place to run.

    Args:
        name: as users call it.
        chain: onnxruntime's execution providers, best first; the CPU is added as the last.
        options: options of the first of the chain.
    """

    name: str
    chain: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)


_CPU = "CPUExecutionProvider"

# TF32 is on by default in onnxruntime's CUDA provider and rounds fp32 products to 10 bits: an fp32
# model would miss its own parity tolerance.
PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("cpu", ()),
        Provider("cuda", ("CUDAExecutionProvider",), {"use_tf32": "0"}),
        Provider("tensorrt", ("TensorrtExecutionProvider", "CUDAExecutionProvider")),
    )
}

# What "auto" tries, best first. TensorRT is left out: it builds an engine before the first run, which
# takes minutes that nobody asked for.
AUTO_ORDER = ("cuda", "cpu")

# onnxruntime logs on stderr what it also raises; 4 keeps only what ends the process.
_FATAL_ONLY = 4

# What to do about a refused model, by a piece of onnxruntime's message.
_REMEDIES = (
    ("rotobuf parsing failed", "The file is cut or is not ONNX: copy it again, or export it again."),
    ("No graph was found", "The file holds no model: copy it again, or export it again."),
    ("not a registered function/op", "Export with the function body, or register a kernel for that node."),
    ("External data path", "Keep the external data file beside the model, under its original name."),
    ("External initializer", "The external data file is cut: copy it again, or export the model again."),
    ("Unsupported model IR version", "Update onnxruntime, or export with an older opset."),
    ("Opset", "Update onnxruntime, or export with an older --opset."),
)


class OnnxRuntimeSession(Session):
    """An onnxruntime `InferenceSession` behind the common interface.

    Args:
        session: the onnxruntime session.
        provider: the name in `PROVIDERS` of what really runs.
        source: the file's name, for errors.

    Raises:
        UsageError: an input or output is no tensor of a numpy type.
    """

    backend = "onnxruntime"

    def __init__(self, session: Any, provider: str, source: str) -> None:
        # onnxruntime would otherwise print to stdout and go on, on another provider, after an error.
        session.disable_fallback()
        self._session = session
        self._source = source
        self.provider = provider
        self.inputs = [_spec(value, source) for value in session.get_inputs()]
        self.outputs = [_spec(value, source) for value in session.get_outputs()]

    def _execute(self, inputs: Arrays) -> Arrays:
        names = [spec.name for spec in self.outputs]
        try:
            results = self._session.run(names, inputs)
        except Exception as error:
            raise self._did_not_run(error) from error
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}

    def io_binding(self) -> Any:
        """onnxruntime's `IOBinding` of this session: buffers that `run_bound` reads and writes."""
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

    def _did_not_run(self, error: Exception) -> UsageError:
        return UsageError(
            f"{self._source} did not run on these inputs.",
            why=_one_line(error),
            fix="Check that the values fit the model: tokens below its vocabulary size, enough memory.",
        )


def open_file(path: Path, provider: str = "auto", threads: int | None = None) -> OnnxRuntimeSession:
    """Open an ONNX file; external data is looked for beside it.

    Raises:
        UsageError: the file is broken or unsupported, or the provider unknown.
        MissingDependency: onnxruntime is missing, or the provider asked for does not start.
    """
    check_calls(path)
    return _open(str(path), str(path), provider, threads)


def open_bytes(model: bytes, provider: str = "auto", threads: int | None = None) -> OnnxRuntimeSession:
    """Open a serialized model without external data; raises what `open_file` raises."""
    return _open(model, "The model in memory", provider, threads)


def _open(model: str | bytes, source: str, provider: str, threads: int | None) -> OnnxRuntimeSession:
    if provider != "auto" and provider not in PROVIDERS:
        raise UsageError(f"There is no provider {provider!r}.", fix=f"Known: auto, {', '.join(PROVIDERS)}.")
    ort = _BACKEND.require()
    if provider != "auto":
        return _open_exactly(ort, model, source, PROVIDERS[provider], threads)
    for name in AUTO_ORDER[:-1]:
        candidate = PROVIDERS[name]
        if candidate.chain[0] in ort.get_available_providers():
            with contextlib.suppress(MissingDependency):
                return _open_exactly(ort, model, source, candidate, threads)
    return _open_exactly(ort, model, source, PROVIDERS[AUTO_ORDER[-1]], threads)


def _open_exactly(
    ort: Any, model: str | bytes, source: str, provider: Provider, threads: int | None
) -> OnnxRuntimeSession:
    """Open on this provider and no other."""
    wanted = (*provider.chain, _CPU)[0]
    if wanted not in ort.get_available_providers():
        raise _not_running(ort, provider, f"{wanted} is not in this onnxruntime build")
    try:
        session = _create(ort, model, provider, threads)
    except Exception as error:
        reason = _one_line(error)
        if provider.chain:
            # The model or the provider? If the CPU refuses it too, the model: that call raises.
            _open_exactly(ort, model, source, PROVIDERS["cpu"], threads)
            raise _not_running(ort, provider, reason) from error
        fix = next((fix for piece, fix in _REMEDIES if piece in reason), "Check it with onnx.checker.")
        raise UsageError(f"{source} cannot be loaded.", why=reason, fix=fix) from error
    started = session.get_providers()[0]
    if started != wanted:
        raise _not_running(ort, provider, f"{wanted} did not start; {started} did")
    return OnnxRuntimeSession(session, provider.name, source)


def _create(ort: Any, model: str | bytes, provider: Provider, threads: int | None) -> Any:
    if provider.chain and hasattr(ort, "preload_dlls"):
        # Finds CUDA and cuDNN where pip put them; it prints, and stdout belongs to the results.
        with contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()
    chain = provider_chain(provider)
    return ort.InferenceSession(model, session_options(ort, threads), providers=chain, enable_fallback=0)


def session_options(ort: Any, threads: int | None) -> Any:
    """The `SessionOptions` that every session here starts from."""
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def provider_chain(provider: Provider, more: Mapping[str, str] | None = None) -> list[Any]:
    """`providers=` of an `InferenceSession`; `more` adds options to the first."""
    chain: list[Any] = [*provider.chain, _CPU]
    options = {**provider.options, **(more or {})}
    if options:
        chain[0] = (chain[0], options)
    return chain


def _not_running(ort: Any, provider: Provider, reason: str) -> MissingDependency:
    have = ", ".join(ort.get_available_providers())
    return MissingDependency(
        f"The provider {provider.name!r} does not run here.",
        why=f"{reason} (onnxruntime {ort.__version__} has: {have}).",
        fix='pip uninstall onnxruntime onnxruntime-gpu, then pip install -e ".[gpu]": '
        "the two packages overwrite each other, keep one.",
    )


_NUMPY_NAMES = {"float": "float32", "double": "float64"}
_TENSOR = re.compile(r"tensor\((float|double|float16|bfloat16|bool|u?int(?:8|16|32|64))\)")


def _spec(value: Any, source: str) -> TensorSpec:
    """What onnxruntime says about an input or output, in numpy's names."""
    match = _TENSOR.fullmatch(value.type)
    if match is None:
        raise UsageError(f"{source} cannot be run.", why=f"{value.name!r} is a {value.type}, not a tensor of numbers.")
    return TensorSpec(value.name, _NUMPY_NAMES.get(match[1], match[1]), _shape(value.shape))


def _shape(sizes: Sequence[int | str | None]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) or size else UNNAMED_DIMENSION for size in sizes)


# What an onnxruntime message wraps around its reason: code, path, source line and C++ signature.
_WRAPPING = (
    re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : "),
    re.compile(r"^Load model from .*? failed:", re.DOTALL),
    re.compile(r"/onnxruntime_src/\S+ .*?\)(?: const)? (?=[A-Z])"),
)


def _one_line(error: Exception) -> str:
    """The reason in an onnxruntime error, without its wrapping, in one line of bearable length."""
    text = str(error)
    for wrapping in _WRAPPING:
        text = wrapping.sub("", text)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:299] + "…"
