"""MNN: the file converted, and run on the CPU in the precision that it calls high.

The converter is called without the package MNN.tools, which installs a package for telemetry when it is imported.
"""

import importlib.metadata
import multiprocessing
import tempfile
from pathlib import Path

import numpy as np
from harness import main


def _serve(pipe, path, names):
    """Convert and run in a process of its own: some files end it."""
    import _tools
    import MNN.expr as expr
    import MNN.nn as nn

    target = str(Path(tempfile.mkdtemp()) / "model.mnn")
    _tools.mnnconvert(["mnnconvert", "-f", "ONNX", "--modelFile", path, "--MNNModel", target, "--bizCode", "x"])
    manager = nn.create_runtime_manager(({"backend": 0, "precision": "high", "numThread": 1},))
    inputs, outputs = names["inputs"], names["outputs"]
    network = nn.load_module_from_file(target, inputs, outputs, runtime_manager=manager)

    def variable(array):
        whole = array.dtype.kind in "iub"
        array = np.ascontiguousarray(array, np.int32 if whole else np.float32)
        return expr.const(array, list(array.shape), expr.NCHW, expr.int if whole else expr.float)

    pipe.send(None)
    while True:
        given = pipe.recv()
        answers = network.forward([variable(given[name]) for name in inputs])
        shown = [expr.convert(x, expr.NCHW) for x in answers]
        pipe.send({name: np.array(x.read()).reshape(x.shape) for name, x in zip(outputs, shown)})  # noqa: B905


def opened(path, case):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(theirs, str(path), case["order"]), daemon=True
    )
    process.start()
    theirs.close()

    def answer():
        try:
            return ours.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"MNN ended with {process.exitcode}") from None

    answer()

    def run(inputs):
        ours.send(inputs)
        return answer()

    return run


main(opened, importlib.metadata.version("MNN"))
