"""ONNX's own reference implementation."""

import onnx
import onnx.reference
from harness import main


def opened(path, case):
    evaluator = onnx.reference.ReferenceEvaluator(onnx.load(str(path)))
    names = case["order"]["outputs"]
    return lambda inputs: dict(zip(names, evaluator.run(names, inputs)))  # noqa: B905


main(opened, onnx.__version__)
