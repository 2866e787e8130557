"""Child program: models on onnxruntime's CUDA provider, on a CUDA that computes nothing; prints what it saw as JSON.

`python -m tests.gpu.simulators.cuda_session` reads, as JSON, {"stand_ins": libraries of CUDA, "onnxruntime": folder of
onnxruntime-gpu, "folder": an empty one, "models": name → [ONNX file, whether a CUDA graph is asked for], "step": a step
file with its companion}.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from localattn.core.errors import LocalAttnError
from localattn.runtime import load, open_step
from localattn.runtime.backends.onnxruntime.tuned import OPTIMIZED, open_tuned
from localattn.runtime.bench.calls import ready_call

from .cuda_stand_in import hold

SIZES = {"batch": 2, "seq": 24}


def main(asked: dict[str, Any]) -> dict[str, Any]:
    hold(asked["stand_ins"])
    sys.path.insert(0, asked["onnxruntime"])
    folder = Path(asked["folder"])
    shown = {name: seen(Path(path), graph, folder / name) for name, (path, graph) in asked["models"].items()}
    return shown | {"steps": steps(Path(asked["step"]))}


def seen(path: Path, cuda_graph: bool, folder: Path) -> dict[str, Any]:
    """Provider, operators of the graph as it runs, and shapes of its outputs; or why it does not."""
    folder.mkdir()
    try:
        session = open_tuned(path, "cuda", None, cuda_graph=cuda_graph, profile=str(folder))
    except LocalAttnError as error:
        return {"error": error.why}
    graph = onnx.load(folder / OPTIMIZED, load_external_data=False).graph
    given = {spec.name: np.zeros([SIZES.get(size, size) for size in spec.shape], spec.dtype) for spec in session.inputs}
    call, bound = ready_call(session, given)
    for _ in range(3):
        call()
    session.native.end_profiling()
    outputs = {} if cuda_graph else load(path, "cuda").run(given)
    return {
        "provider": session.provider,
        "notes": session.notes,
        "operators": Counter(node.op_type for node in graph.node),
        "bound": bound,
        "outputs": {name: list(array.shape) for name, array in outputs.items()},
    }


def steps(path: Path) -> list[list[int]]:
    """The shapes of what a prompt and two tokens after it give."""
    session = open_step(path, "cuda")
    (spec,) = session.inputs
    given = [session.consume({spec.name: np.zeros((1, count), spec.dtype)}) for count in (19, 1, 1)]
    session.reset()
    return [list(array.shape) for array in given]


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
