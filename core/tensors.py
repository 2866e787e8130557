"""Describe a model's inputs and outputs: name, element type, shape; and the usual names of axes and masks."""

from __future__ import annotations

from dataclasses import dataclass

# A dynamic axis without a name.
UNNAMED_DIMENSION = "?"
# Inputs of integers that are masks: 1 keeps a token, 0 hides it.
INTEGER_MASKS = frozenset({"attention_mask"})
# The integer input with the position of each token in a row. All other integer inputs are tokens.
POSITION_IDS = "position_ids"


# Names of the dynamic axes in files of this package.
BATCH, SEQUENCE = "batch", "seq"
# Names in all files: ours, then those usual in PyTorch and Hugging Face.
BATCH_AXES = (BATCH, "batch_size", "b", "N")
SEQUENCE_AXES = (SEQUENCE, "seq_len", "sequence", "sequence_length", "length", "n", "T")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output.

    Args:
        name: its name in the model file.
        dtype: numpy's name of the element type ("float32", "float16", "int64", "bool", …).
        shape: one entry per dimension: a number, or the name of a dynamic axis
            (equal names mean equal sizes, "?" means any).
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def describe(self) -> str:
        """Describe the tensor for reports and errors: `name float32 [1, 128]`."""
        return f"{self.name} {self.dtype} {format_shape(self.shape)}"


def format_shape(shape: tuple[int | str, ...]) -> str:
    """Write a shape as `[1, 128]`, also for a single dimension or none."""
    return "[" + ", ".join(str(size) for size in shape) + "]"


def named_sizes(batch: int | None, seq_len: int | None) -> dict[str, int]:
    """List the sizes of dynamic axes by every name they may have; skip sizes that are None."""
    sizes: dict[str, int] = {}
    for axes, size in ((BATCH_AXES, batch), (SEQUENCE_AXES, seq_len)):
        sizes |= dict.fromkeys(axes, size) if size is not None else {}
    return sizes
