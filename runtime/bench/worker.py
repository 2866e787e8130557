"""Run a candidate in its own process: open the model, run it on request, report times and memory.

One JSON document a line, requests on stdin and answers on stdout: `open`, `bind`, `turn`, `profile`, `end`. A separate
process makes the memory attributable, keeps engines from sharing threads and settings, and lets the benchmark
continue if a candidate crashes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ...core.errors import LocalAttnError
from ...core.machine import process
from ..backends import registry
from ..backends.backend import Place
from ..session import Session, check_file, find_model, load
from .resources import OthersMeter, forget_peak, peak_resident, resident

# A turn ends after this many calls, whatever its duration: the times, or events, are kept in memory.
_MOST_CALLS, _MOST_PROFILED = 200_000, 200


class Worker:
    """The model and its state in this process."""

    def __init__(self) -> None:
        self._imports: int | None = None
        self._loaded: int | None = None
        self._session: Session | None = None
        self._call: Callable[[], object] | None = None

    def open(
        self,
        model: str,
        provider: str,
        threads: int | None,
        cuda_graph: bool,
        profile: str | None,
        plugin: str = "auto",
        runtime: str = "auto",
    ) -> dict[str, Any]:
        """Open the model; the measured time excludes importing its engine."""
        path = Path(model)
        backend, precision = registry.choose(path, runtime)
        backend.require()
        forget_peak()
        self._imports = resident()
        begin = time.perf_counter()
        if profile or cuda_graph:
            check_file(find_model(path))
            place = Place(provider, threads, plugin, precision)
            self._session = backend.open_tuned(path, place, cuda_graph=cuda_graph, profile=profile)
        else:
            self._session = load(path, provider, threads, plugin=plugin, runtime=runtime)
        spent = self._session.load_seconds or time.perf_counter() - begin
        self._loaded = resident()
        return {
            "load_ms": 1e3 * spent,
            "backend": self._session.backend,
            "provider": self._session.provider,
            "plugin": self._session.plugin,
            "notes": list(self._session.notes),
            "inputs": [asdict(spec) for spec in self._session.inputs],
        }

    def bind(self, inputs: str, cuda_graph: bool, warmup_ms: float) -> dict[str, Any]:
        """Load the inputs, run once, then warm up for at least `warmup_ms` and two calls."""
        from ..inputs.arrays import load_arrays
        from .calls import ready_call

        assert self._session is not None
        arrays = load_arrays(Path(inputs))
        begin = time.perf_counter()
        self._call, bound = ready_call(self._session, arrays)
        first = time.perf_counter() - begin
        self._run_for(warmup_ms / 1e3, 2)
        return {"bound": bound, "first_run_ms": 1e3 * first, "cuda_graph": cuda_graph and self._session.replays_graph}

    def turn(self, seconds: float, calls: int) -> dict[str, Any]:
        """Time at least this many seconds and calls, after one untimed call that wakes the threads."""
        assert self._call is not None
        self._call()
        meter = OthersMeter()
        spent = self._run_for(seconds, calls)
        return {"nanoseconds": spent, "others": meter.share()}

    def _run_for(self, seconds: float, calls: int, most: int = _MOST_CALLS) -> list[int]:
        call, clock = self._call, time.perf_counter_ns
        assert call is not None
        spent: list[int] = []
        end = clock() + int(1e9 * seconds)
        while True:
            begin = clock()
            call()
            now = clock()
            spent.append(now - begin)
            if (now >= end and len(spent) >= calls) or len(spent) >= most:
                return spent

    def profile(self, seconds: float, calls: int) -> dict[str, Any]:
        """Profile at least this many seconds and calls; return the profile's file and the number of calls."""
        assert self._session is not None
        spent = self._run_for(seconds, calls, _MOST_PROFILED)
        return {"file": self._session.end_profiling(), "runs": len(spent)}

    def end(self) -> dict[str, Any]:
        """Return memory in bytes: of the imports, and what opening and running added to it."""
        return {"imports": self._imports, "loaded": self._beyond(self._loaded), "peak": self._beyond(peak_resident())}

    def _beyond(self, size: int | None) -> int | None:
        return None if size is None or self._imports is None else max(0, size - self._imports)


def serve(requests: IO[str], answers: IO[str], worker: Worker) -> None:
    """Answer requests until `end` or the end of the input; errors are sent as answers too."""
    for line in requests:
        request = json.loads(line)
        verb = request.pop("verb")
        try:
            answer = getattr(worker, verb)(**request)
        except LocalAttnError as error:
            answer = {"error": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}
        except MemoryError:
            why = "An allocation failed."
            answer = {"error": "UsageError", "what": "The model does not fit into memory.", "why": why, "fix": ""}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if verb == "end":
            return


def main() -> None:
    """Serve on stdin and stdout."""
    serve_as(Worker())


def serve_as(worker: Worker) -> None:
    """Serve on stdin and stdout; what an engine prints on stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    process.owned = True
    serve(sys.stdin, answers, worker)
