"""What runs in a process of its own, because its memory or its first start is measured.

python -m benchmarks.child node CANDIDATE LENGTH
python -m benchmarks.child export CHECKPOINT
python -m benchmarks.child generate CANDIDATE FOLDER CONTEXT TOKENS
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .memory import peak_of_call, peak_of_process


def node(candidate: str, length: str) -> dict[str, Any]:
    """Peak memory of a candidate's first three runs; what it holds since its preparation is not counted.

    Three, because onnxruntime plans its memory in the first run and allocates by that plan from the second.
    """
    from .candidates import CANDIDATES, random_inputs

    run = CANDIDATES[candidate].prepare(random_inputs(int(length)))
    return {"peak_bytes": peak_of_call(run, times=3)}


def export(checkpoint: str) -> dict[str, Any]:
    """An export from the import of PyTorch to the written file: seconds by step, sizes, peak memory."""
    steps: list[tuple[str, float]] = [("Loading PyTorch", time.perf_counter())]
    from localattn.exporter.export import ExportRequest, open_request
    from localattn.exporter.export import export as run_export

    loaded = peak_of_process()
    with tempfile.TemporaryDirectory() as folder:
        request = ExportRequest(Path(checkpoint), Path(folder) / "model.onnx")
        report = run_export(request, lambda step: steps.append((step, time.perf_counter())))
        end, peak = time.perf_counter(), peak_of_process()
        size = request.output.stat().st_size
        if report.sidecar.external_data is not None:
            size += request.output.with_name(report.sidecar.external_data).stat().st_size
        _, source = open_request(ExportRequest(Path(checkpoint), Path(folder) / "other.onnx"))
    starts = [begin for _, begin in steps]
    return {
        "seconds": {name: stop - begin for (name, begin), stop in zip(steps, [*starts[1:], end], strict=True)},
        "total_seconds": end - starts[0],
        "class_name": report.sidecar.class_name,
        "seq_len": report.sidecar.seq_len,
        "attention_nodes": len(report.sidecar.windows),
        "checks": {check.name: check.status for check in report.sidecar.checks},
        "weights_fp32_bytes": 4 * sum(t.numel() for t in source.state.values()),
        "file_bytes": size,
        "peak_bytes": peak,
        "libraries_bytes": loaded,
    }


def generate(candidate: str, folder: str, length: str, tokens: str) -> dict[str, Any]:
    """Peak memory from the opening of the model to so many tokens after the context; libraries are not counted."""
    from .generators import CANDIDATES, Files, import_libraries

    import_libraries(candidate)

    def run() -> None:
        step = CANDIDATES[candidate].prepare(Files.in_folder(Path(folder)), int(length))
        for _ in range(int(tokens)):
            step()

    return {"peak_bytes": peak_of_call(run, times=1)}


if __name__ == "__main__":
    print(json.dumps({"node": node, "export": export, "generate": generate}[sys.argv[1]](*sys.argv[2:])))
