"""Name element types, as options and facts call them and as numpy does."""

from __future__ import annotations

# Types of matrices: the name in options and facts → numpy's name. From fine to coarse.
NUMPY_NAME = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The same the other way round.
SHORT_NAME = {numpy: short for short, numpy in NUMPY_NAME.items()}
# Types of inputs and outputs. numpy has no bf16, and neither onnxruntime nor TensorRT passes it to or from Python.
IO_NAME = NUMPY_NAME | {"bf16": "float32"}
