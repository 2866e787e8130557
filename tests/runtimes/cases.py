"""What a runner is given: a file in two forms, the inputs of a few calls, and what onnxruntime makes of them.

A case is a folder, for runners in any language: the files, `case.json`, and `arrays.bin` with the arrays one after the
other. A step file is called so often that its ring of caches is overwritten; each call is fed what the one before has
returned. "endless" begins at position 1,000,000.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.tensors import TensorSpec
from localattn.exporter.jobs.convert import to_standard_ops
from localattn.runtime import load
from localattn.runtime.session import Session

from .kinds import exported

FORMS = {"as exported": "model.onnx", "standard ops": "plain.onnx"}
_SIZES = {"batch": 2, "seq": 29}
_FIRST = {"endless": 1_000_000}
_CALLS = dict.fromkeys(("step", "step fp16", "step int8", "endless"), 20) | {"prefill": 4}
_TOKENS = 23

Arrays = dict[str, NDArray[Any]]


def write_case(folder: Path, kind: str, source: Path | None = None, forms: Sequence[str] = tuple(FORMS)) -> Path:
    """The case of a kind, or of a file that is given, in a folder of its name with hyphens."""
    place = folder / kind.replace(" ", "-")
    place.mkdir(parents=True)
    source = exported(kind) if source is None else source
    for path in source.parent.glob("*.data"):
        shutil.copy(path, place)
    shutil.copy(source, place / "model.onnx")
    if "standard ops" in forms:
        to_standard_ops(source, place / "plain.onnx")
    session, sidecar = load(source, "cpu", plugin="none"), read_sidecar(source)
    carried, calls, blob = {}, [], _Blob()
    state: Arrays = {}
    if sidecar is not None and sidecar.step is not None:
        carried = {cache.output: cache.input for cache in sidecar.step.caches}
        state = {x.input: np.full(x.shape, x.fill, dtype=x.dtype) for x in sidecar.step.caches}
    start = {name: blob.add(array) for name, array in state.items()}
    generator = np.random.default_rng(0)
    for number in range(_CALLS.get(kind, 1)):
        specs = [spec for spec in session.inputs if spec.name not in state]
        drawn = {spec.name: _draw(spec, generator) for spec in specs}
        if carried:
            assert sidecar is not None and sidecar.step is not None
            place_now = _FIRST.get(kind, 0) + number * sidecar.step.chunk
            drawn[sidecar.step.position_input] = np.array([place_now], dtype=np.int64)
        outputs = session.run(drawn | state)
        state = {carried[name]: array for name, array in outputs.items() if name in carried}
        calls.append({"inputs": blob.all(drawn), "outputs": blob.all(outputs)})
    (place / "arrays.bin").write_bytes(b"".join(blob.parts))
    document = {
        "kind": kind,
        "forms": {form: FORMS[form] for form in forms},
        "data": _data(place),
        "order": _order(session),
    }
    document |= {"carried": carried, "start": start, "calls": calls}
    (place / "case.json").write_text(json.dumps(document))
    return place


def write_cases(folder: Path, kinds: Sequence[str]) -> Path:
    """The cases of some kinds."""
    for kind in kinds:
        write_case(folder, kind)
    return folder


def _draw(spec: TensorSpec, generator: np.random.Generator) -> NDArray[Any]:
    shape = [_SIZES[size] if isinstance(size, str) else size for size in spec.shape]
    if spec.dtype == "bool":
        return generator.random(shape) > 0.3
    if spec.dtype.startswith("int"):
        return generator.integers(0, _TOKENS, shape).astype(spec.dtype)
    return generator.standard_normal(shape).astype(spec.dtype)


def _data(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("*.data"))


def _order(session: Session) -> dict[str, list[str]]:
    return {"inputs": [spec.name for spec in session.inputs], "outputs": [spec.name for spec in session.outputs]}


class _Blob:
    """Arrays one after the other, each at a multiple of 64 bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._size = 0

    def add(self, array: NDArray[Any]) -> dict[str, Any]:
        content = np.ascontiguousarray(array).tobytes()
        place = self._size
        self.parts.append(content + b"\0" * (-len(content) % 64))
        self._size += len(self.parts[-1])
        return {"dtype": array.dtype.name, "shape": list(array.shape), "offset": place, "bytes": len(content)}

    def all(self, arrays: Arrays) -> dict[str, dict[str, Any]]:
        return {name: self.add(array) for name, array in arrays.items()}
