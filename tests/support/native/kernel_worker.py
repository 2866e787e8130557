"""A child process in which Triton interprets kernels on the CPU.

Triton decides at import between compiling and interpreting, so the process of the tests stays out of it. Requests
and answers are pickled to the pipes: `(call, arguments)` and the tensor, or the error.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any


class Worker:
    """The parent's end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "localattn.tests.support.native.kernel_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )

    def __call__(self, call: str, *arguments: Any) -> Any:
        """The tensor that `launch` or `operator` returns; the error it raises."""
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump((call, arguments), self.process.stdin)
        self.process.stdin.flush()
        answer = pickle.load(self.process.stdout)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def main() -> None:
    """The child's end: answers until its input closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints must not end up between the answers
    _widen_bf16_products()
    _round_to_fp8()
    import torch

    from localattn.plugins import grouped_op, torch_op
    from localattn.plugins.kernel.launch import launch
    from localattn.tests.support.triton_launch import launch_aft, launch_ring

    # `_on_gpu` is what the operator calls for CUDA tensors; it is the same on the CPU, but interpreted.
    calls = {
        "launch": launch,
        "launch fp8": lambda *given: launch(*(x.view(torch.float8_e4m3fn) for x in given[:3]), *given[3:]),
        "aft": lambda *tensors: launch_aft(*tensors[:5], causal=tensors[5]),
        "ring": launch_ring,
        "operator": torch_op._on_gpu,
        "grouped operator": grouped_op._on_gpu,
    }
    while True:
        try:
            call, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = calls[call](*arguments)
        except Exception as error:
            answer = error if type(error).__module__.startswith("localattn") else RuntimeError(repr(error))
        pickle.dump(answer, answers)
        answers.flush()


def _widen_bf16_products() -> None:
    """Let the interpreter multiply matrices of bf16 as a GPU does, exactly and summed in fp32.

    Triton 3.7.1's interpreter keeps bf16 as 16-bit integers and multiplies those.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
        return multiply(self, a, b, *rest)

    builder.create_dot = create_dot


def _round_to_fp8() -> None:
    """Let the interpreter round to E4M3 as a GPU does: to nearest even, at most 448.

    Triton 3.7.1's interpreter rounds halves up, and does not carry into the exponent.
    """
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    fp8, wide = tl.float8e4nv, {tl.float16: np.float16, tl.float32: np.float32}

    def rounded(values: Any, source: Any, result: Any, mode: Any) -> Any:
        if fp8 not in (source, result):
            return convert(values, source, result, mode)
        numbers = values.view(ml_dtypes.float8_e4m3fn if source == fp8 else wide[source])
        if source == fp8:
            return numbers.astype(wide[result])
        return np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    interpreter._convert_float = rounded


if __name__ == "__main__":
    main()
