"""Send a request over HTTP, with limits on the total time and size of the answer.

urllib's timeout counts from byte to byte, so a server that drips holds a client for ever; a total timeout of urllib3 or
httpx counts the same way. Here every read from the socket, of the status, the headers and the body alike, is given
what is left of one deadline, and what was read is counted. No body is unpacked, and no cookie is kept.
"""

from __future__ import annotations

import io
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from http.client import BadStatusLine, HTTPConnection, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, NamedTuple

# An answer must be complete this many seconds after its beginning, plus one for each MiB that it may have.
TRANSFER = 30.0
# Bytes of status, headers and the frames of chunks, besides a 64th of the body for frames of chunks.
_FRAMING = 1 << 18
_MOST_REDIRECTS = 3
# Messages for answers that ended in these errors.
_TOLD: dict[type[Exception], str] = {
    TimeoutError: "it did not end in time",
    BadStatusLine: "it does not begin like HTTP",
    IncompleteRead: "it is incomplete, or its chunks are broken",
}


class NoAnswer(Exception):
    """The server cannot be reached, or does not answer."""


class BadAnswer(Exception):
    """The answer is not complete HTTP, or is too large."""


class Answer(NamedTuple):
    """An answer: the status, its reason, the headers, and the body as it was sent."""

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes


def ask(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, *, wait: float, most: int
) -> Answer:
    """Send a GET, or with a body a POST, and return the answer, of whatever status.

    A GET follows redirects to the same scheme, host and port. No other is followed: the answer is then the redirect.

    Args:
        url: http or https.
        body: what to send.
        headers: of the request.
        wait: seconds for connecting, sending, and the first byte of the answer.
        most: bytes that the body may have.

    Raises:
        NoAnswer: nothing came within `wait`.
        BadAnswer: what came is not HTTP, is cut, is too large, or did not end in time.
    """
    for _ in range(_MOST_REDIRECTS):
        answer = _ask_once(url, body, headers or {}, _Budget(wait, most))
        to = _followed(url, answer) if body is None else None
        if to is None:
            return answer
        url = to
    return answer


def location_of(answer: Answer) -> str | None:
    """Return where an answer redirects to; None if it does not."""
    return answer.headers.get("Location") if 300 <= answer.status < 400 else None


def _followed(url: str, answer: Answer) -> str | None:
    location = location_of(answer)
    try:
        to = urllib.parse.urljoin(url, location or "")
        return to if location and _origin(to) == _origin(url) else None
    except ValueError:
        return None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


class _Budget:
    """The remaining time and bytes of a request."""

    def __init__(self, wait: float, most: int) -> None:
        self.most, self.begun = most, False
        self._end, self._transfer = time.monotonic() + wait, TRANSFER + most / (1 << 20)
        self._left = most + most // 64 + _FRAMING

    def seconds(self) -> float:
        """Return the seconds that are left.

        Raises:
            TimeoutError: the time is over.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def take(self, count: int) -> None:
        """Count bytes that were read.

        Raises:
            BadAnswer: there are more than there may be.
        """
        if count and not self.begun:
            self.begun, self._end = True, time.monotonic() + self._transfer
        self._left -= count
        if self._left < 0:
            raise BadAnswer(f"it is larger than the limit of {self.most} bytes")

    def connect(self, address: tuple[str, int], timeout: object = None, source_address: object = None) -> socket.socket:
        """Connect to the first address that accepts, like `socket.create_connection`, within the deadline."""
        problem: OSError = OSError("the name has no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(*address, 0, socket.SOCK_STREAM):
            opened = socket.socket(family, kind, protocol)
            try:
                opened.settimeout(self.seconds())
                opened.connect(place)
                return opened
            except OSError as error:
                problem = error
                opened.close()
        raise problem


class _BoundedStream(io.RawIOBase):
    """The bytes that come from a socket, as far as the budget allows."""

    def __init__(self, connected: socket.socket, budget: _Budget) -> None:
        self._socket, self._stream, self._budget = connected, connected.makefile("rb", buffering=0), budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(self._budget.seconds())
        count = self._stream.readinto(buffer) or 0
        self._budget.take(count)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Source:
    """Stand in for the socket of http.client, which only needs a file of it."""

    def __init__(self, connected: socket.socket, budget: _Budget) -> None:
        self._connected, self._budget = connected, budget

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_BoundedStream(self._connected, self._budget))


def _response(budget: _Budget, connected: socket.socket, *given: Any, **named: Any) -> HTTPResponse:
    return HTTPResponse(_Source(connected, budget), *given, **named)  # type: ignore[arg-type]


def _bounded(budget: _Budget, of: Callable[..., HTTPConnection], *given: Any, **named: Any) -> HTTPConnection:
    connection = of(*given, **named)
    vars(connection)["_create_connection"] = budget.connect
    vars(connection)["response_class"] = partial(_response, budget)
    return connection


class _Handler(urllib.request.AbstractHTTPHandler):
    """Open http and https with connections that keep to a budget."""

    def __init__(self, budget: _Budget) -> None:
        super().__init__()
        self._budget = budget

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(_bounded, self._budget, HTTPConnection), request)  # type: ignore[arg-type]

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(_bounded, self._budget, HTTPSConnection), request)  # type: ignore[arg-type]

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_


def _ask_once(url: str, body: bytes | None, headers: Mapping[str, str], budget: _Budget) -> Answer:
    opener = urllib.request.OpenerDirector()  # of proxies, http and https alone: it follows no redirect, opens no file
    opener.add_handler(urllib.request.ProxyHandler())
    opener.add_handler(_Handler(budget))
    try:
        answer = opener.open(urllib.request.Request(url, body, dict(headers)))
        if answer is None:
            raise BadAnswer("its address begins with neither http nor https")
        with answer:
            return Answer(answer.status, str(answer.reason), answer.headers, _content(answer, budget.most))
    except BadAnswer:
        raise
    except Exception as error:  # any error of http.client, ssl and email for untrusted bytes
        cause = getattr(error, "reason", None)
        cause = cause if isinstance(cause, Exception) else error
        if isinstance(cause, BadAnswer):
            raise cause from error
        why = (str(cause).strip() or type(cause).__name__).splitlines()[0][:200]
        if not budget.begun:
            raise NoAnswer(why) from error
        raise BadAnswer(next((text for kind, text in _TOLD.items() if isinstance(cause, kind)), why)) from error


def _content(answer: HTTPResponse, most: int) -> bytes:
    content = bytearray()
    while block := answer.read(min(1 << 20, most + 1 - len(content))):
        content += block
        if len(content) > most:
            raise BadAnswer(f"it is larger than the limit of {most} bytes")
    if answer.length:
        raise BadAnswer(f"it ends {answer.length} bytes early")
    return bytes(content)
