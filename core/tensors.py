"""What a model's input or output is: name, element type, shape. Sidecar and sessions share it."""

from __future__ import annotations

from dataclasses import dataclass

# A dimension the file leaves open without naming it.
UNNAMED_DIMENSION = "?"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output.

    Args:
        name: as in the model file.
        dtype: numpy's name of the element type ("float32", "float16", "int64", "bool", …).
        shape: one entry a dimension; a number, or a name where the file leaves the size open
            (equal names mean equal sizes, "?" means any).
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def describe(self) -> str:
        """`name float32 [1, 128]`, for reports and errors."""
        return f"{self.name} {self.dtype} {format_shape(self.shape)}"


def format_shape(shape: tuple[int | str, ...]) -> str:
    """`[1, 128]`, also for a single dimension or none."""
    return "[" + ", ".join(str(size) for size in shape) + "]"
