"""Name element types as options and sidecars do, and as numpy does."""

from __future__ import annotations

# Types of matrices, from fine to coarse: the name in options and sidecars → numpy's name.
NUMPY_NAME = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# numpy's name → the name in options and sidecars.
SHORT_NAME = {numpy: short for short, numpy in NUMPY_NAME.items()}
# Types of inputs and outputs. numpy has no bf16, and neither onnxruntime nor TensorRT passes it to or from Python.
IO_NAME = NUMPY_NAME | {"bf16": "float32"}
