"""Where onnxruntime runs a model: its execution providers, and what each needs beside the model."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import MissingDependency


@dataclass(frozen=True)
class Provider:
    """One place to run.

    Args:
        name: as users call it.
        chain: onnxruntime's execution providers, best first; the CPU is added as the last.
        options: options of the first of the chain.
        functions: whether it takes models with functions.
        precision: element type of a model → options of the first of the chain without which it does not compute in it.
        package: Python package that brings libraries which the first of the chain links to.
        device: where its tensors lie, in onnxruntime's words.
        on_cpu: operator types which it leaves to the CPU.
    """

    name: str
    chain: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)
    functions: bool = True
    precision: Mapping[str, dict[str, str]] = field(default_factory=dict)
    package: str = ""
    device: str = "cpu"
    on_cpu: tuple[str, ...] = ()

    def notes(self, op_types: Iterable[str]) -> tuple[str, ...]:
        """What users of a model with these operators should know."""
        left = sorted({*self.on_cpu} & {*op_types})
        return (f"{' and '.join(left)} run on the CPU, of which {self.name} has no kernels",) if left else ()


CPU = "CPUExecutionProvider"
_INT8 = ("DynamicQuantizeLinear", "MatMulInteger")  # of `--weights int8`

# TF32 is on by default in onnxruntime's CUDA provider and rounds fp32 products to 10 bits: an fp32
# model would miss its own parity tolerance.
PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("cpu", ()),
        Provider("cuda", ("CUDAExecutionProvider",), {"use_tf32": "0"}, device="cuda", on_cpu=_INT8),
        Provider(
            "tensorrt",
            ("TensorrtExecutionProvider", "CUDAExecutionProvider"),
            functions=False,
            precision={"float16": {"trt_fp16_enable": "True"}, "bfloat16": {"trt_bf16_enable": "True"}},
            package="tensorrt",
            device="cuda",
            on_cpu=_INT8,
        ),
    )
}

# What "auto" tries, best first. TensorRT is left out: it builds an engine before the first run, which
# takes minutes that nobody asked for.
AUTO_ORDER = ("cuda", "cpu")

# What to do about a provider that does not run, by a piece of the reason.
_REMEDIES = (
    ("install TensorRT libraries", "Install the TensorRT 10 that it links to: pip install 'tensorrt<11'."),
    ("more than 2 GB", "Build an engine of it: localattn build MODEL."),
)
_OTHER_PACKAGE = (
    "pip uninstall onnxruntime onnxruntime-gpu, then pip install 'localattn[gpu]': "
    "the two packages overwrite each other, keep one."
)


# onnxruntime's severities: all is said up to warnings unless told otherwise, and nothing but what ends the process.
_WARNING, _FATAL = 2, 4


@contextlib.contextmanager
def quiet(ort: Any) -> Iterator[None]:
    """Within it onnxruntime's logger for all sessions says nothing: what fails is raised as well.

    It warns for every layer of a step file (CUDA's ScatterND), and no option of a session reaches it.
    """
    ort.set_default_logger_severity(_FATAL)
    try:
        yield
    finally:
        ort.set_default_logger_severity(_WARNING)


def load_libraries(ort: Any, provider: Provider) -> None:
    """Load what pip put where the system does not look: CUDA, cuDNN, and the provider's own package."""
    if provider.chain and hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):  # it prints, and stdout belongs to the results
            ort.preload_dlls()
    if provider.package:
        with contextlib.suppress(ImportError, OSError):  # else onnxruntime looks for them itself
            importlib.import_module(provider.package)


def model_for(
    provider: Provider, model: str | bytes, more: Mapping[str, str] | None = None
) -> tuple[str | bytes, list[Any]]:
    """What an `InferenceSession` is made of: the model, or a copy that this provider takes, and `providers=`.

    Args:
        provider: where it shall run.
        model: a path or bytes.
        more: options for the provider.

    Raises:
        UsageError, ValueError, OSError: of `inlining.without_functions`.
    """
    if provider.functions and not provider.precision:
        return model, _chain(provider, more)
    from .inlining import without_functions

    copy, types = without_functions(model)
    for name in types & provider.precision.keys():
        more = {**provider.precision[name], **(more or {})}
    return model if copy is None else copy, _chain(provider, more)


def _chain(provider: Provider, more: Mapping[str, str] | None) -> list[Any]:
    """`providers=` of an `InferenceSession`; `more` adds options to the first."""
    chain: list[Any] = [*provider.chain, CPU]
    options = {**provider.options, **(more or {})}
    if options:
        chain[0] = (chain[0], options)
    return chain


def not_running(ort: Any, provider: Provider, reason: str) -> MissingDependency:
    """The error for a provider that did not start."""
    have = ", ".join(ort.get_available_providers())
    return MissingDependency(
        f"The provider {provider.name!r} does not run here.",
        why=f"{reason} (onnxruntime {ort.__version__} has: {have}).",
        fix=next((fix for piece, fix in _REMEDIES if piece in reason), _OTHER_PACKAGE),
    )
