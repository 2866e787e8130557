"""Whether files that a stopped command left are whole: each can be read to its end, and agrees with those beside it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import onnx


def torn(files: Mapping[str, bytes], every: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Files that are not whole, and why.

    Args:
        files: those to look at, by path.
        every: all that lies there, by path.
    """
    for name, content in files.items():
        try:
            if why := _fault(name, content, every):
                yield name, why
        except Exception as error:  # whatever a library says of a file that it cannot read
            yield name, f"{type(error).__name__}: {error}"


def _fault(name: str, content: bytes, every: Mapping[str, Any]) -> str:
    """Why a file is not whole; "" if it is.

    Raises:
        Exception: it cannot be read.
    """
    suffix = PurePosixPath(name).suffix
    if suffix == ".npz":
        with np.load(io.BytesIO(content)) as arrays:
            assert all(arrays[each].size >= 0 for each in arrays.files)
    elif suffix == ".onnx":
        model = onnx.load_model_from_string(content)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                place = str(PurePosixPath(name).parent / entry.value)
                if entry.key == "location" and place not in every:
                    return f"{place} is not there"
    elif suffix == ".json":
        document = json.loads(content)
        if isinstance(document, dict) and "model_sha256" in document:
            model_bytes = every.get(name.removesuffix(".json"))
            if model_bytes is None:
                return "the model is not there"
            if hashlib.sha256(model_bytes).hexdigest() != document["model_sha256"]:
                return "it tells of another model"
        if PurePosixPath(name).name == "manifest.json":
            place = PurePosixPath(name).parent
            missing = [each["path"] for each in document["files"] if str(place / each["path"]) not in every]
            if missing:
                return f"{missing} are not there"
    elif suffix == ".tar":
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                if member.isfile():
                    stream = archive.extractfile(member)
                    assert stream is not None
                    if len(stream.read()) != member.size:
                        return f"{member.name} is cut"
    elif suffix in (".md", ".html") and not content.endswith(b"\n"):
        return "it does not end with a line"
    return ""
