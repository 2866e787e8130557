"""Child program: models opened on onnxruntime's CUDA provider, on a CUDA that is none; prints what it saw as JSON.

`python -m tests.cuda_session` reads, as JSON, {"stand_ins": libraries of CUDA, "onnxruntime": folder of
onnxruntime-gpu, "folder": an empty one, "models": name → [ONNX file, whether a CUDA graph is asked for]}.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx

from localattn.core.errors import LocalAttnError
from localattn.runtime.bench.tuned import OPTIMIZED, open_tuned

from .cuda_stand_in import hold


def main(asked: dict[str, Any]) -> dict[str, Any]:
    hold(asked["stand_ins"])
    sys.path.insert(0, asked["onnxruntime"])
    return {
        name: seen(Path(path), graph, Path(asked["folder"]) / name) for name, (path, graph) in asked["models"].items()
    }


def seen(path: Path, cuda_graph: bool, folder: Path) -> dict[str, Any]:
    """Which provider started, and the operators of the graph as it would run; or why it did not open."""
    folder.mkdir()
    try:
        session = open_tuned(path, "cuda", None, cuda_graph=cuda_graph, profile=str(folder))
    except LocalAttnError as error:
        return {"error": error.why}
    except Exception as error:  # onnxruntime's, whose classes the program has not imported
        return {"error": str(error)}
    graph = onnx.load(folder / OPTIMIZED, load_external_data=False).graph
    session.native.end_profiling()
    return {
        "provider": session.provider,
        "notes": session.notes,
        "operators": Counter(node.op_type for node in graph.node),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
