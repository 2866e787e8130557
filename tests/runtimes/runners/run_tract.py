"""tract, from its Python package."""

import importlib.metadata

import tract
from harness import main


def opened(path, case):
    model = tract.onnx().load(str(path)).into_model().into_runnable()
    names = case["order"]["outputs"]
    return lambda inputs: dict(zip(names, (x.to_numpy() for x in model.run(list(inputs.values())))))  # noqa: B905


main(opened, importlib.metadata.version("tract"))
