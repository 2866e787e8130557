"""Open onnxruntime sessions for benchmarks: with a profile or a CUDA graph."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....core.error_texts import argument
from ....core.errors import UsageError
from ....core.storage.library_store import AUTO
from ....onnx_graph.onnx_file import OnnxFile
from .package import PACKAGE
from .providers import PROVIDERS, emulating_bf16, model_for, new_session
from .session import EMULATED, OnnxRuntimeSession, one_line, open_file, session_options

# onnxruntime's key for "neither capture nor replay a CUDA graph in this run".
_NO_GRAPH = ("gpu_graph_id", "-1")

# Names of files in the folder of a profile.
PROFILE, OPTIMIZED = "profile", "optimized.onnx"


class TunedSession(OnnxRuntimeSession):
    """An `OnnxRuntimeSession` that is profiled, or whose runs are replayed as a CUDA graph.

    Attributes:
        load_seconds: time to open it.
        records: whether its runs are replayed as a CUDA graph.
    """

    records = False

    @property
    def native(self) -> Any:
        """onnxruntime's own session."""
        return self._session

    @property
    def replays_graph(self) -> bool:
        """Whether its runs are replayed as a CUDA graph."""
        return self.records

    def end_profiling(self) -> str:
        """End the profile; return its file."""
        return str(self._session.end_profiling())

    def _run_first(self, binding: Any) -> None:
        """Run once without a CUDA graph, which would hold the outputs' addresses from before."""
        options = PACKAGE.require().RunOptions()
        if self.records:
            options.add_run_config_entry(*_NO_GRAPH)
        self._session.run_with_iobinding(binding, options)


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
        UsageError: a provider without CUDA graphs, one that cannot be profiled, or a file of which no
            graph can be recorded.
        MissingDependency: the provider does not start.
    """
    # Opened the ordinary way first: this gives a clear error if it fails, and resolves the provider "auto".
    file = OnnxFile.read(path)
    opened = open_file(file, provider, threads, plugin)
    started = PROVIDERS[opened.provider]
    if cuda_graph and not started.cuda_graph:
        raise UsageError(
            f"{argument('cuda_graph')} does not apply to the provider {started.name!r}.",
            why="A CUDA graph is a recording of GPU work.",
            fix=f"Choose {argument('provider', ' or '.join(_recording()))}, or leave {argument('cuda_graph')} out.",
        )
    if profile is not None and started.compiles:
        raise UsageError(
            f"{argument('profile')} does not apply to the provider {started.name!r}.",
            why="It runs the graph as one engine, whose parts onnxruntime cannot see.",
            fix=f"Choose {argument('provider', 'cpu')} or cuda; trtexec --dumpProfile shows the layers of an engine.",
        )
    ort = PACKAGE.require()
    options = session_options(ort, threads, opened.kernel)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(profile) / PROFILE)
        options.optimized_model_filepath = str(Path(profile) / OPTIMIZED)
        # Weights go to a file next to it: an ONNX file can hold at most 2 GB.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
    recorded = dict(started.cuda_graph) if cuda_graph else None
    begin = time.perf_counter()
    given = model_for(ort, started, file, options, recorded)
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
    session = TunedSession(native, started.name, str(path), opened.notes, opened.kernel)
    session.load_seconds, session.records = time.perf_counter() - begin, cuda_graph
    return session


def _recording() -> list[str]:
    """List the providers that replay CUDA graphs."""
    return [provider.name for provider in PROVIDERS.values() if provider.cuda_graph]
