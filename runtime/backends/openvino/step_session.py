"""Step files in OpenVINO: two banks of cache tensors take turns, so that no call copies a cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....onnx_graph.onnx_file import OnnxFile
from ..session import Arrays
from ..step_file import Prefill, check_caches, other_tensors, step_record
from ..step_session import FileStep
from .package import PACKAGE
from .session import OpenVinoSession, open_file

if TYPE_CHECKING:
    from ....core.documents.sidecar import Sidecar
    from ....core.documents.step_record import StepRecord


class OpenVinoStep(FileStep):
    """A step file, and its prefill file if there is one, in OpenVINO.

    Args:
        file: the step file.
        sidecar: its sidecar.
        prefill: as of `FileStep`.
        options: provider, threads, plugin and precision, as `open_file` takes them.
    """

    backend = "openvino"

    def __init__(self, file: Path | OnnxFile, sidecar: Sidecar, prefill: Prefill | None, *options: Any) -> None:
        self._options = options
        record = step_record(sidecar)
        session = self._opened(file, record)
        self.provider, self.notes = session.provider, session.notes
        self._sessions = {record.chunk: session}
        self._banks = [self._bank(record), self._bank(record)]
        super().__init__(Path(file), sidecar, prefill, *other_tensors(session, record))
        self._clear()

    def _opened(self, file: Path | OnnxFile, record: StepRecord) -> OpenVinoSession:
        session = open_file(file, *self._options)
        check_caches(session, record, Path(file))
        return session

    @staticmethod
    def _bank(record: StepRecord) -> list[Any]:
        make = PACKAGE.require().Tensor
        return [make(np.empty(cache.shape, dtype=cache.dtype)) for cache in record.caches]

    def _clear(self) -> None:
        for tensor, cache in zip(self._banks[0], self.record.caches, strict=True):
            tensor.data[...] = cache.fill

    def _execute(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        if chunk not in self._sessions:
            assert self._prefill is not None, "only a prefill file adds a chunk"
            self._sessions[chunk] = self._opened(*self._prefill)
        session, (read, written) = self._sessions[chunk], self._banks
        for cache, source, target in zip(self.record.caches, read, written, strict=True):
            session.request.set_tensor(cache.input, source)
            session.request.set_tensor(cache.output, target)
        position: Arrays = {self.record.position_input: np.array([self.position], dtype=np.int64)}
        session.infer({**inputs, **position})
        self._banks.reverse()
        output: NDArray[Any] = session.request.get_tensor(self.output.name).data
        return output
