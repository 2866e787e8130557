"""Runs one-node models with the compiled kernels in a process of its own, and says how much memory each call took.

    python -m localattn.tests.support.native_worker LIBRARY CASES

CASES is JSON: a list of `[domain, op type, element type, shapes of the inputs, shapes of the outputs, attributes]`; an
output whose shape is null is left to onnxruntime. For each it prints a line of JSON: bytes of all tensors, and what the
process took beyond them at most during a call (`peak`), and after two calls (`held`); or, where onnxruntime refuses,
its `error`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
_OPSET, _IR_VERSION = 20, 9
_NUMPY = {"fp32": np.float32, "fp16": np.float16}
# Inputs whose type is the same in every file.
_OWN_TYPE: dict[str, Any] = {
    "key_mask": bool,
    "write_index": np.int64,
    **dict.fromkeys(("score_bias", "query_scale", "key_scale"), np.float32),
}


def _status(field: str) -> int:
    """A field of this process's memory, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, field
    return int(found[1]) * 1024


def _model(domain: str, op_type: str, dtype: str, inputs: Any, outputs: Any, attributes: Any) -> bytes:
    from onnx import TensorProto, helper

    element = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}[dtype]

    def described(names: Any) -> list[Any]:
        own = {name: helper.np_dtype_to_tensor_dtype(np.dtype(kind)) for name, kind in _OWN_TYPE.items()}
        kinds = {name: own.get(name, element) for name in names}
        return [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]

    node = helper.make_node(op_type, [*inputs], [*outputs], domain=domain, **attributes)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(domain, 1)]
    graph = helper.make_graph([node], "native", described(inputs), described(outputs))
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString()
    return serialized


def _filled(name: str, shape: list[int], dtype: str) -> np.ndarray[Any, Any]:
    """Ones: every page of them is in memory, and no number overflows. Where keys are written, the first place."""
    return np.full(shape, 0 if name == "write_index" else 1, _OWN_TYPE.get(name, _NUMPY[dtype]))


def measure(ort: Any, options: Any, case: list[Any]) -> dict[str, Any]:
    """One case."""
    _, _, dtype, inputs, outputs, _ = case
    session = ort.InferenceSession(_model(*case), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    tensors = 0
    for name, shape in inputs.items():
        array = _filled(name, shape, dtype)
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        tensors += array.nbytes
        del array
    for name, shape in outputs.items():
        if shape is None:
            binding.bind_output(name, "cpu")
            continue
        array = _filled(name, shape, dtype)
        binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        tensors += array.nbytes
        del array
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(2):
        session.run_with_iobinding(binding)
    return {"tensors": tensors, "peak": _status("VmHWM") - before, "held": _status("VmRSS") - before}


def main(library: str, cases: str) -> None:
    """All cases."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.register_custom_ops_library(library)
    options.log_severity_level, options.enable_cpu_mem_arena, options.intra_op_num_threads = 4, False, THREADS
    for case in json.loads(cases):
        try:
            print(json.dumps(measure(ort, options, case)), flush=True)
        except Exception as error:
            print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
