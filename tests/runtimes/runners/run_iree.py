"""IREE: the file imported to MLIR, compiled for the CPU, and run."""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import iree.compiler as compiler
import iree.runtime as runtime
import onnx
from harness import main

# The import knows the shapes of a copy with all weights inside.


def opened(path, case):
    folder = Path(tempfile.mkdtemp())
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(str(path)), data_prop=True), folder / "whole.onnx")
    imported = [sys.executable, "-m", "iree.compiler.tools.import_onnx", str(folder / "whole.onnx")]
    subprocess.run([*imported, "-o", str(folder / "model.mlir")], check=True, capture_output=True)
    code = compiler.compile_file(
        str(folder / "model.mlir"),
        target_backends=["llvm-cpu"],
        input_type="onnx",
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    config = runtime.Config("local-task")
    module = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, code), config)
    name = onnx.load(str(path), load_external_data=False).graph.name
    function, names = module[name], case["order"]["outputs"]

    def run(inputs):
        results = function(*inputs.values())
        results = results if isinstance(results, (tuple, list)) else [results]
        return dict(zip(names, (x.to_host() for x in results)))  # noqa: B905

    return run


main(opened, importlib.metadata.version("iree-base-compiler"))
