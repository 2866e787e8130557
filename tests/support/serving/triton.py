"""Start the real Triton server that PyPI's nvidia-pytriton carries, on free ports of this machine only."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

# A server that is not up by then is stopped; it takes about seven seconds where nothing else runs.
_LONGEST_START = 120.0
_LONGEST_STOP = 20.0


@dataclass(frozen=True)
class Running:
    """A running server: its addresses, and the file with what it prints."""

    url: str
    grpc: str
    metrics: str
    log: Path

    def waiting(self, model: str) -> int:
        """Count the requests in a model's queue."""
        with urllib.request.urlopen(f"{self.metrics}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = re.search(rf'^nv_inference_pending_request_count{{model="{model}",.*}} (\d+)$', text, re.M)
        assert found, text
        return int(found[1])

    def ready(self, model: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v2/models/{model}/ready", timeout=60) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False


def _packages() -> Path:
    """The folder of nvidia-pytriton; skips the test where the server is not installed or does not run here."""
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        pytest.skip("needs a Triton server: `python -m tests` adds nvidia-pytriton")
    site = Path(spec.origin).parents[1]
    if not (site / "pytriton/tritonserver/bin/tritonserver").exists():
        pytest.skip("this nvidia-pytriton carries no server")
    return site


@contextmanager
def serve(repositories: Sequence[Path], scratch: Path, settings: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Serve a model repository; models that do not load leave the others running.

    Args:
        repositories: folders of models.
        scratch: a folder for the backends and the log.
        settings: more of the server's environment.
    """
    server = _packages() / "pytriton/tritonserver"
    backends = scratch / "backends"
    _write_backends(server, backends)
    http, grpc, metrics = _free_ports(3)
    log = scratch / "tritonserver.log"
    local = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    command = [
        str(server / "bin/tritonserver"),
        *(f"--model-repository={repository}" for repository in repositories),
        f"--backend-directory={backends}",
        "--exit-on-error=false",
        "--exit-timeout-secs=5",
        *local,
        *ports,
    ]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=_environment(settings or {}), start_new_session=True
        )
        try:
            running = Running(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"http://127.0.0.1:{metrics}", log)
            _wait(process, running)
            yield running
        finally:
            _stop(process)


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    site = _packages()
    libraries = [
        settings.get("LD_LIBRARY_PATH", ""),
        f"{site}/nvidia_pytriton.libs",
        sysconfig.get_config_var("LIBDIR"),
    ]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        **settings,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        # The interpreter of a Python backend takes the packages of the first `python3` that it finds.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


def _write_backends(server: Path, backends: Path) -> None:
    """Lay out the server's own Python backend, and the stand-in beside it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        pytest.skip(f"this Triton server has no Python backend for Python {version}")
    python = backends / "python"
    if not python.exists():
        shutil.copytree(server / "backends/python", python)
        shutil.copy2(stub, python)
        (backends / "onnxruntime").mkdir()
        shutil.copy2(Path(__file__).with_name("onnxruntime_backend.py"), backends / "onnxruntime/model.py")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _wait(process: subprocess.Popen[bytes], running: Running) -> None:
    """Wait until every model has been loaded or refused."""
    end = time.monotonic() + _LONGEST_START
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"tritonserver ended with {process.returncode}:\n{running.log.read_text()[-4000:]}")
        # HTTP starts after the models. A server with a model that was refused is live and never ready.
        with suppress(OSError), urllib.request.urlopen(f"{running.url}/v2/health/live", timeout=10):
            return
        time.sleep(0.2)
    raise RuntimeError(f"tritonserver is not up after {_LONGEST_START:.0f} s:\n{running.log.read_text()[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and the processes of its models, which are in its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LONGEST_STOP)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_LONGEST_STOP)
