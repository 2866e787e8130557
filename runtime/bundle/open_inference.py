"""Speak the Open Inference Protocol v2 over HTTP, as Triton, KServe, MLServer and OpenVINO's model server do.

Tensors travel as raw bytes where the server offers the extension `binary_tensor_data`, else as JSON, which is exact for
every type but fp16. A server is not trusted: an answer has a whole time and a whole size
(`runtime/bundle/bounded_http.py`), the size from what the outputs can need, and its shapes are compared with its bytes.
Source: the protocol's `required_api.md`, and Triton's extensions for binary tensors and for sequences.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.error_texts import argument
from ...core.errors import CheckFailed, MissingDependency, UsageError
from .bounded_http import Answer, BadAnswer, NoAnswer, ask, location_of
from .triton import TYPE_NAMES

Arrays = dict[str, NDArray[Any]]

_DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items() if dtype != "bfloat16"}  # numpy has no bfloat16
_BINARY = "binary_tensor_data"
_HEADER = "Inference-Header-Content-Length"
# Most bytes of an answer without outputs, and of an answer's parts other than numbers.
_FRAME_BYTES = 1 << 20
# Most seconds for a server's answer about itself and its models.
_ABOUT = 30.0
# Most bytes of a number: as (indented) JSON, and in binary.
_AS_JSON, _AS_IT_IS = 40, 8
# Most values, lists and tables of an answer other than its numbers.
_FRAME_CHARACTERS = 20_000
_MOST_NUMBERS = 1 << 28
_MOST_DIMENSIONS = 32


class Refused(Exception):
    """The server answered with an error."""


class Server:
    """Call a server of the Open Inference Protocol.

    Args:
        url: its address, "http://host:8000".
        timeout: seconds until an answer begins; answers about the server must begin within 30.

    Raises:
        UsageError: the address begins with neither http nor https.
        MissingDependency: nobody answers there.
        CheckFailed: the answer does not follow the protocol.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            fits = parts.scheme in ("http", "https") and parts.netloc and parts.port != 0
        except ValueError:  # an invalid port or IPv6 address
            fits = False
        if not fits:
            raise UsageError(
                f"{url!r} is not the address of a server.", fix=f"Give {argument('server', 'http://localhost:8000')}."
            )
        self.url, self._timeout = url.rstrip("/"), timeout
        about = self._get("v2")
        extensions = about.get("extensions")
        self._binary = isinstance(extensions, list) and _BINARY in extensions
        said = (about.get(key) for key in ("name", "version"))
        self.name = " ".join(text[:40] for text in said if isinstance(text, str)).strip() or "server"

    def model(self, name: str) -> dict[str, Any]:
        """Return the server's description of a model: `inputs` and `outputs` with name, datatype and shape.

        Raises:
            MissingDependency: it does not serve the model, or is not ready.
            CheckFailed: the answer does not follow the protocol.
        """
        return self._get(f"v2/models/{urllib.parse.quote(name, safe='')}")

    def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        *,
        most: int = 1 << 24,
        **parameters: int | bool,
    ) -> Arrays:
        """Run a model once.

        Args:
            model: its name.
            inputs: arrays by name.
            outputs: the outputs to ask for.
            most: numbers that these can have, all together. An answer with more than twice as many is not read.
            parameters: of the request: sequence_id, sequence_start, sequence_end.

        Raises:
            Refused: the server answers with an error.
            CheckFailed: the answer does not follow the protocol.
            MissingDependency: nobody answers.
        """
        path = f"v2/models/{urllib.parse.quote(model, safe='')}/infer"
        most = min(2 * most, _MOST_NUMBERS)
        size = most * (_AS_IT_IS if self._binary else _AS_JSON) + _FRAME_BYTES
        answer = self._ask(path, size, self._timeout, *self._encode(inputs, outputs, parameters))
        try:
            return _decode(answer.content, answer.headers.get(_HEADER), most)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._no_answer(_reason_of(error)) from error

    def _no_answer(self, why: str) -> CheckFailed:
        return CheckFailed(f"{self.url} does not answer according to the protocol.", why=why)

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
            content = self._ask(path, _FRAME_BYTES, min(self._timeout, _ABOUT)).content
        except Refused as error:
            what = f"{self.url} does not serve {path.removeprefix('v2/models/')}."
            raise MissingDependency(what, why=str(error), fix="Start the server, and look at its log.") from error
        try:
            found = _read(content, _FRAME_CHARACTERS)
        except (ValueError, RecursionError) as error:
            raise self._no_answer(_reason_of(error)) from error
        if not isinstance(found, dict):
            raise self._no_answer("It is JSON, but not an object.")
        return found

    def _ask(
        self, path: str, most: int, wait: float, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Return a successful answer of at most this many bytes."""
        try:
            answer = ask(f"{self.url}/{path}", body, headers, wait=wait, most=most)
        except NoAnswer as error:
            what = f"{self.url} does not answer."
            raise MissingDependency(what, why=_reason_of(error), fix="Start the server.") from error
        except BadAnswer as error:
            raise self._no_answer(_reason_of(error)) from error
        if not 200 <= answer.status < 300:
            raise Refused(_refusal(answer))
        return answer


def _read(text: bytes, most: int) -> Any:
    """Parse JSON with a limit on values, lists and tables, which limits the memory.

    Raises:
        ValueError: it is not JSON, or has more.
        RecursionError: it nests too deep.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > most:
        raise ValueError("its JSON has too many values")
    return json.loads(text)


def _decode(content: bytes, split: str | None, most: int) -> Arrays:
    """Read the outputs of an answer, with a limit on their numbers.

    Raises:
        KeyError, TypeError, ValueError, OverflowError, RecursionError: the answer does not follow the protocol.
    """
    end = len(content) if split is None else _length(split, len(content))
    answer, at = _read(content[:end], most + _FRAME_CHARACTERS), end
    found: Arrays = {}
    for tensor in _listed(answer, "outputs"):
        name, datatype = tensor["name"], tensor["datatype"]
        if not isinstance(name, str) or name in found:
            raise ValueError("an output has no name, or the name of another")
        if not isinstance(datatype, str) or datatype not in _DTYPES:
            raise ValueError(f"an output has the type {str(datatype)[:40]!r}")
        dtype, shape = np.dtype(_DTYPES[datatype]), _shape(tensor["shape"], most)
        parameters = tensor.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise ValueError("an output has parameters that are not an object")
        size = parameters.get("binary_data_size")
        if size is None:
            with np.errstate(all="ignore"):  # a number too large for the type becomes infinite, and so differs
                values = np.array(tensor["data"], dtype=dtype).ravel()
        else:
            size = _length(size, len(content) - at)
            values = np.frombuffer(content[at : at + size], dtype)
            at += size
        found[name] = values.reshape(shape)
    return found


def _listed(answer: object, key: str) -> list[dict[str, Any]]:
    found = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"it has no list of {key}")
    return found


def _shape(stated: object, most: int) -> list[int]:
    """Return a shape, with sizes as numbers or texts and a limit on elements.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(stated, list) or len(stated) > _MOST_DIMENSIONS:
        raise ValueError(f"an output has no shape of at most {_MOST_DIMENSIONS} dimensions")
    shape, count = [_length(size, most) for size in stated], 1
    for size in shape:
        count *= size  # at most `most` squared
        if count > most:
            raise ValueError(f"an output has the shape {shape}")
    return shape


def _length(stated: object, most: int) -> int:
    """Return a whole number from 0 to `most` that a server states, as a number or as a text.

    Raises:
        ValueError: it is none.
    """
    text = str(stated) if isinstance(stated, int | str) and not isinstance(stated, bool) else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= most):
        raise ValueError(f"{text[:40] or type(stated).__name__!r} is not a size of at most {most}")
    return int(text)


def _reason_of(error: Exception) -> str:
    """Return an error of reading an answer as one line."""
    text = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    line = " ".join(text.split())[:200].rstrip(".") + "."
    return line[:1].upper() + line[1:]


def _refusal(answer: Answer) -> str:
    """Return the message of an error, in one line."""
    text: Any = answer.content.decode("utf-8", "replace")
    with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
        text = _read(answer.content, _FRAME_CHARACTERS)["error"]
    to = location_of(answer)
    if to is not None:
        text = f"It redirects to {to}, which is not followed"
    return " ".join(f"{str(text)[:4000] or answer.reason} (HTTP {answer.status})".split())[:400]
