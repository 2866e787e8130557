"""Servers that are none, or answer what nobody asked: one clear error each, from the address to the last byte."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from localattn.core.errors import CheckFailed, MissingDependency, UsageError
from localattn.core.storage.files import sha256
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.open_inference import Refused, Server
from localattn.runtime.bundle.verify_server import verify_on_server
from localattn.runtime.inputs.arrays import load_arrays, save_arrays

from ...support.models.bundles import tiny_bundle, tiny_model  # noqa: F401
from .test_triton import step_model  # noqa: F401

FINE = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"name": "odd", "extensions": []}'
DEEP = b"[" * 100_000


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """The address of a server with these answers, one a connection."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    "address", ["", "localhost:8000", "ftp://localhost", "http://localhost:abc", "http://[", "http://[::1", "http://"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        Server(address, 1.0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"nonsense\r\n\r\n", "does not answer"),
        (b"", "does not answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500 + b"\r\n{}", "does not answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + DEEP, "no server of the Open Inference Protocol"),
        (b"HTTP/1.1 200 OK\r\n\r\n[1]", "no server of the Open Inference Protocol"),
        (b"HTTP/1.1 500 Odd\r\n\r\n" + DEEP, "does not serve v2"),
        (b"HTTP/1.1 500 Odd\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not serve v2"),
    ],
)
def test_answers_that_are_none(answer: bytes, told: str) -> None:
    with answering(answer) as address, pytest.raises(MissingDependency, match=told):
        Server(address, 5.0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + DEEP, CheckFailed),
        (b'HTTP/1.1 200 OK\r\n\r\n{"outputs": [{"name": "y", "datatype": "BF16", "shape": [1]}]}', CheckFailed),
        (b"nonsense\r\n\r\n", MissingDependency),
        (b"HTTP/1.1 500 Odd\r\n\r\n" + DEEP, Refused),
    ],
)
def test_results_that_are_none(answer: bytes, error: type[Exception]) -> None:
    with answering(FINE, answer) as address:
        server = Server(address, 5.0)
        assert server.name == "odd"
        with pytest.raises(error):
            server.infer("model", {"x": np.zeros(1, np.float32)}, ["y"])


def taking(name: str, shape: object) -> bytes:
    """The answer of a server whose model takes one input."""
    described = {"inputs": [{"name": name, "shape": shape}]}
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps(described).encode()


@pytest.mark.parametrize("shape", [[None, 64], ["many", "64"], [1e999], 7])
def test_a_shape_that_is_none_is_taken_for_none(shape: object, tiny_bundle: Path) -> None:
    with answering(FINE, taking("tokens", shape), *[b"HTTP/1.1 500 Odd\r\n\r\nout of order"] * 2) as address:
        rows = verify_on_server(tiny_bundle, address, "tiny").report["rows"]
    assert [row["why"] for row in rows] == ["out of order (HTTP 500)"] * 2


@pytest.fixture
def step_bundle(step_model: Path, tmp_path: Path) -> Path:
    """A bundle of a step file, with three samples of its stream."""
    create_bundle(BundleRequest(step_model, tmp_path / "b", samples=3))
    return tmp_path / "b"


def test_a_model_whose_tokens_have_no_positions_is_none_of_a_step_file(step_bundle: Path) -> None:
    with answering(FINE, taking("tokens", [-1])) as address, pytest.raises(CheckFailed, match="no model of this"):
        verify_on_server(step_bundle, address, "model_step")


def test_a_sample_beyond_the_sequence_fails(step_bundle: Path) -> None:
    path, manifest = step_bundle / "samples/model_step.sequence.npz", step_bundle / "manifest.json"
    whole = load_arrays(path)
    path.unlink()
    save_arrays(path, {name: array[:, :1] for name, array in whole.items()})
    listed = json.loads(manifest.read_text())
    for entry in listed["files"]:
        if entry["path"] == "samples/model_step.sequence.npz":
            entry |= {"size": path.stat().st_size, "sha256": sha256(path)}
    manifest.write_text(json.dumps(listed))
    with answering(FINE, taking("tokens", [1, 1]), b"HTTP/1.1 500 Odd\r\n\r\nout of order") as address:
        rows = verify_on_server(step_bundle, address, "model_step").report["rows"]
    assert ["begins there" in row["why"] for row in rows] == [False, True, True]
