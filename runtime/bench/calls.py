"""One call of a session, prepared so that only the engine's work is timed.

With onnxruntime and engines the inputs and outputs are bound: they are in buffers of the device from the start, and a
call neither checks nor copies nor allocates them. Every other runtime is called as `Session.run` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..ort.providers import PROVIDERS
from ..session import Arrays, Session, check_inputs

Call = Callable[[], object]

# onnxruntime's key for "neither capture nor replay a CUDA graph in this run".
_NO_GRAPH = ("gpu_graph_id", "-1")


def ready_call(session: Session, inputs: Mapping[str, Any], *, cuda_graph: bool = False) -> tuple[Call, bool]:
    """Run the model once; return the call to time, and whether its inputs and outputs are bound.

    Raises:
        UsageError: the inputs do not fit, or the engine refuses their values.
    """
    checked = check_inputs(session.inputs, inputs)
    if session.backend != "onnxruntime":
        if (call := session.bound(checked)) is not None:
            return call, True
        session.run(checked)
        return lambda: session.run(checked), False
    return _bound(session, checked, cuda_graph), True


def _bound(session: Any, inputs: Arrays, cuda_graph: bool) -> Call:
    import onnxruntime as ort

    device = PROVIDERS[session.provider].device
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for spec in session.outputs:
        binding.bind_output(spec.name, device, 0)
    # The outputs are allocated in this run; all later runs write to the same place.
    if cuda_graph:
        # A CUDA graph recorded now would hold the addresses from before.
        options = ort.RunOptions()
        options.add_run_config_entry(*_NO_GRAPH)
        session.native.run_with_iobinding(binding, options)
    else:
        session.run_bound(binding)

    def call(_keep: object = values) -> None:  # on the CPU the buffers share the arrays' memory without owning it
        session.run_bound(binding)

    return call
