"""Open onnxruntime sessions for benchmarks: with a profile or a CUDA graph."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.library_store import AUTO
from ...onnx_graph.onnx_file import OnnxFile
from ..ort.providers import PROVIDERS, emulating_bf16, model_for, new_session
from ..ort.session import EMULATED, OnnxRuntimeSession, one_line, open_file, session_options

# The provider option to capture and replay a CUDA graph; providers that are not listed cannot.
_CUDA_GRAPH = {"cuda": {"enable_cuda_graph": "1"}, "tensorrt": {"trt_cuda_graph_enable": "True"}}

# Providers that compile the graph into their own form: onnxruntime cannot save it as it runs.
_COMPILED = ("tensorrt",)

# Names of files in the folder of a profile.
PROFILE, OPTIMIZED = "profile", "optimized.onnx"


class TunedSession(OnnxRuntimeSession):
    """An `OnnxRuntimeSession` that exposes onnxruntime's own session.

    Attributes:
        load_seconds: time to open it.
    """

    load_seconds: float

    @property
    def native(self) -> Any:
        """onnxruntime's session."""
        return self._session


def open_tuned(
    path: Path, provider: str, threads: int | None, *, cuda_graph: bool, profile: str | None, plugin: str = AUTO
) -> TunedSession:
    """Open an ONNX file for profiling, or to replay a CUDA graph.

    Args:
        path: the file.
        provider: as `runtime.session.load` takes it.
        threads: CPU threads for one operator.
        cuda_graph: replay a CUDA graph.
        profile: folder for the profile and for the graph as onnxruntime made it; None profiles nothing.
        plugin: as `runtime.session.load` takes it.

    Raises:
        UsageError: no ONNX file, a provider without CUDA graphs, one that cannot be profiled, or a file of which no
            graph can be recorded.
        MissingDependency: the provider does not start.
    """
    what = argument("cuda_graph" if cuda_graph else "profile")
    if path.suffix.lower() != ".onnx":
        raise UsageError(
            f"{what} does not apply to {path}.",
            why="Only onnxruntime supports it.",
            fix=f"Leave {what} out, or measure the .onnx file.",
        )
    # Opened the ordinary way first: this gives a clear error if it fails, and resolves the provider "auto".
    file = OnnxFile.read(path)
    opened = open_file(file, provider, threads, plugin)
    started = opened.provider
    if cuda_graph and started not in _CUDA_GRAPH:
        raise UsageError(
            f"{argument('cuda_graph')} does not apply to the provider {started!r}.",
            why="A CUDA graph is a recording of GPU work.",
            fix=f"Choose {argument('provider', ' or '.join(_CUDA_GRAPH))}, or leave {argument('cuda_graph')} out.",
        )
    if profile is not None and started in _COMPILED:
        raise UsageError(
            f"{argument('profile')} does not apply to the provider {started!r}.",
            why="It runs the graph as one engine, whose parts onnxruntime cannot see.",
            fix=f"Choose {argument('provider', 'cpu')} or cuda; trtexec --dumpProfile shows the layers of an engine.",
        )
    import onnxruntime as ort

    options = session_options(ort, threads, opened.kernel)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(profile) / PROFILE)
        options.optimized_model_filepath = str(Path(profile) / OPTIMIZED)
        # Weights go to a file beside it: an ONNX file can hold at most 2 GB.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
    recorded = _CUDA_GRAPH[started] if cuda_graph else None
    begin = time.perf_counter()
    given = model_for(ort, PROVIDERS[started], file, options, recorded)
    emulated = emulating_bf16(file, compiled=opened.kernel is not None) if EMULATED in opened.notes else None
    try:
        native = new_session(ort, replace(given, model=emulated or given.model), options)
    except Exception as error:  # without a CUDA graph the file opened above
        if not cuda_graph:
            raise
        raise UsageError(
            f"No CUDA graph can be recorded of {path}.",
            why=f"A part of it runs on the CPU, such as what depends on dynamic sizes: {one_line(error)}",
            fix=f"Export it with fixed sizes, or leave {argument('cuda_graph')} out.",
        ) from error
    session = TunedSession(native, started, str(path), opened.notes, opened.kernel)
    session.load_seconds = time.perf_counter() - begin
    return session
