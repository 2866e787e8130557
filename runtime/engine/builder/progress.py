"""Report TensorRT's build progress phase by phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def monitor(trt: Any, tell: Callable[[str], None]) -> Any:
    """Return an `IProgressMonitor` that reports each step; its `cancelled` is set when the user presses Ctrl-C.

    TensorRT calls it from inside the build, where no exception may pass: an interrupt makes it ask TensorRT to stop,
    and the caller of the build raises it again.

    Args:
        trt: the library's module.
        tell: called with one line a step, as "Building: Tactic selection 3/12".
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.cancelled = False
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self._tell(f"Building: {phase_name}")

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._tell(f"Building: {phase_name} {step + 1}/{self.steps.get(phase_name, 0)}")
            return not self.cancelled

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

        def _tell(self, line: str) -> None:
            try:
                tell(line)
            except KeyboardInterrupt:
                self.cancelled = True

    return Monitor()
