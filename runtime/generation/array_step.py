"""Run step files in plain sessions: each call returns the caches as arrays for the next call.

Slower than the bound buffers of the engines' own step sessions, but it needs no sidecar, and the caches can be
inspected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.step_file import other_tensors
from ..backends.step_session import StepSession
from ..inputs.example_inputs import first_call
from ..session import Arrays, Session

if TYPE_CHECKING:
    from ...core.documents.step_record import StepRecord


class ArrayStep(StepSession):
    """A step file, and files with more positions per call that share its caches.

    Args:
        record: of the step file.
        sessions: by the positions of one call; the step file is that of `record.chunk`.
    """

    def __init__(self, record: StepRecord, sessions: Mapping[int, Session]) -> None:
        step = sessions[record.chunk]
        self.backend, self.provider, self.notes = step.backend, step.provider, step.notes
        self._sessions = sessions
        super().__init__(record, *other_tensors(step, record), sorted(sessions))
        self._clear()

    @property
    def sessions(self) -> Mapping[int, Session]:
        """The sessions, by the positions of one call."""
        return self._sessions

    @property
    def state(self) -> Arrays:
        """The position and the caches for the next call."""
        return {**self._caches, self.record.position_input: np.array([self.position], dtype=np.int64)}

    def _clear(self) -> None:
        self._caches = first_call(self.record)

    def _execute(self, inputs: Mapping[str, NDArray[Any]], chunk: int) -> NDArray[Any]:
        session = self._sessions[chunk]
        outputs = session.run({**inputs, **self.state})
        self._caches = {cache.input: outputs[cache.output] for cache in self.record.caches}
        return outputs[self.record.logits_output]
