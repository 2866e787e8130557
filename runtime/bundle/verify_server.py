"""`localattn bundle verify --server`: send a bundle's samples to a server, and compare its answers.

A model that takes what the file takes gets the samples as they are. One that keeps the caches of a step file itself
gets the stream that the samples were drawn from, as one sequence: token by token, or in larger pieces where it takes
any number of positions. Only positions of samples are compared, for which the bundle has outputs.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.documents.sidecar import read_sidecar
from ...core.errors import CheckFailed, UsageError
from .device.results import NO_OUTPUTS, that_prove_something, unusual_tolerance
from .device.verify import compare, nothing_run, read_arrays
from .open_inference import Refused, Server
from .triton import served_name
from .verify import Verified, as_errors, checked

if TYPE_CHECKING:
    from ...core.documents.step_record import StepRecord

Report = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]

_CONFIG = "config.pbtxt"


def verify_on_server(path: Path, url: str, model: str | None = None, manifest_sha256: str | None = None) -> Verified:
    """Check every file of a bundle, then send its samples to a server of the Open Inference Protocol v2.

    Args:
        path: the bundle, a folder or a tar.
        url: the server's address, "http://host:8000".
        model: the server's name of a model; None sends to every model of the bundle's Triton repository, or where it
            has none to the one of the bundle's name.
        manifest_sha256: refuse the bundle unless its manifest has this SHA-256.

    Raises:
        UsageError: no bundle, one without samples, or no address.
        CheckFailed: a file was altered, or the server's model takes other inputs.
        MissingDependency: the server does not answer or does not serve the model.
    """
    with as_errors(), checked(path, manifest_sha256, unpack=True) as (folder, manifest, digest):
        assert folder is not None
        if not manifest["samples"]:
            raise UsageError(
                "The bundle has no samples.",
                why="A check of a server sends samples.",
                fix="Create the bundle with samples.",
            )
        server = Server(url)
        rows = [row for name in _names(manifest, model) for row in _judged(_Served(server, name, folder, manifest))]
        passed = all(row["passed"] for row in rows)
        report = nothing_run(manifest) | {"passed": passed, "code": 0 if passed else 1, "rows": rows}
    return Verified(manifest, digest, report)


def _judged(served: _Served) -> list[Report]:
    """Return the rows of a served model, of which at least one proves something or failed.

    Raises:
        CheckFailed: nothing was compared.
    """
    rows = that_prove_something([*served.rows()])
    if not rows:
        raise CheckFailed(
            f"No answer of {served.name} was compared.",
            why="The bundle has no samples for this model.",
            fix="Create the bundle again, with samples.",
        )
    return rows


def _names(manifest: Report, model: str | None) -> list[str]:
    if model is not None:
        return [model]
    parts = [entry["path"].split("/") for entry in manifest["files"]]
    return [part[1] for part in parts if part[0] == "triton" and part[-1] == _CONFIG] or [served_name(manifest["name"])]


class _Served:
    """A model of the server, and the model of the bundle that it serves."""

    def __init__(self, server: Server, name: str, folder: Path, manifest: Report) -> None:
        self.name = name
        self._server, self._name, self._folder, self._manifest = server, name, folder, manifest
        about = server.model(name)
        listed = about.get("inputs")
        tensors = [x for x in listed if isinstance(x, dict)] if isinstance(listed, list) else []
        self._shapes = {str(x["name"]): _sizes(x.get("shape")) for x in tensors if isinstance(x.get("name"), str)}

    def rows(self) -> Iterator[Report]:
        """Send the samples; yield a row for each output.

        Raises:
            CheckFailed: no model of the bundle takes what the server's model takes.
        """
        models = [model for model in self._manifest["models"] if model["kind"] == "onnx"]
        # A server that lists no inputs is assumed to serve the first model.
        direct = [model for model in models if self._takes(model)] if self._shapes else models[:1]
        if direct:
            yield from self._directly(direct[0])
            return
        for model in models:
            step = self._step(model)
            if step is not None and self._takes_tokens(model, step):
                yield from self._as_sequence(model, step)
                return
        raise CheckFailed(
            f"{self._name} on {self._server.url} is not a model of this bundle.",
            why=f"Its inputs are {', '.join(sorted(self._shapes))[:200]}.",
            fix="Name another model of the server, or another bundle.",
        )

    def _takes(self, model: Report) -> bool:
        """Return whether the server's model has the inputs of a file, in shapes that fit where it states any."""
        if {spec["name"] for spec in model["inputs"]} != self._shapes.keys():
            return False
        return all(_fits(self._shapes[spec["name"]], spec["shape"]) for spec in model["inputs"])

    def _takes_tokens(self, model: Report, step: StepRecord) -> bool:
        """Return whether the server's model takes the tokens of a step file, whose caches it then keeps itself."""
        stated = self._shapes.get(step.token_input)
        if step.mode != "step" or stated is None:
            return False
        shapes = {spec["name"]: spec["shape"] for spec in model["inputs"]}
        return len(stated) in (0, len(shapes.get(step.token_input, ())))

    def _step(self, model: Report) -> StepRecord | None:
        sidecar = read_sidecar(self._folder / model["path"])
        return None if sidecar is None else sidecar.step

    def _samples(self, model: Report) -> list[tuple[str, Arrays, Arrays]]:
        return [
            (x["inputs"], read_arrays(self._folder / x["inputs"]), read_arrays(self._folder / x["outputs"]))
            for x in self._manifest["samples"]
            if x["model"] == model["path"]
        ]

    def _directly(self, model: Report) -> Iterator[Report]:
        for sample, inputs, expected in self._samples(model):
            if not expected:
                yield self._row(model, sample, "", "") | NO_OUTPUTS
                continue
            try:
                most = sum(array.size for array in expected.values())
                actual = self._server.infer(self._name, inputs, list(expected), most=most)
            except Refused as refused:
                yield self._row(model, sample, "", "") | {"passed": False, "why": str(refused)}
                continue
            yield from self._compared(model, sample, actual, expected)

    def _as_sequence(self, model: Report, step: StepRecord) -> Iterator[Report]:
        """Send the whole stream in order, and compare where there is a sample."""
        path = f"samples/{Path(model['path']).stem}.sequence.npz"
        samples: dict[int, tuple[str, Arrays, Arrays]] = {}
        for sample, inputs, expected in self._samples(model):
            at = inputs.get(step.position_input, np.empty(0)).reshape(-1)
            if not len(at) or at.dtype.kind not in "iu":
                raise CheckFailed(f"{sample} has no {step.position_input}.", fix="Make the bundle again.")
            samples[int(at[0])] = sample, inputs, expected
        if path not in {entry["path"] for entry in self._manifest["files"]}:
            raise UsageError(
                "The bundle has no sample sequence for this step file.",
                why="Its samples came from a file, or an older release created it.",
                fix="Create the bundle again, with random samples.",
            )
        stream = read_arrays(self._folder / path)
        axis, shape = step.sequence_axis, self._shapes[step.token_input]
        first = _first(stream, step, path)
        if shape and len(shape) != first.ndim:
            raise CheckFailed(
                f"{self.name} needs {step.token_input} with {len(shape)} axes; the bundle's sequence has {first.ndim}.",
                fix="Make the bundle again, or name another model of the server.",
            )
        rows = first.shape[0] if axis else 1
        # A server that joins sequences takes one row a request, and the rows of the file are sequences of their own.
        apart = axis > 0 and rows > 1 and (not shape or shape[0] != rows)
        pieces = _pieces(first.shape[axis], step.chunk, samples, many=not shape or shape[axis] < 0)
        # Each call of the file has as many outputs; a piece may be as long as several calls.
        given = (expected.get(step.logits_output) for _, _, expected in samples.values())
        most = max((array.size for array in given if array is not None), default=0)
        answers = [self._sent(stream, step, pieces, row, most) for row in (range(rows) if apart else (None,))]
        for position, (sample, _, expected) in samples.items():
            wanted = {name: array for name, array in expected.items() if name == step.logits_output}
            if not wanted:
                yield self._row(model, sample, "", "") | NO_OUTPUTS
                continue
            found = [
                answer.get(position, "no call of the bundle's sequence begins at this position") for answer in answers
            ]
            refused = next((x for x in found if isinstance(x, str)), "")
            parts = [np.atleast_1d(x) for x in found if not isinstance(x, str)]
            if not refused and len({part.shape[1:] for part in parts}) > 1:
                refused = "the answers to its rows have different shapes"
            if refused:
                yield self._row(model, sample, step.logits_output, "") | {"passed": False, "why": refused}
                continue
            yield from self._compared(model, sample, {step.logits_output: np.concatenate(parts)}, wanted)

    def _sent(
        self, stream: Arrays, step: StepRecord, pieces: Sequence[tuple[int, int]], row: int | None, most: int
    ) -> dict[int, NDArray[Any] | str]:
        """Send a stream; return the output by the start position of each piece, or the server's message.

        `most` is how many numbers a call of the file gives.
        """
        sequence, found = secrets.randbelow(1 << 62) + 1, dict[int, NDArray[Any] | str]()
        for index, (start, stop) in enumerate(pieces):
            places = (*[slice(None)] * step.sequence_axis, slice(start, stop))
            piece = {name: (array if row is None else array[row : row + 1])[places] for name, array in stream.items()}
            try:
                answer = self._server.infer(
                    self._name,
                    piece,
                    [step.logits_output],
                    most=most * -(-(stop - start) // step.chunk),
                    sequence_id=sequence,
                    sequence_start=index == 0,
                    sequence_end=index == len(pieces) - 1,
                )
            except Refused as refused:
                return found | {place: str(refused) for place, _ in pieces[index:]}
            found[start] = answer.get(step.logits_output, "the model has no such output")
        return found

    def _compared(self, model: Report, sample: str, actual: Arrays, expected: Arrays) -> Iterator[Report]:
        for name, wanted in expected.items():
            row = self._row(model, sample, name, str(wanted.dtype))
            if name not in actual:
                yield row | {"passed": False, "why": "the model has no such output"}
                continue
            array = actual[name]
            if not wanted.ndim and array.shape == (1,):  # servers do not return scalars
                array = array.reshape(())
            yield row | compare(array, wanted, model["tolerance"])

    def _row(self, model: Report, sample: str, output: str, dtype: str) -> Report:
        computed = {"source": self._server.name, "sha256": "", "ops": []}
        where = {"model": self._name, "provider": self._server.url, "sample": sample}
        where["tolerance"] = unusual_tolerance(model)
        return where | {"output": output, "dtype": dtype, "kernels": computed}


def _first(stream: Arrays, step: StepRecord, path: str) -> NDArray[Any]:
    """Return the tokens of a sequence; its other arrays are in the same file.

    Raises:
        CheckFailed: they are not there, or the arrays do not fit each other.
    """
    first, axis = stream.get(step.token_input), step.sequence_axis
    why = ""
    if first is None:
        why = f"It has no {step.token_input}."
    elif any(array.ndim <= axis or array.shape[: axis + 1] != first.shape[: axis + 1] for array in stream.values()):
        why = "Its arrays have different numbers of rows or positions."
    elif not first.size:
        why = "It is empty."
    if first is None or why:
        raise CheckFailed(f"{path} is not a sequence for this step file.", why=why, fix="Make the bundle again.")
    return first


def _pieces(length: int, chunk: int, positions: Mapping[int, object], *, many: bool) -> list[tuple[int, int]]:
    """Cut a stream into requests: one per call of the file, or all positions between two samples if they fit."""
    cuts = set(range(0, length, chunk)) if not many else {0, *positions, *(place + chunk for place in positions)}
    places = sorted(place for place in cuts if place < length)
    return list(zip(places, [*places[1:], length], strict=True))


def _sizes(shape: object) -> list[int]:
    """Return a shape that a server states, also with sizes as texts; none if it states no valid shape."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return [int(size) for size in shape] if isinstance(shape, list) else []
    return []


def _fits(stated: Sequence[int], shape: Sequence[int | str]) -> bool:
    """Return whether a shape that a server states, with -1 for any size, can be that of a file; none fits all."""
    if not stated or not shape:
        return True
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return len(stated) == len(sizes) and all(-1 in (a, b) or a == b for a, b in zip(stated, sizes, strict=True))
