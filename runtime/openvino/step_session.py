"""Step files in OpenVINO: two banks of cache tensors take turns, so that no call copies a cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...onnx_graph.onnx_file import OnnxFile
from ..generation.step_file import check_caches, find_prefill, other_tensors
from ..generation.step_session import StepSession, step_facts
from ..session import RUNTIMES, Arrays
from .session import OpenVinoSession, open_file

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar
    from ...core.documents.step_facts import StepFacts


class OpenVinoStep(StepSession):
    """A step file, and its prefill file if there is one, sharing their caches.

    Args:
        path: the step file.
        sidecar: its sidecar.
        session: the step file, opened.
        prefill: path and facts of the prefill file, opened when first needed; None without one.
        options: further arguments for opening files.
    """

    backend = "openvino"

    def __init__(
        self,
        path: Path,
        sidecar: Sidecar,
        session: OpenVinoSession,
        prefill: tuple[Path | OnnxFile, StepFacts] | None,
        options: tuple[Any, ...],
    ) -> None:
        facts = step_facts(sidecar)
        check_caches(session, facts, path)
        self.sidecar, self.provider, self.notes = sidecar, session.provider, session.notes
        self._options, self._prefill = options, prefill
        self._sessions = {facts.chunk: session}
        self._banks = [self._bank(facts), self._bank(facts)]
        inputs, output = other_tensors(session, facts)
        chunks = {facts.chunk} | ({prefill[1].chunk} if prefill else set())
        super().__init__(facts, inputs, output, sorted(chunks))
        self.missing_prefill = facts.prefill if prefill is None else None
        self._clear()

    @staticmethod
    def _bank(facts: StepFacts) -> list[Any]:
        make = RUNTIMES["openvino"].require().Tensor
        return [make(np.empty(cache.shape, dtype=cache.dtype)) for cache in facts.caches]

    def _clear(self) -> None:
        for tensor, cache in zip(self._banks[0], self.facts.caches, strict=True):
            tensor.data[...] = cache.fill

    def _execute(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        if chunk not in self._sessions:
            assert self._prefill is not None, "only a prefill file adds a chunk"
            file, facts = self._prefill
            self._sessions[chunk] = open_file(file, *self._options)
            check_caches(self._sessions[chunk], facts, Path(file))
        session, (read, written) = self._sessions[chunk], self._banks
        for cache, source, target in zip(self.facts.caches, read, written, strict=True):
            session.request.set_tensor(cache.input, source)
            session.request.set_tensor(cache.output, target)
        position: Arrays = {self.facts.position_input: np.array([self.position], dtype=np.int64)}
        session.infer({**inputs, **position})
        self._banks.reverse()
        output: NDArray[Any] = session.request.get_tensor(self.output.name).data
        return output


def open_step_file(
    file: Path | OnnxFile, sidecar: Sidecar, provider: str, threads: int | None, plugin: str, precision: str = "fp32"
) -> OpenVinoStep:
    """Open a step file whose sidecar was read; raises what `runtime.step_session.open_step` raises."""
    path, options = Path(file), (provider, threads, plugin, precision)
    return OpenVinoStep(path, sidecar, open_file(file, *options), find_prefill(path, sidecar), options)
