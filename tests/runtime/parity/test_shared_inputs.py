"""What two files take alike: sizes of dynamic axes, types to draw in, and differences by name."""

from __future__ import annotations

import pytest

from localattn.core.errors import UsageError
from localattn.core.tensors import TensorSpec
from localattn.core.tolerance import TOLERANCES, coarsest
from localattn.runtime.parity.shared_inputs import shared_specs


def spec(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def test_dynamic_axes_that_are_tied_get_one_size() -> None:
    first = [spec("x", "b", "n", 4), spec("mask", "b", "n", dtype="bool"), spec("z", "?", 2)]
    second = [
        spec("mask", "batch", "seq", dtype="bool"),
        spec("z", "batch", 2),
        spec("x", 3, "seq", 4, dtype="float16"),
    ]
    shared = shared_specs(first, second, ("a", "b"))
    assert shared == [spec("x", 3, "n", 4, dtype="float16"), spec("mask", 3, "n", dtype="bool"), spec("z", 3, 2)]
    assert shared_specs([spec("x", "?", 1)], [spec("x", "n", 1)], ("a", "b")) == [spec("x", "?", 1)]


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ([spec("x", 1)], [spec("y", 1)], ["Only a has the input x float32 [1].", "Only b has the input y float32"]),
        ([spec("x", 1)], [spec("x", 1, 1)], ["'x' is float32 [1] in a and float32 [1, 1] in b"]),
        ([spec("x", 1)], [spec("x", 1, dtype="int64")], ["float32 [1] in a and int64 [1] in b"]),
        ([spec("x", 1, dtype="bfloat16")], [spec("x", 1)], ["bfloat16 [1] in a"]),
        (
            [spec("x", "n"), spec("y", "n")],
            [spec("x", 4), spec("y", 5)],
            ["'y' is float32 [n] in a and float32 [5] in b"],
        ),
    ],
)
def test_differences_are_told(first: list[TensorSpec], second: list[TensorSpec], shown: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        shared_specs(first, second, ("a", "b"))
    assert all(part in caught.value.why for part in shown), caught.value.why


def test_the_coarser_tolerance_decides() -> None:
    assert coarsest(["fp32", "fp16"]) == "fp16" and coarsest(["bf16", "fp16"]) == "bf16"
    assert coarsest(["int8", "bf16"]) == "int8" and coarsest(["fp32", "odd"]) == "odd"
    assert coarsest(["int8", "int4"]) == "int4"
    atols = [tolerance.atol for tolerance in TOLERANCES.values() if tolerance.atol is not None]
    assert atols == sorted(atols)
