"""A tool on the files, and onnxruntime on what it writes: `run_tool.py TOOL FOLDER [KIND...]`."""

import importlib.metadata
import sys
import tempfile
from pathlib import Path

import onnx
import onnxruntime as ort
from harness import main


def onnxsim(source, target):
    import onnxsim

    simple, same = onnxsim.simplify(onnx.load(str(source)))
    assert same, "its own check found a difference"
    onnx.save(simple, target)


def onnxslim(source, target):
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(str(source))), target)


def version_converter(source, target):
    import onnx.version_converter

    onnx.save(onnx.version_converter.convert_version(onnx.load(str(source)), 21), target)


def quantize_dynamic(source, target):
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target)


def optimizer(source, target):
    from onnxruntime.transformers import optimizer

    # 0 heads and sizes: it looks for them itself. "bert" is its widest set of fusions.
    optimizer.optimize_model(str(source), model_type="bert", num_heads=0, hidden_size=0).save_model_to_file(target)


def polygraphy(source, target):
    from polygraphy.backend.onnx import fold_constants

    onnx.save(fold_constants(onnx.load(str(source))), target)


def ort_format(source, target):
    options = ort.SessionOptions()
    options.optimized_model_filepath = target
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


TOOLS = {
    "onnxsim": (onnxsim, "onnxsim"),
    "onnxslim": (onnxslim, "onnxslim"),
    "version_converter": (version_converter, "onnx"),
    "quantize_dynamic": (quantize_dynamic, "onnxruntime"),
    "optimizer": (optimizer, "onnxruntime"),
    "polygraphy": (polygraphy, "polygraphy"),
    "ort": (ort_format, "onnxruntime"),
}
apply, package = TOOLS[sys.argv.pop(1)]


def opened(path, case):
    target = str(Path(tempfile.mkdtemp()) / ("model.ort" if apply is ort_format else "model.onnx"))
    apply(path, target)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(target, options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs)))  # noqa: B905


main(opened, importlib.metadata.version(package))
