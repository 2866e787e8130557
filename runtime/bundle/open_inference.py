"""Speak the Open Inference Protocol v2 over HTTP, as Triton, KServe, MLServer and OpenVINO's model server do.

Tensors travel as raw bytes where the server offers the extension `binary_tensor_data`, else as JSON, which is exact for
every type but fp16. A server is not trusted: answers are bounded, and their shapes compared with their bytes.
Source: the protocol's `required_api.md`, and Triton's extensions for binary tensors and for sequences.
"""

from __future__ import annotations

import contextlib
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.error_texts import argument
from ...core.errors import CheckFailed, MissingDependency, UsageError
from .triton import TYPE_NAMES

Arrays = dict[str, NDArray[Any]]

_DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items() if dtype != "bfloat16"}  # numpy has none
_BINARY = "binary_tensor_data"
_HEADER = "Inference-Header-Content-Length"
# Most bytes of an answer: of one with outputs, above what those of a sample can be; and of any other.
_LARGEST, _BESIDES = 1 << 32, 1 << 20


class Refused(Exception):
    """The server answered with an error."""


class Server:
    """A server of the Open Inference Protocol.

    Args:
        url: its address, "http://host:8000".
        timeout: seconds to wait for an answer.

    Raises:
        UsageError: the address is none of http or https.
        MissingDependency: nobody answers there.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            fits = parts.scheme in ("http", "https") and parts.netloc and parts.port != 0
        except ValueError:  # no number as a port, or half of an IPv6 address
            fits = False
        if not fits:
            raise UsageError(
                f"{url!r} is not the address of a server.", fix=f"Give {argument('server', 'http://localhost:8000')}."
            )
        self.url, self._timeout = url.rstrip("/"), timeout
        about = self._get("v2")
        extensions = about.get("extensions")
        self._binary = isinstance(extensions, list) and _BINARY in extensions
        self.name = " ".join(str(about.get(key, ""))[:40] for key in ("name", "version")).strip() or "server"

    def model(self, name: str) -> dict[str, Any]:
        """Return what the server says of a model: `inputs` and `outputs` with name, datatype and shape.

        Raises:
            MissingDependency: it does not serve the model, or is not ready.
        """
        return self._get(f"v2/models/{urllib.parse.quote(name, safe='')}")

    def infer(
        self, model: str, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], **parameters: int | bool
    ) -> Arrays:
        """Run a model once.

        Args:
            model: its name.
            inputs: arrays by name.
            outputs: the outputs to ask for.
            parameters: of the request: sequence_id, sequence_start, sequence_end.

        Raises:
            Refused: the server answers with an error.
            CheckFailed: what it answers is no answer of the protocol.
            MissingDependency: nobody answers.
        """
        path = f"v2/models/{urllib.parse.quote(model, safe='')}/infer"
        content, split = self._ask(path, _LARGEST + 1, *self._encode(inputs, outputs, parameters))
        try:
            return _decode(content, split)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise CheckFailed(f"{self.url} gives no answer of the protocol.", why=why) from error

    def _encode(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], parameters: Mapping[str, int | bool]
    ) -> tuple[bytes, dict[str, str]]:
        described: list[dict[str, Any]] = []
        blobs = []
        for name, array in inputs.items():
            tensor: dict[str, Any] = {
                "name": name,
                "shape": list(array.shape),
                "datatype": TYPE_NAMES[str(array.dtype)],
            }
            if self._binary:
                blobs.append(np.ascontiguousarray(array).tobytes())
                tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
            else:
                tensor["data"] = array.ravel().tolist()
            described.append(tensor)
        wanted = [{"name": name} | ({"parameters": {"binary_data": True}} if self._binary else {}) for name in outputs]
        asked: dict[str, Any] = {"inputs": described, "outputs": wanted}
        if parameters:
            asked["parameters"] = dict(parameters)
        text = json.dumps(asked).encode()
        if not self._binary:
            return text, {"Content-Type": "application/json"}
        headers = {"Content-Type": "application/octet-stream", _HEADER: str(len(text))}
        return b"".join([text, *blobs]), headers

    def _get(self, path: str) -> dict[str, Any]:
        try:
            found = json.loads(self._ask(path, _BESIDES)[0])
        except Refused as error:
            what = f"{self.url} does not serve {path.removeprefix('v2/models/')}."
            raise MissingDependency(what, why=str(error), fix="Start the server, and see its log.") from error
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise MissingDependency(f"{self.url} is no server of the Open Inference Protocol v2.")
        return found

    def _ask(
        self, path: str, most: int, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, str | None]:
        """Return at most so many bytes of an answer, and where its binary part begins."""
        request = urllib.request.Request(f"{self.url}/{path}", body, dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return answer.read(most), answer.headers.get(_HEADER)
        except urllib.error.HTTPError as error:
            raise Refused(_reason(error)) from error
        except (OSError, HTTPException) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise MissingDependency(f"{self.url} does not answer.", why=why, fix="Start the server.") from error


def _decode(content: bytes, split: str | None) -> Arrays:
    """Read the outputs of an answer."""
    if len(content) > _LARGEST:
        raise ValueError("the answer is larger than 4 GiB")
    end = len(content) if split is None else int(split)
    answer, at = json.loads(content[:end]), end
    found: Arrays = {}
    for tensor in answer["outputs"]:
        dtype, shape = np.dtype(_DTYPES[tensor["datatype"]]), [int(size) for size in tensor["shape"]]
        if min(shape, default=0) < 0 or math.prod(shape) > _LARGEST:
            raise ValueError(f"an output has the shape {shape}")
        size = (tensor.get("parameters") or {}).get("binary_data_size")
        if size is None:
            values = np.array(tensor["data"], dtype=dtype).ravel()
        else:
            values = np.frombuffer(content[at : at + int(size)], dtype)
            at += int(size)
        found[str(tensor["name"])] = values.reshape(shape)
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the message of an error's body, in one line."""
    text = ""
    with error, contextlib.suppress(OSError, HTTPException):
        text = error.read(_BESIDES).decode("utf-8", "replace")
    with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
        text = str(json.loads(text)["error"])
    return " ".join(f"{text or error.reason} (HTTP {error.code})".split())[:400]
