"""Control a candidate's process from the benchmark: start it, send requests, report how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from ...core import errors
from ...core.errors import CheckFailed, LocalAttnError
from .request import Candidate

_PACKAGE = Path(__file__).resolve().parents[2]

# The package as it is running here, whether it is installed or a source tree. The working folder is removed from the
# path, so that no file in it is imported instead of a package.
_START = """
import importlib.util, sys
from pathlib import Path
sys.path[:] = [entry for entry in sys.path if entry]
root = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("localattn", root / "__init__.py", submodule_search_locations=[str(root)])
sys.modules["localattn"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["localattn"])
importlib.import_module(sys.argv[2]).main()
"""
_WORKER = "localattn.runtime.bench.worker"


class WorkerProcess:
    """A process that measures one candidate; it ends with the `with` block.

    Args:
        label: of the candidate, for errors.
        worker: the module whose `main` answers the requests.
    """

    def __init__(self, label: str, worker: str = _WORKER) -> None:
        self._label = label
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(_PACKAGE), worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._read = b""

    def open(self, candidate: Candidate, *, cuda_graph: bool = False, profile: str | None = None) -> dict[str, Any]:
        """Open a candidate as its worker does, and return its answer; errors as of `ask`."""
        if candidate.module is not None:
            return self.ask(
                "open_module",
                model=str(candidate.model),
                threads=candidate.threads,
                made_by=candidate.module.made_by(),
            )
        return self.ask(
            "open",
            model=str(candidate.model),
            provider=candidate.provider,
            threads=candidate.threads,
            plugin=candidate.plugin,
            runtime=candidate.runtime,
            cuda_graph=cuda_graph,
            profile=profile,
        )

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send a request to the process and return its answer.

        Raises:
            LocalAttnError: what the process raised.
            CheckFailed: it died, perhaps in the middle of its answer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line()
        except BrokenPipeError:
            line = b""
        if not line:
            raise self._died(verb)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, answer["error"], LocalAttnError)
            raise kind(answer["what"], why=answer["why"], fix=answer["fix"])
        return answer

    def _line(self) -> bytes:
        """Return the next line that the process writes; nothing if it ended before."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._read:
            block = os.read(pipe, 1 << 16) if self._wrote(pipe) else b""
            if not block:
                return b""
            self._read += block
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _wrote(self, pipe: int) -> bool:
        """Wait until the pipe can be read, or the process has ended: one that it left may keep the pipe open."""
        if os.name != "posix":  # pipes are none that can be waited for
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not selector.select(0.1):
                if self._process.poll() is not None:
                    return bool(selector.select(0))
        return True

    def _died(self, verb: str) -> CheckFailed:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            why = f"Its process was ended by {signal.Signals(-code).name}"
            why += ": most likely the machine ran out of memory." if -code == signal.SIGKILL else "."
        else:
            why = f"Its process ended with status {code}{': ' + lines[-1][:300] if lines else '.'}"
        return CheckFailed(
            f"{self._label} failed during the benchmark ({verb}).",
            why=why,
            fix="Run it alone with localattn run; measure fewer candidates at a time if memory is short.",
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes, and waits for it
            pass
        self._errors.close()
