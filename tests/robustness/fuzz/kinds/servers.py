"""Cases about servers that are asked: slow ones, lying ones, redirects, and answers that are none."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from ..case import Case, Content
from ..seeds import Seeds
from ..server import OTHER, SERVER, Answer
from .forged import FORGERIES
from .mutate import ODD_VALUES, at, json_bytes, mutate_bytes, mutate_document, places

_OK = b"HTTP/1.1 200 OK\r\n"
# Seconds by the clock in which a verification gives up, where a server has a second each.
_SECONDS = 20.0
_TYPES = {"float32": "FP32", "int64": "INT64"}
_HEADERS = (
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Length: 1\r\n",
    b"Content-Length: x\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: nonsense\r\n",
    b"Content-Encoding: gzip\r\n", b"Content-Type: text/html; charset=\xff\r\n", b"X: a\r\n" * 1000,
    b"X: " + b"a" * 100_000 + b"\r\n", b"Inference-Header-Content-Length: 1\r\n",
    b"Inference-Header-Content-Length: -7\r\n", b"Inference-Header-Content-Length: 99999999999999999999\r\n",
    b"Set-Cookie: a=b\r\n", b"Connection: keep-alive\r\n", b": \r\n", b"\0: \0\r\n",
)  # fmt: skip
_CHUNKS = (
    b"zz\r\n{}", b"ffffffffffffffff\r\n{}", b"-1\r\n{}", b"2\r\n{}", b"2\r\n{}\r\n0\r\n\r\n", b"2;" + b"x" * 70_000,
    b"1\r\n{\r\n" * 50 + b"0\r\n\r\n", b"0" * 5000 + b"\r\n",
)  # fmt: skip
_LOCATIONS = (
    OTHER, OTHER + "/v2", OTHER.replace("http", "https"), SERVER + "/v2", "/v2", "v2", "//127.0.0.1:1/x", "ftp://x/y",
    "file:///etc/passwd", "http://[bad", "http://" + "a" * 70 + ".x/", "", "\0", "http://127.0.0.1:99999/",
)  # fmt: skip
_TEXTS = ("[" * 200_000, '{"a":' * 50_000, "[" + "[]," * 300_000 + "1]", '"' + "x" * (2 << 20) + '"', "NaN", "null", "")


def _arrays(seeds: Seeds) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs that the sample of the bundle expects."""
    name = next(name for name in sorted(seeds.bundle) if name.endswith("outputs.npz"))
    return dict(np.load(io.BytesIO(seeds.bundle[name])))


def _right(seeds: Seeds) -> list[Any]:
    """What an honest server says of itself, of its model, and of the sample."""
    manifest = json.loads(seeds.bundle["manifest.json"])
    inputs = next(model["inputs"] for model in manifest["models"] if model["kind"] == "onnx")
    model = {"name": "m", "inputs": [{"name": x["name"], "datatype": "INT64", "shape": x["shape"]} for x in inputs]}
    return [{"name": "a server", "version": "1", "extensions": []}, model, _outputs(_arrays(seeds))]


def _outputs(arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    described = [
        {"name": name, "datatype": _TYPES[str(array.dtype)], "shape": list(array.shape), "data": array.ravel().tolist()}
        for name, array in arrays.items()
    ]
    return {"model_name": "m", "outputs": described}


def _plain(document: Any) -> Answer:
    return Answer((_OK + b"\r\n" + json_bytes(document),))


Answers = list[Answer]


def _lies(random: Random, seeds: Seeds) -> tuple[Answers, bool]:
    """Answers of the right form, in which an output is wrong, lacks, or has another name or shape."""
    about, model, _ = _right(seeds)
    arrays = _arrays(seeds)
    name = random.choice(sorted(arrays))
    array, kind = arrays[name], random.randrange(8)
    if kind == 0:
        arrays[name] = array + np.float32(random.choice((0.1, -1, 1e30)))
    elif kind == 1:
        arrays[name] = array * random.choice((0, -1, 2)) + (random.random() < 0.5)
    elif kind == 2:
        changed = array.copy().ravel()
        changed[random.randrange(changed.size)] = random.choice((np.nan, np.inf, 1e4))
        arrays[name] = changed.reshape(array.shape)
    elif kind == 3:
        del arrays[name]
    elif kind == 4:
        arrays = {"other" if key == name else key: value for key, value in arrays.items()}
    elif kind == 5:
        arrays[name] = array[..., : random.randrange(array.shape[-1])]
    elif kind == 6:
        arrays[name] = array[None]
    else:
        arrays[name] = array[..., ::-1]
    return [_plain(about), _plain(model), _plain(_outputs(arrays))], True


def _documents(random: Random, seeds: Seeds) -> tuple[Answers, bool]:
    """Odd values anywhere in what is said."""
    said = _right(seeds)
    which = random.choice((0, 1, 2, 2, 2))
    if random.random() < 0.5:
        said[which] = mutate_document(random, said[which])
    else:  # not in the numbers, of which there are thousands
        found = [path for path in places(said[which]) if "data" not in path[:-1]]
        path = random.choice(found)
        at(said[which], path[:-1])[path[-1]] = random.choice((*ODD_VALUES, [10**15] * 3, [1] * 1000, "9" * 5000))
    return [_plain(each) for each in said], False


def _texts(random: Random, seeds: Seeds) -> tuple[Answers, bool]:
    """Texts that are no document of the protocol, or more than any needs; bytes of a right one changed."""
    answers = [_plain(each) for each in _right(seeds)]
    which = random.randrange(3)
    if random.random() < 0.5:
        answers[which] = Answer((_OK + b"\r\n" + random.choice(_TEXTS).encode(),))
    else:
        answers[which] = Answer((mutate_bytes(random, answers[which].pieces[0]),))
    return answers, False


def _frames(random: Random, seeds: Seeds) -> tuple[Answers, bool]:
    """Odd headers, states and chunks."""
    said = [json_bytes(each) for each in _right(seeds)]
    answers = [Answer((_OK + b"\r\n" + text,)) for text in said]
    which, kind = random.randrange(3), random.randrange(5)
    if kind == 0:
        content = _OK + b"Transfer-Encoding: chunked\r\n\r\n" + random.choice(_CHUNKS)
    elif kind == 1:
        status = random.choice((b"100", b"204", b"206", b"304", b"400", b"500", b"999", b"abc", b"-1", b""))
        content = b"HTTP/1.1 " + status + b" Odd\r\n\r\n" + random.choice((said[which], b"", b"\xff" * 5000))
    elif kind == 2:
        content = random.choice((b"", b"\0\xff" * 1000, b"<html>", b"HTTP/9.9 200 OK\r\n\r\n", b"HTTP/1.1 200\r\n"))
    else:
        headers = b"".join(random.choice(_HEADERS) for _ in range(random.choice((1, 1, 2))))
        content = _OK + headers + b"\r\n" + said[which]
    answers[which] = Answer((content,), end=random.choice(("close", "close", "reset")))
    return answers, False


def _slow(random: Random, seeds: Seeds) -> tuple[Answers, bool]:
    """Answers that come in drops, or never end."""
    answers = [_plain(each) for each in _right(seeds)]
    which = random.randrange(3)
    start, drop = random.choice(
        (
            (b"", b""), (b"H", b""), (b"", b"H"), (_OK + b"X: ", b"a"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
            (_OK + b"\r\n", b" "), (_OK + b"\r\n", b""), (_OK + b"Content-Length: 100000\r\n\r\n", b" "),
            (_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"), (b"HTTP/1.1 500 No\r\n\r\n", b"x"),
            (_OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"), (b"HTTP/1.1 302 No\r\nLocation: /v2\r\n",
            b"X: y\r\n"),
            (answers[which].pieces[0][:-1], b""), (_OK + b"\r\n", b" " * 65536),
        )
    )  # fmt: skip
    pause = random.choice((0.02, 0.1, 0.4))
    answers[which] = Answer((start,), pause, drop, random.choice(("hold", "hold", "close")))
    return answers, False


def _away(random: Random, seeds: Seeds) -> tuple[Answers, bool]:
    """Redirects: to another server, another protocol, to nowhere, or in a circle."""
    answers = [_plain(each) for each in _right(seeds)]
    status = random.choice((301, 302, 303, 307, 308, 300, 305))
    location = random.choice(_LOCATIONS)
    away = f"HTTP/1.1 {status} Away\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
    answers[random.randrange(3)] = Answer((away,))
    return answers, False


def _claims(random: Random, seeds: Seeds) -> tuple[Answers, bool]:
    """Binary outputs whose sizes and shapes are claims."""
    about, model, outputs = _right(seeds)
    about["extensions"] = ["binary_tensor_data"]
    blobs = b""
    arrays = _arrays(seeds)
    for tensor in outputs["outputs"]:
        content = arrays[tensor["name"]].tobytes()
        del tensor["data"]
        size = random.choice((len(content), len(content), -4, 3, 0, 1 << 70, "zz", None, len(content) * 2))
        tensor["parameters"] = {"binary_data_size": size}
        if random.random() < 0.4:
            tensor["shape"] = random.choice(([1 << 40], [0], [-1], [], [1] * 40, [1 << 62, 4], ["2", "3"]))
        blobs += content
    text = json_bytes(outputs)
    split = random.choice((len(text), len(text), 0, -16, len(text) + len(blobs) + 1, "1e5", 1 << 70, len(text) - 1))
    answer = _OK + f"Inference-Header-Content-Length: {split}\r\n\r\n".encode() + text + blobs
    return [_plain(about), _plain(model), Answer((answer,))], False


def _forged(random: Random, seeds: Seeds) -> tuple[Answers, bool]:
    """Names and errors that look like results of ours."""
    said = _right(seeds)
    text = random.choice(FORGERIES)
    kind = random.randrange(4)
    if kind == 0:
        said[0]["name"] = said[0]["version"] = text
    elif kind == 1:
        said[1]["inputs"][0]["name"] = text
    elif kind == 2:
        random.choice(said[2]["outputs"])[random.choice(("name", "datatype", "shape"))] = text
    else:
        answers = [_plain(each) for each in said]
        which = random.randrange(3)
        answers[which] = Answer((b"HTTP/1.1 400 Odd\r\n\r\n" + json_bytes({"error": text}),))
        return answers, False
    return [_plain(each) for each in said], False


_KINDS: tuple[Callable[[Random, Seeds], tuple[Answers, bool]], ...] = (
    _lies, _lies, _documents, _documents, _texts, _frames, _frames, _slow, _slow, _away, _claims, _claims, _forged,
)  # fmt: skip


def draw_server(random: Random, seeds: Seeds) -> Case:
    """A bundle that is verified against a hostile server."""
    answers, must_fail = random.choice(_KINDS)(random, seeds)
    files: dict[str, Content] = {f"b/{path}": content for path, content in seeds.bundle.items()}
    extra = random.choice(((), (), ("--format", "json"), ("--model", "m")))
    arguments = ("bundle", "verify", "{}/b", "--server", SERVER, *extra)
    return Case(files, arguments, answers=tuple(answers), must_fail=must_fail, seconds=_SECONDS)


def honest(seeds: Seeds) -> Case:
    """The same with a server that answers what is right."""
    files: dict[str, Content] = {f"b/{path}": content for path, content in seeds.bundle.items()}
    answers = tuple(_plain(each) for each in _right(seeds))
    return Case(files, ("bundle", "verify", "{}/b", "--server", SERVER), answers=answers, seconds=_SECONDS)
