"""Serve a step file and its prefill file in Triton's Python backend: any number of tokens per request.

Needs numpy and onnxruntime in the server's Python. `stream.json` next to this file says how the two files are called.

A request belongs to a sequence, whose caches stay here between its requests: whole chunks of its tokens go through the
prefill file, the rest through the step file. Where the files take several rows, sequences at the same position share a
call. With `new_tokens` the model goes on by itself; the last token it draws is not consumed, and begins the client's
next request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as utils

_NEW, _TEMPERATURE, _SEED, _GENERATED = "new_tokens", "temperature", "seed", "generated"


class Refused(Exception):
    """A request that cannot be answered; its sequence stays as it was."""


class Sequence:
    """One sequence: its caches, and how many positions they hold."""

    def __init__(self, caches: dict[str, Any]) -> None:
        self.caches, self.position, self.used = caches, 0, time.monotonic()
        self.generator = np.random.Generator(np.random.PCG64(0))


class Work:
    """The remaining work of one request."""

    def __init__(self, sequence: Sequence, feed: dict[str, Any], length: int, new: int, temperature: float) -> None:
        self.sequence, self.feed, self.length = sequence, feed, length
        self.new, self.temperature = new, temperature
        self.done, self.answered = 0, length  # the client's own positions
        self.outputs: list[Any] = []
        self.generated: list[int] = []
        self.error = ""


class TritonPythonModel:
    """One instance: the sessions of both files, and the sequences that the server sends here."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the files; called once by the server."""
        folder = Path(args["model_repository"], args["model_version"])
        self.settings = json.loads((folder / "stream.json").read_text())
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if self.settings["threads"]:
            options.intra_op_num_threads = self.settings["threads"]
        for library in self.settings["libraries"]:
            options.register_custom_ops_library(library)
        providers = ["CPUExecutionProvider"]
        if args["model_instance_kind"] == "GPU" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
            providers.insert(0, "CUDAExecutionProvider")
        self.sessions = {
            int(chunk): onnxruntime.InferenceSession(folder / path, options, providers=providers)
            for chunk, path in self.settings["files"].items()
        }
        self.chunks = sorted(self.sessions)
        self.rows, self.axis = self.settings["rows"], self.settings["sequence_axis"]
        self.output = self.settings["output"]
        self.names = [self.output, *(cache["output"] for cache in self.settings["caches"])]
        self.sequences: dict[Any, Sequence] = {}
        self._step([self._warm()], self.chunks[0])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests of different sequences; called by the server."""
        now = time.monotonic()
        for name in [name for name, kept in self.sequences.items() if now - kept.used > self.settings["idle_seconds"]]:
            del self.sequences[name]  # the server has dropped the sequence too
        work = [self._begin(request) for request in requests]
        self._run([each for each in work if isinstance(each, Work)])
        return [self._answer(request, each) for request, each in zip(requests, work, strict=True)]

    def _begin(self, request: Any) -> Work | str:
        """Return the work of a request, or why it is refused."""
        name = request.correlation_id()
        try:
            if request.flags() & utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sequences[name] = self._fresh()
            if name not in self.sequences:
                raise Refused(
                    f"Sequence {name} is unknown: it ended or was idle too long. Begin it with sequence_start."
                )
            return self._work(self.sequences[name], request)
        except Refused as refused:
            return str(refused)

    def _fresh(self) -> Sequence:
        rows = slice(0, 1) if self.rows else slice(None)
        caches = self.settings["caches"]
        return Sequence({x["input"]: np.full(x["shape"], x["fill"], x["dtype"])[rows] for x in caches})

    def _warm(self) -> Work:
        rows = slice(0, 1) if self.rows else slice(None)
        feed = {x["name"]: np.zeros(x["shape"], x["dtype"])[rows] for x in self.settings["inputs"]}
        return Work(self._fresh(), feed, self.chunks[0], 0, 0.0)

    def _work(self, sequence: Sequence, request: Any) -> Work:
        sequence.used = time.monotonic()
        names = [x["name"] for x in self.settings["inputs"]]
        feed = {name: self._array(request, name) for name in names}
        first = names[0]
        length = int(feed[first].shape[self.axis])
        if any(array.shape[self.axis] != length for array in feed.values()) or length == 0:
            raise Refused(f"The inputs {', '.join(names)} have different numbers of positions, or none.")
        if self.rows and len(feed[first]) != 1:
            raise Refused(f"{first} has {len(feed[first])} sequences; a request may have only one.")
        limit = self.settings["vocabulary"]
        if limit and (feed[first].min() < 0 or feed[first].max() >= limit):
            raise Refused(f"{first} contains a token outside 0 to {limit - 1}.")
        new, temperature = int(self._number(request, _NEW)), float(self._number(request, _TEMPERATURE))
        if new < 0 or not temperature >= 0:
            raise Refused(f"{_NEW} and {_TEMPERATURE} must be 0 or more.")
        if seed := int(self._number(request, _SEED)):
            sequence.generator = np.random.Generator(np.random.PCG64(abs(seed)))
        most, needed = self.settings["max_positions"], length + max(0, new - 1)
        if most is not None and sequence.position + needed > most:
            raise Refused(
                f"The model has {most} positions: {sequence.position} are used, and this request needs {needed} more. "
                "Send fewer tokens, or begin a new sequence."
            )
        return Work(sequence, feed, length, new, temperature)

    @staticmethod
    def _array(request: Any, name: str) -> Any:
        tensor = utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            raise Refused(f"The request has no {name}.")
        # DLPack and not `as_numpy`: some servers' Python backends misread arrays of numpy 2.
        return np.from_dlpack(tensor)

    @staticmethod
    def _number(request: Any, name: str) -> Any:
        tensor = utils.get_input_tensor_by_name(request, name)
        return 0 if tensor is None else np.from_dlpack(tensor).reshape(-1)[0]

    def _run(self, work: list[Work]) -> None:
        """Consume and draw until every request is done; join requests at the same position."""
        while left := [each for each in work if self._goes_on(each)]:
            together: dict[tuple[int, int], list[Work]] = {}
            for each in left:
                size = max((n for n in self.chunks if n <= each.length - each.done), default=self.chunks[0])
                together.setdefault((each.sequence.position, size), []).append(each)
            for (_, size), group in together.items():
                most = self.rows or 1
                for start in range(0, len(group), most):
                    self._guarded(group[start : start + most], size)

    def _goes_on(self, work: Work) -> bool:
        """Return whether a request has tokens to consume; if it has consumed all, draw the next token first."""
        if work.error:
            return False
        if work.done < work.length:
            return True
        if len(work.generated) >= work.new:
            return False
        logits = work.outputs[-1][0, -1]
        if not np.isfinite(logits.max()):
            work.error = "The model's logits are not finite: no token can be chosen."
            return False
        token = self._draw(logits, work)
        work.generated.append(token)
        if len(work.generated) == work.new:
            return False  # the last token begins the client's next request
        name = self.settings["inputs"][0]["name"]
        dtype = work.feed[name].dtype
        work.feed = {name: np.concatenate([work.feed[name], np.array([[token]], dtype)], 1)}
        work.length += 1
        return True

    @staticmethod
    def _draw(logits: Any, work: Work) -> int:
        if work.temperature == 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / work.temperature
        weights = np.exp(scaled - scaled.max()).cumsum()
        return int(np.searchsorted(weights, work.sequence.generator.random() * weights[-1], side="right"))

    def _guarded(self, group: list[Work], size: int) -> None:
        try:
            self._step(group, size)
        except Exception as error:  # onnxruntime's own; the other requests are answered
            for each in group:
                each.error = " ".join(str(error).split())[:500]

    def _step(self, group: list[Work], size: int) -> None:
        """Run one call for sequences at the same position, one row each."""
        pieces = [{k: x[_places(self.axis, w.done, size)] for k, x in w.feed.items()} for w in group]
        feed = {name: self._rows([piece[name] for piece in pieces]) for name in pieces[0]}
        for cache in self.settings["caches"]:
            feed[cache["input"]] = self._rows([each.sequence.caches[cache["input"]] for each in group])
        feed[self.settings["position"]] = np.array([group[0].sequence.position], np.int64)
        found = dict(zip(self.names, self.sessions[size].run(self.names, feed), strict=True))
        for row, each in enumerate(group):
            of = slice(row, row + 1) if self.rows else slice(None)
            each.outputs.append(found[self.output][of])
            each.sequence.caches = {x["input"]: found[x["output"]][of] for x in self.settings["caches"]}
            each.sequence.position += size
            each.done += size

    def _rows(self, arrays: list[Any]) -> Any:
        """Put the rows of a call together, and empty ones where sequences are missing."""
        missing = (self.rows or 1) - len(arrays)
        if not self.rows or (len(arrays) == 1 and not missing):
            return np.ascontiguousarray(arrays[0])
        return np.concatenate([*arrays, *[np.zeros_like(arrays[0])] * missing])

    def _answer(self, request: Any, work: Work | str) -> Any:
        name = request.correlation_id()
        error = work if isinstance(work, str) else work.error
        if not isinstance(work, str) and work.error:
            self.sequences.pop(name, None)  # its caches may be half updated
        if request.flags() & utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            self.sequences.pop(name, None)
        if isinstance(work, str) or error:
            return utils.InferenceResponse([], error=utils.TritonError(str(error)))
        work.sequence.used = time.monotonic()
        wanted = set(request.requested_output_names())
        return utils.InferenceResponse([*self._tensors(work, wanted)])

    def _tensors(self, work: Work, wanted: set[str]) -> Iterable[Any]:
        if self.output in wanted:
            whole = np.concatenate(work.outputs, self.axis)
            start = whole.shape[self.axis] - max(0, len(work.generated) - 1) - work.answered
            answer = whole[_places(self.axis, start, work.answered)]
            yield utils.Tensor.from_dlpack(self.output, answer.copy())  # the server refuses views with strides
        if _GENERATED in wanted and work.generated:
            yield utils.Tensor.from_dlpack(_GENERATED, np.array([work.generated], np.int64))


def _places(axis: int, start: int, count: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, start + count))
