"""Calls of the fused CPU kernels: cases, the C++ program that runs them, and the check against `fused_reference`.

The program is `tests/support/native/sources/kernels/fuse.cpp`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localattn.core.nodes.fused import FUSED_NODES, GATES, ROTATIONS

from .cpu_program import ELEMENTS, NUMPY, Program
from .fused_reference import Array, expected, magnified, output_shapes, random_inputs, shapes

SOURCE = "fuse.cpp"
OP_TYPES = tuple(node.op_type for node in FUSED_NODES)  # in the order of fuse.cpp's kinds
# Sums of a few numbers of size 1; fp16 rounds them once, to 11 bits.
ATOL = {"fp32": 5e-6, "fp16": 1e-3}
RTOL = {"fp32": 2e-6, "fp16": 1e-3}
_LANES = 16  # kMostLanes
# Faults of fused.inl: what is there, what takes its place, and the op type whose numbers show it.
FAULTS = {
    "tail": ("if (c < call.dim) write_vector", "if (c + 1 < call.dim) write_vector", "MixStreams"),
    "column": ("own + 1, static_cast", "own, static_cast", "ReadStreams"),
    "sign": ("return x < 0.0f ? -y : y;", "return y;", "ReadStreams"),
    "norm": ("part[columns] = sum_of_squares(row, call.dim);", "part[columns] = splat(1.0f);", "ReadStreams"),
    "position": ("row / call.rows_a_position %", "row %", "RotateHeads"),
    "pair": ("own * load_some(cosine + c, some)", "own * load_some(sine + c, some)", "RotatePairs"),
    "gelu": ("x > 0.0f ? 1.0f - tail", "x > 0.0f ? tail", "GatedGelu"),
    "sigmoid": ("x > 0.0f ? large", "x > 0.0f ? power", "GatedSilu"),
    "mean": (
        "const Vector x = (load_elements(row + c) - mean)",
        "const Vector x = (load_elements(row + c))",
        "ReadStreamsNorm",
    ),
    "transposed": ("mix[s * to + t]", "mix[t * from + s]", "MixStreams"),
}

Inputs = dict[str, Array]


@dataclass(frozen=True)
class Case:
    """One call, of `batch`·`length` tokens; `range` is how many rows a task has, 0 for all."""

    op_type: str
    length: int = 7
    dim: int = 16
    streams: int = 4
    element: str = "fp32"
    batch: int = 1
    heads: int = 2
    heads_first: bool = False
    own_positions: bool = False
    threads: int = 1
    range: int = 0

    def inputs(self) -> Inputs:
        """Random ones, the same however the call is cut."""
        seed = zlib.crc32(repr(replace(self, threads=1, range=0)).encode())
        return random_inputs(self.shapes(), NUMPY[self.element], seed)

    def shapes(self) -> dict[str, list[int]]:
        sizes = (self.batch, self.length, self.streams, self.dim, self.heads)
        return shapes(self.op_type, *sizes, heads_first=self.heads_first, own_positions=self.own_positions)

    def outputs(self) -> dict[str, list[int]]:
        return output_shapes(self.op_type, self.shapes())

    def header(self) -> bytes:
        """As fuse.cpp reads it."""
        rows = self.batch * self.length
        if self.op_type in ROTATIONS:
            rows *= self.heads
        elif self.op_type in GATES:
            rows *= self.dim
        before = 1 if self.op_type == "BeginStreams" else self.streams
        a_position = 1 if self.heads_first else self.heads
        kind = [OP_TYPES.index(self.op_type), ELEMENTS.index(self.element)]
        a_sequence = self.heads * self.length if self.own_positions else 0
        sizes = [rows, before, self.streams, self.dim, self.length, a_position, a_sequence]
        return struct.pack("11q", *kind, *sizes, self.threads, self.range or max(rows, 1))

    def packed(self, inputs: Inputs) -> Iterable[bytes]:
        """The inputs as fused.h has them: the matrix transposed, its rows filled up with zeros."""
        for name, array in inputs.items():
            if name == "weight":
                array = np.pad(array.T, ((0, 0), (0, -self.dim % _LANES)))
            yield np.ascontiguousarray(array).tobytes()


class Runner(Program):
    """The program."""

    source = SOURCE

    def __call__(
        self, tmp_path: Path, calls: Sequence[tuple[Case, Inputs]], **environment: str
    ) -> tuple[list[dict[str, NDArray[Any]]], dict[str, Any]]:
        """The outputs of some calls, and what the program said."""
        with (tmp_path / "cases").open("wb") as file:
            for case, inputs in calls:
                file.write(case.header())
                file.writelines(case.packed(inputs))
        said = json.loads(self.call(tmp_path / "cases", tmp_path / "outputs", **environment))
        made, results, at = (tmp_path / "outputs").read_bytes(), [], 0
        for case, _ in calls:
            outputs = {}
            for name, shape in case.outputs().items():
                flat = np.frombuffer(made, NUMPY[case.element], int(np.prod(shape)), at)
                outputs[name], at = flat.reshape(shape), at + flat.nbytes
            results.append(outputs)
        assert at == len(made)
        return results, said


def check(runner: Runner, tmp_path: Path, cases: Sequence[Case], **environment: str) -> dict[str, Any]:
    """Run cases with inputs of their own and compare them; returns what the program said."""
    calls = [(case, case.inputs()) for case in cases]
    results, said = runner(tmp_path, calls, **environment)
    assert said["without_memory"] == 0
    for (case, inputs), outputs in zip(calls, results, strict=True):
        atol = ATOL[case.element] * magnified(case.op_type, inputs)
        for name, right in expected(case.op_type, inputs).items():
            np.testing.assert_allclose(
                outputs[name].astype(np.float64),
                right,
                rtol=RTOL[case.element],
                atol=atol,
                equal_nan=False,
                err_msg=f"{name} of {case}",
            )
    return said
