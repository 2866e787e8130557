"""Servers that are none, or answer what nobody asked: one clear error each, from the address to the last byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from localattn.core.errors import CheckFailed, MissingDependency, UsageError
from localattn.runtime.bundle.open_inference import Refused, Server

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
