"""Child program: files judged, parsed and built by TensorRT's parser and builder; prints what it saw as JSON.

`python -m tests.gpu.simulators.tensorrt_releases.accepted` reads, as JSON, {"parts": …, "library": plugin library or
null, "asked": ONNX file that the parser is asked about, "wanted": ONNX file that is built}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .bind import Parts, bind
from .quick import engine_bytes


def main(asked: dict[str, Any]) -> dict[str, Any]:
    trt = bind(Parts(**asked["parts"]))
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    if asked["library"]:
        trt.get_plugin_registry().load_library(asked["library"])
    unused, network = builder.create_network(0), builder.create_network(0)  # parsers do not keep theirs alive
    judge, parser = trt.OnnxParser(unused, logger), trt.OnnxParser(network, logger)
    supported = judge.supports_model_v2(Path(asked["asked"]).read_bytes())
    parsed = parser.parse(Path(asked["wanted"]).read_bytes())
    shown = {
        "supported": supported,
        "subgraphs": judge.num_subgraphs,
        "parsed": parsed,
        "errors": [parser.get_error(index).desc() for index in range(parser.num_errors)],
        "plugins": sum(network.get_layer(i).type.name == "PLUGIN_V3" for i in range(network.num_layers)),
    }
    return {**shown, "engine": engine_bytes(builder, network)} if parsed else shown


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
