"""A hostile server on this machine: what it answers, how slowly, and whether somebody was sent elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# In answers, and in the arguments of a case: the address of the server, and of one that nobody may be sent to.
SERVER, OTHER = "@SERVER@", "@OTHER@"


@dataclass(frozen=True)
class Answer:
    """What a connection is answered with.

    Args:
        pieces: sent one after another.
        pause: seconds between two pieces, and between two drops.
        drop: sent again and again afterwards.
        end: how the connection ends: "close", "reset", or "hold" for never.
    """

    pieces: tuple[bytes, ...]
    pause: float = 0.0
    drop: bytes = b""
    end: str = "close"


class Contacts:
    """What the case's servers saw.

    Args:
        elsewhere: whether the other server was connected to.
    """

    def __init__(self) -> None:
        self.elsewhere = False


@contextmanager
def serving(answers: tuple[Answer, ...]) -> Iterator[tuple[dict[str, str], Contacts]]:
    """Serve these answers, one a connection, the last one again and again; yield the addresses and the contacts."""
    stop, contacts = threading.Event(), Contacts()
    with socket.socket() as listening, socket.socket() as other:
        for opened in (listening, other):
            opened.bind(("127.0.0.1", 0))
            opened.listen()
        names = {
            SERVER: f"http://127.0.0.1:{listening.getsockname()[1]}",
            OTHER: f"http://127.0.0.1:{other.getsockname()[1]}",
        }

        def serve() -> None:
            queue = list(answers)
            while not stop.is_set():
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                answer = queue.pop(0) if len(queue) > 1 else queue[0]
                threading.Thread(target=_answer, args=(connection, answer, names, stop), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield names, contacts
        finally:
            stop.set()
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                other.accept()[0].close()
                contacts.elsewhere = True
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)


def _answer(connection: socket.socket, answer: Answer, names: dict[str, str], stop: threading.Event) -> None:
    """Read a request, and answer it."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(30)
        _read_request(connection)
        for piece in answer.pieces:
            for name, address in names.items():
                piece = piece.replace(name.encode(), address.encode())
            connection.sendall(piece)
            if answer.pause and stop.wait(answer.pause):
                return
        while answer.drop and not stop.wait(max(answer.pause, 0.01)):
            connection.sendall(answer.drop)
        if answer.end == "hold":
            stop.wait(60)
        elif answer.end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        else:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass


def _read_request(connection: socket.socket) -> None:
    """Read the head, and as much of a body as it states: closing before resets the connection."""
    head = b""
    while b"\r\n\r\n" not in head:
        block = connection.recv(1 << 16)
        if not block:
            return
        head += block
    fields, _, body = head.partition(b"\r\n\r\n")
    stated = [line.split(b":")[1] for line in fields.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    left = int(stated[0]) - len(body) if stated else 0
    while left > 0:
        block = connection.recv(1 << 16)
        if not block:
            return
        left -= len(block)
