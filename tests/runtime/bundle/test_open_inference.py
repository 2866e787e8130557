"""Servers that are none, or answer what nobody asked: one clear error each, from the address to the last byte."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import contextlib
import gzip
import json
import math
import random
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import CheckFailed, LocalAttnError, MissingDependency, UsageError
from localattn.core.storage.files import sha256
from localattn.runtime.bundle import bounded_http
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.open_inference import Refused, Server
from localattn.runtime.bundle.verify_server import verify_on_server
from localattn.runtime.inputs.arrays import load_arrays

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
                try:
                    connection, _ = listening.accept()
                except OSError:  # nobody asks for the rest
                    return
                with connection:
                    connection.recv(1 << 16)
                    with contextlib.suppress(OSError):  # the client has read enough
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


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        (b"", MissingDependency, "does not answer"),
        (b"nonsense\r\n\r\n", CheckFailed, "does not answer according to the protocol"),
        (b"<html>HTTP/0.9</html>", CheckFailed, "does not answer according to the protocol"),
        (OK + b"a: b\r\n" * 500 + b"\r\n{}", CheckFailed, "does not answer according to the protocol"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", CheckFailed, "does not answer according to the protocol"),
        (OK + b"Content-Length: 90\r\n\r\n{}", CheckFailed, "It ends 88 bytes early."),
        (OK + b"\r\n" + DEEP, CheckFailed, "does not answer according to the protocol"),
        (OK + b"\r\n[1]", CheckFailed, "does not answer according to the protocol"),
        (OK + b"\r\n" + b"[" + b"1," * 40_000 + b"1]", CheckFailed, "JSON has too many values"),
        (OK + b"\r\n" + b" " * (2 << 20), CheckFailed, "is larger than"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000, CheckFailed, "does not answer according to the protocol"),
        (
            OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(1 << 20)),
            CheckFailed,
            "does not answer according",
        ),
        (b"HTTP/1.1 500 Odd\r\n\r\n" + DEEP, MissingDependency, "does not serve v2"),
        (b"HTTP/1.1 302 Odd\r\nLocation: http://[bad\r\n\r\n", MissingDependency, "does not serve v2"),
        (b"HTTP/1.1 500 Odd\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", CheckFailed, "does not answer according"),
    ],
)
def test_answers_that_are_none(answer: bytes, error: type[LocalAttnError], told: str) -> None:
    with answering(answer) as address, pytest.raises(error) as raised:
        Server(address, 5.0)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + DEEP, CheckFailed),
        (b'HTTP/1.1 200 OK\r\n\r\n{"outputs": [{"name": "y", "datatype": "BF16", "shape": [1]}]}', CheckFailed),
        (b"nonsense\r\n\r\n", CheckFailed),
        (b"", MissingDependency),
        (b"HTTP/1.1 500 Odd\r\n\r\n" + DEEP, Refused),
    ],
)
def test_results_that_are_none(answer: bytes, error: type[Exception]) -> None:
    with answering(FINE, answer) as address:
        server = Server(address, 5.0)
        assert server.name == "odd"
        with pytest.raises(error):
            server.infer("model", {"x": np.zeros(1, np.float32)}, ["y"])


def decoded(answer: object, blobs: bytes = b"", split: object = None, most: int = 100) -> object:
    """What a server's answer, a document or its text, comes to."""
    text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    headers = b"" if split is None else f"Inference-Header-Content-Length: {split}\r\n".encode()
    with answering(FINE, OK + headers + b"\r\n" + text + blobs) as address:
        return Server(address, 20.0).infer("model", {"x": np.zeros(1, np.float32)}, ["y"], most=most)


def whole(binary: bool) -> tuple[dict[str, object], bytes]:
    """A right answer and the bytes behind it."""
    output: dict[str, object] = {"name": "y", "datatype": "FP32", "shape": [1, 2]}
    more = {"parameters": {"binary_data_size": 8}} if binary else {"data": [1.0, 2.0], "parameters": {}}
    document = {"model_name": "m", "outputs": [output | more]}
    return document, np.array([1, 2], np.float32).tobytes() if binary else b""


ODD = [None, True, -1, 0, 1.5, 10**30, "", "1", "\x1b[2J", [], [[]], {}, {"a": 1}, [None], [1, [2]], [10**15] * 3]
ODD += [[0, 10**15], [1] * 33, ["1", "2"], ["a"], [1e400], math.nan, math.inf, "9" * 5000, [[[[1]]]], [{}], "FP64"]


def places(document: object, at: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Every position of a document."""
    yield at
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from places(value, (*at, key))


def changed(document: object, at: tuple[object, ...], value: object) -> object:
    """A document with another value at a position; without what is there, where the value is `...`."""
    if not at:
        return value
    key, *rest = at
    made: Any = dict(document) if isinstance(document, dict) else list(document)  # type: ignore[call-overload]
    if value is ... and not rest:
        del made[key]
    else:
        made[key] = changed(made[key], tuple(rest), value)
    return made


@pytest.mark.parametrize("binary", [False, True])
def test_any_value_at_any_position_is_an_answer_or_no_answer(binary: bool) -> None:
    """No error but the one sentence, whatever stands where."""
    document, blobs = whole(binary)
    text = json.dumps(document)
    right = decoded(document, blobs, len(text))
    assert isinstance(right, dict) and right["y"].tolist() == [[1, 2]]
    refused = 0
    for at in places(document):
        for value in (*ODD, *([...] if at else [])):
            other = json.dumps(changed(document, at, value)).encode()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    decoded(other, blobs, len(other))
            except CheckFailed as error:
                refused += 1
                assert error.what.endswith("does not answer according to the protocol.") and "\n" not in error.why
    assert refused > 200


@pytest.mark.parametrize("split", [-16, "1e5", 2**70, "", "9" * 5000, "\u0664", "4, 4", 1])
def test_where_the_binary_part_begins_is_a_claim(split: object) -> None:
    document, blobs = whole(True)
    with pytest.raises(CheckFailed, match="does not answer according to the protocol"):
        decoded(document, blobs, str(split).encode().decode("latin-1"))


@pytest.mark.parametrize(
    "text",
    [
        b'{"outputs": [{"name": "y", "datatype": "FP32", "data": [1], "shape": ['
        + b",".join([b"9" * 4000] * 4000)
        + b"]}]}",
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [' + b"[]," * 900_000 + b"[]]}]}",
        b'{"x": [' + b"{}," * 300_000 + b'{}], "outputs": []}',
        b'{"outputs": ' + DEEP,
    ],
)
def test_what_no_output_can_need_is_not_parsed(text: bytes) -> None:
    begun = time.monotonic()
    with pytest.raises(CheckFailed, match="does not answer according to the protocol"):
        decoded(text)
    assert time.monotonic() - begun < 2


def test_an_answer_may_have_as_much_as_its_outputs_need() -> None:
    """Numbers of full length in an indented text, twice as many as asked for."""
    values = np.random.default_rng(0).standard_normal(20_000)
    answer = {"outputs": [{"name": "y", "datatype": "FP64", "shape": [20_000], "data": values.tolist()}]}
    found = decoded(json.dumps(answer, indent=12).encode(), most=10_000)
    assert isinstance(found, dict)
    np.testing.assert_array_equal(found["y"], values)


@contextmanager
def dripping(start: bytes, drop: bytes, first: tuple[bytes, ...] = ()) -> Iterator[str]:
    """A server that sends a start, and then a little every 50 ms for ever; `first` are answers before that."""
    stop = threading.Event()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def serve() -> None:
            for answer in (*first, None):
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(1 << 16)
                    if answer is not None:
                        connection.sendall(answer)
                        continue
                    connection.sendall(start)
                    while not stop.wait(0.05):
                        connection.sendall(drop)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stop.set()


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"H", b""),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (OK + b"Content-Length: 100000\r\n\r\n", b" "),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (b"HTTP/1.1 500 No\r\n\r\n", b" "),
        (b"HTTP/1.1 302 No\r\nLocation: /v2\r\nContent-Length: 1000\r\n\r\n", b" "),
    ],
)
@pytest.mark.parametrize("first", [(), (FINE,)], ids=["about", "infer"])
def test_a_server_that_drips_is_left(
    start: bytes, drop: bytes, first: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "TRANSFER", 0.5)
    begun = time.monotonic()
    with (
        dripping(start, drop, first) as address,
        pytest.raises(CheckFailed, match="does not answer according") as raised,
    ):
        Server(address, 5.0).infer("m", {"x": np.zeros(1, np.float32)}, ["y"], most=1)
    assert "It did not end in time." in str(raised.value)
    assert time.monotonic() - begun < 3


def test_a_server_that_is_silent_does_not_answer() -> None:
    with dripping(b"", b"") as address, pytest.raises(MissingDependency, match="does not answer"):
        Server(address, 0.3)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("where", ["http://127.0.0.1:{}/x", "//127.0.0.1:{}/x", "ftp://127.0.0.1:{}/x"])
def test_no_redirect_leads_to_another_server(status: int, where: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(0.2)
        location = where.format(other.getsockname()[1])
        away = f"HTTP/1.1 {status} Away\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(away) as address, pytest.raises(MissingDependency, match="not followed"):
            Server(address, 5.0)
        with answering(FINE, away) as address, pytest.raises(Refused, match="not followed"):
            Server(address, 5.0).infer("m", {"x": np.zeros(1, np.float32)}, ["y"], most=1)
        with pytest.raises(TimeoutError):
            other.accept()


def test_a_redirect_on_the_same_server_is_followed() -> None:
    there = b"HTTP/1.1 307 There\r\nLocation: /v2/\r\nContent-Length: 0\r\n\r\n"
    with answering(there, FINE) as address:
        assert Server(address, 5.0).name == "odd"
    with answering(*[there] * 9) as address, pytest.raises(MissingDependency, match="not followed"):
        Server(address, 5.0)


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
    with answering(FINE, taking("tokens", [-1])) as address, pytest.raises(CheckFailed, match="not a model of this"):
        verify_on_server(step_bundle, address, "model_step")


def sealed(
    bundle: Path, arrays: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], sidecar: dict[str, object] | None = None
) -> Path:
    """The bundle with these arrays in place of its own, and with another description of the step, sealed again."""
    for name, content in arrays.items():
        np.savez(bundle / name, **content)
    about = bundle / "model/model_step.onnx.json"
    described = json.loads(about.read_text())
    described["step"] |= sidecar or {}
    about.write_text(json.dumps(described))
    manifest = bundle / "manifest.json"
    listed = json.loads(manifest.read_text())
    for entry in listed["files"]:
        path = bundle / entry["path"]
        entry |= {"size": path.stat().st_size, "sha256": sha256(path)}
    manifest.write_text(json.dumps(listed))
    return bundle


SEQUENCE = "samples/model_step.sequence.npz"


def test_a_sample_beyond_the_sequence_fails(step_bundle: Path) -> None:
    sealed(step_bundle, {SEQUENCE: {name: x[:, :1] for name, x in load_arrays(step_bundle / SEQUENCE).items()}})
    with answering(FINE, taking("tokens", [1, 1]), b"HTTP/1.1 500 Odd\r\n\r\nout of order") as address:
        rows = verify_on_server(step_bundle, address, "model_step").report["rows"]
    assert ["begins at this position" in row["why"] for row in rows] == [False, True, True]


FEW = np.ones((1, 3), np.int64)
NO_SEQUENCES: dict[str, dict[str, np.ndarray[Any, Any]]] = {
    "nothing": {},
    "other names": {"x": FEW},
    "no axis": {"tokens": np.array(3)},
    "one axis": {"tokens": FEW[0]},
    "more axes": {"tokens": FEW[..., None]},
    "empty": {"tokens": FEW[:, :0]},
    "no rows": {"tokens": FEW[:0]},
    "another without axes": {"tokens": FEW, "x": np.array(3)},
    "another of other length": {"tokens": FEW, "x": FEW[:, :2]},
    "another of other rows": {"tokens": FEW, "x": np.ones((2, 3))},
}


@pytest.mark.parametrize("case", NO_SEQUENCES)
def test_a_sequence_that_fits_no_step_file_is_one_error(case: str, step_bundle: Path) -> None:
    sealed(step_bundle, {SEQUENCE: NO_SEQUENCES[case]})
    with answering(FINE, taking("tokens", [1, 1])) as address, pytest.raises(CheckFailed, match="sequence"):
        verify_on_server(step_bundle, address, "model_step")


@pytest.mark.parametrize("axis", [0, 2, 1 << 40])
def test_an_axis_that_is_not_there_is_one_error(axis: int, step_bundle: Path) -> None:
    sealed(step_bundle, {}, {"sequence_axis": axis})
    answers = [FINE, taking("tokens", [1, 1]), *[b"HTTP/1.1 500 Odd\r\n\r\nout of order"] * 9]
    with answering(*answers) as address:
        try:
            report = verify_on_server(step_bundle, address, "model_step").report
        except CheckFailed:
            assert axis
        else:
            assert not axis and report["code"] == 1


@pytest.mark.parametrize("position", [np.array(["here"]), np.array([np.nan]), np.array([1j]), np.empty(0, np.int64)])
def test_a_position_that_is_no_number_is_one_error(position: np.ndarray[Any, Any], step_bundle: Path) -> None:
    sample = "samples/model_step.0.inputs.npz"
    sealed(step_bundle, {sample: {**load_arrays(step_bundle / sample), "position": position}})
    with (
        answering(FINE, taking("tokens", [1, 1])) as address,
        pytest.raises(CheckFailed, match=r"(not a sample|no position)"),
    ):
        verify_on_server(step_bundle, address, "model_step")


def body(document: object) -> bytes:
    return OK + b"\r\n" + json.dumps(document).encode()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_server_says_a_verification_ends_with_rows_or_one_sentence(seed: int, tiny_bundle: Path) -> None:
    """Odd values in what it says of itself, of its model, and in its results; and bytes of these answers altered."""
    generator = random.Random(seed)
    about: object = {"name": "odd", "version": "1", "extensions": ["binary_tensor_data"]}
    model: object = {"name": "m", "inputs": [{"name": "tokens", "datatype": "INT64", "shape": [1, 64]}]}
    result: object = {"outputs": [{"name": "logits", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
    for _ in range(120):
        said = [about, model, result]
        which = generator.randrange(3)
        at = generator.choice(list(places(said[which])))
        said[which] = changed(said[which], at, generator.choice(ODD))
        answers = [body(each) for each in said]
        if generator.random() < 0.5:
            odd = bytearray(answers[which])
            for _ in range(generator.randint(1, 4)):
                start = generator.randrange(len(odd) + 1)
                odd[start : start + generator.choice([0, 1, 5, 99])] = generator.randbytes(generator.choice([0, 1, 3]))
            answers[which] = bytes(odd)
        with answering(*answers, answers[2]) as address, warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                found = verify_on_server(tiny_bundle, address, "m").report
            except (CheckFailed, MissingDependency) as error:
                assert "\n" not in error.what + error.why
            else:
                assert found["code"] == 1 and not any(row["passed"] for row in found["rows"])


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "FP64"])
@pytest.mark.parametrize("shape", [[], [0], [1, 2], [1] * 32])
def test_results_of_another_type_or_shape_differ(datatype: str, shape: list[int], tiny_bundle: Path) -> None:
    data = [1] * math.prod(shape)
    result = body({"outputs": [{"name": "logits", "datatype": datatype, "shape": shape, "data": data}]})
    with answering(FINE, body({"inputs": []}), result, result) as address:
        found = verify_on_server(tiny_bundle, address, "m").report
    assert found["code"] == 1 and all(row["why"] for row in found["rows"])
