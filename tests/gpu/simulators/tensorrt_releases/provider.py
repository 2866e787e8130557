"""Child program: a model given to onnxruntime's TensorRT provider, which gives it to TensorRT's parser.

`python -m tests.gpu.simulators.tensorrt_releases.provider` reads, as JSON, {"parts": …, "stand_ins": libraries of CUDA,
"door": the parser (`tests/gpu/simulators/native/door.cpp`), "kept": folder for what comes to it, "onnxruntime": folder
of onnxruntime-gpu,
"library": plugin library or null, "model": ONNX file}. It prints what it opens, and ends where the provider asks for
an engine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from localattn.runtime import load

from ..cuda_stand_in import hold
from .bind import Parts, bind


def main(asked: dict[str, Any]) -> None:
    os.environ["LOCALATTN_DOOR"] = asked["kept"]
    hold([asked["door"]])  # before the bindings, with which another parser comes
    trt = bind(Parts(**asked["parts"]))
    hold(asked["stand_ins"])
    sys.path.insert(0, asked["onnxruntime"])
    # As docs/plugin.md has it.
    trt.init_libnvinfer_plugins(trt.Logger(trt.Logger.ERROR), "")
    if asked["library"]:
        trt.get_plugin_registry().load_library(asked["library"])
    import onnxruntime

    print(json.dumps({"onnxruntime": onnxruntime.__version__, "file": onnxruntime.__file__}), flush=True)
    session = load(Path(asked["model"]), provider="tensorrt")
    raise AssertionError(f"the provider built an engine: {session.provider}")


if __name__ == "__main__":
    main(json.load(sys.stdin))
