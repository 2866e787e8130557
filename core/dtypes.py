"""Name element types as options and sidecars do, and as numpy does."""

from __future__ import annotations

from .errors import UsageError

# Types of matrices, from fine to coarse: the name in options and sidecars → numpy's name.
NUMPY_NAME = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# numpy's name → the name in options and sidecars.
SHORT_NAME = {numpy: short for short, numpy in NUMPY_NAME.items()}
# Types of inputs and outputs. numpy has no bf16, and neither onnxruntime nor TensorRT passes it to or from Python.
IO_NAME = NUMPY_NAME | {"bf16": "float32"}
# The largest finite number of each type.
LARGEST_NUMBER = {"fp32": 3.4028234663852886e38, "fp16": 65504.0, "bf16": 3.3895313892515355e38}


def weights_beyond(names: str, largest: float, dtype: str) -> UsageError:
    """Return the error for weights that are infinite in a type.

    Args:
        names: of the weights.
        largest: the largest magnitude among them.
        dtype: a key of `LARGEST_NUMBER`.
    """
    return UsageError(
        f"Weights do not fit {dtype}: {names}.",
        why=f"The largest is {largest:.3g}, and {dtype} ends at {LARGEST_NUMBER[dtype]:.3g}.",
        fix="Export in bf16, which has the range of fp32, or in fp32.",
    )
