"""Other ways to serve a bundle, with the real packages in environments of their own, from PyPI: slow."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.session import load

from ...conftest import Finished
from ...runtimes.environments import Absent, Environment, made
from ...support.models.bundles import demo_model, tiny_model  # noqa: F401

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples/serving"
_RUN = ("onnxruntime", "onnx", "pydantic", "rich", "typer", "numpy")

pytestmark = pytest.mark.slow


def _python(*packages: str) -> str:
    try:
        return str(made(Environment(packages[0], (*packages, *_RUN), ())) / "bin" / "python")
    except Absent as why:
        pytest.skip(str(why))


def _environment(folder: Path) -> dict[str, str]:
    """The package under its name, and the examples, without what is installed for the tests."""
    package = folder / "package"
    package.mkdir()
    (package / "localattn").symlink_to(ROOT)
    paths = os.pathsep.join([str(package), str(EXAMPLES)])
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": paths, "ORT_DISABLE_TELEMETRY": "1"}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _mlserver(model: Path, folder: Path) -> AbstractContextManager[str]:
    python = _python("mlserver==1.7.1")
    ports = _free_ports(3)
    settings = {"host": "127.0.0.1", "http_port": ports[0], "grpc_port": ports[1], "metrics_port": ports[2]}
    settings |= {"parallel_workers": 0, "metrics_endpoint": None}
    (folder / "settings.json").write_text(json.dumps(settings))
    settings = {"name": model.stem, "implementation": "mlserver_runtime.LocalAttention"}
    settings["parameters"] = {"uri": str(model)}  # type: ignore[assignment]
    (folder / "model-settings.json").write_text(json.dumps(settings))
    return _server(
        [python, "-c", "from mlserver.cli import main; main()", "start", str(folder)], folder, ports[0], model
    )


def _kserve(model: Path, folder: Path) -> AbstractContextManager[str]:
    """The example as it is, but for the address: KServe's server listens on every network."""
    python = _python("kserve==0.21.0")
    (port,) = _free_ports(1)
    local = (
        "import runpy, sys, uvicorn; config = uvicorn.Config; "
        "uvicorn.Config = lambda *a, **k: config(*a, **{**k, 'host': '127.0.0.1'}); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    options = ["--http_port", str(port), "--enable_grpc", "false"]
    return _server(
        [python, "-c", local, str(EXAMPLES / "kserve_runtime.py"), str(model), *options], folder, port, model
    )


@contextmanager
def _server(command: list[str], folder: Path, port: int, model: Path) -> Iterator[str]:
    """Start a server of a model and stop it, whatever happens."""
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        command, cwd=folder, env=_environment(folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"{url}/v2/models/{model.stem}/ready", timeout=5):
                break
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)
        log.close()


@pytest.mark.parametrize("serve", [_mlserver, _kserve])
def test_bundle_verify_against_other_servers(
    serve: Callable[[Path, Path], AbstractContextManager[str]],
    tiny_model: Path,
    tmp_path: Path,
    localattn: Callable[..., Finished],
) -> None:
    create_bundle(BundleRequest(tiny_model, tmp_path / "b"))
    (tmp_path / "server").mkdir()
    with serve(tmp_path / "b/model/tiny.onnx", tmp_path / "server") as url:
        found = localattn("bundle", "verify", tmp_path / "b", "--server", url, "--format", "json")
        assert found.code == 0, (found.out, found.err, (tmp_path / "server/log").read_text()[-2000:])
        assert {row["passed"] for row in json.loads(found.out)["rows"]} == {True}
        assert localattn("bundle", "verify", tmp_path / "b", "--server", url, "--model", "nobody").code == 3


def test_a_corpus_with_ray(demo_model: Path, tmp_path: Path) -> None:
    """Two workers compute what one process computes."""
    python = _python("ray[data]==2.60.0")
    command = [python, str(EXAMPLES / "ray_corpus.py"), str(demo_model), "--workers", "2", "--rows", "12"]
    done = subprocess.run(
        command, env=_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    session = load(demo_model, provider="cpu", plugin="none")
    tokens = np.random.default_rng(0).integers(0, 256, (12, 512))
    for row, bits in zip(tokens, found["bits"], strict=True):
        logits = session.run({"tokens": row[None]})["logits"][0, :-1].astype(np.float64)
        nats = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        nats -= logits[np.arange(511), row[1:]]
        assert abs(nats.mean() / np.log(2) - bits) < 1e-4
