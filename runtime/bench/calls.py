"""One call of a session, prepared so that only the runtime's work is timed.

Where a session can, inputs and outputs are bound: they lie in buffers of the device from the start, and a call neither
checks nor copies nor allocates them. Every other session is called as `Session.run` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..session import Session, check_inputs

Call = Callable[[], object]


def ready_call(session: Session, inputs: Mapping[str, Any]) -> tuple[Call, bool]:
    """Run the model once; return the call to time, and whether its inputs and outputs are bound.

    Raises:
        UsageError: the inputs do not fit, or the runtime refuses their values.
    """
    checked = check_inputs(session.inputs, inputs)
    if (call := session.bound(checked)) is not None:
        return call, True
    session.run(checked)
    return lambda: session.run(checked), False
