"""Headless Chromium, driven through its debugging pipe (the Chrome DevTools Protocol): no other package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .browser import BROWSER

# Seconds that a page may take for what a test waits for; a busy machine starts Chromium slowly.
PATIENCE = 180


class Page:
    """One tab.

    Args:
        commands: descriptor that Chromium reads from, messages that end in NUL.
        answers: descriptor that it writes to.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._buffer, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command of the protocol and give its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))
            piece = os.read(self._answers, 1 << 16) if ready else b""
            assert piece, "Chromium does not answer"
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))

    def open(self, address: str) -> None:
        """Go to an address, always as a new document."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """What an expression gives in the page; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression as soon as it is true; an error is taken for a page that is not there yet."""
        deadline = time.monotonic() + PATIENCE
        found: Any = None
        while time.monotonic() < deadline:
            try:
                found = self.value(expression)
            except AssertionError as error:
                found, last = None, error
            else:
                last = None
            if found:
                return found
            time.sleep(0.02)
        shown = self.value("document.body.innerText")
        raise AssertionError(f"{expression} did not become true; the page shows: {shown}") from last

    def resize(self, width: int, height: int, *, scale: float = 1, phone: bool = False, dark: bool = False) -> None:
        """Show the page in a window of this size, light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def page(profile: Path, *options: str) -> Iterator[Page]:
    """A tab of a browser that ends with the block.

    Args:
        profile: a folder for the browser's files.
        options: more of its command line.
    """
    assert BROWSER is not None
    commands, answers = os.pipe(), os.pipe()
    arguments: Sequence[str] = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={profile}", *options, "about:blank"),
    )
    # Chromium reads its descriptor 3 and writes its descriptor 4.
    shell = f'exec "$0" "$@" 3<&{commands[0]} 4>&{answers[1]}'
    process = subprocess.Popen(
        ["bash", "-c", shell, BROWSER, *arguments],
        pass_fds=(commands[0], answers[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        os.close(commands[0])
        os.close(answers[1])
        tab = Page(commands[1], answers[0])
        yield tab
        tab.call("Browser.close") if process.poll() is None else None
    finally:
        os.close(commands[1])
        os.close(answers[0])
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
