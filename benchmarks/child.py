"""What runs in a process of its own, because its memory or its first start is measured.

python -m benchmarks.child node CANDIDATE LENGTH
python -m benchmarks.child aft CANDIDATE LENGTH DIM CAUSAL
python -m benchmarks.child windows INSTRUCTION_SET THREADS
python -m benchmarks.child export CHECKPOINT
python -m benchmarks.child generate CANDIDATE FOLDER CONTEXT TOKENS
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from .cases.memory import anonymous, peak_of_call, peak_of_process, peak_of_step


def node(candidate: str, length: str) -> dict[str, Any]:
    """Peak memory of a candidate's first three runs; what it holds since its preparation is not counted.

    Three, because onnxruntime plans its memory in the first run and allocates by that plan from the second.
    """
    from .candidates import CANDIDATES, random_inputs

    run = CANDIDATES[candidate].prepare(random_inputs(int(length)))
    return {"peak_bytes": peak_of_call(run, times=3)}


def aft(candidate: str, length: str, dim: str, causal: str) -> dict[str, Any]:
    """Peak memory of a candidate's first three runs, as of `node`."""
    from .cases.aft import prepared

    return {"peak_bytes": peak_of_call(prepared(candidate, int(length), int(dim), causal == "1"), times=3)}


def windows(instruction_set: str, threads: str) -> dict[str, Any]:
    """The compiled kernel over its limit, window by window; an instruction set is chosen once in a process."""
    from .limit.windows import measure_set

    return {"rows": measure_set(instruction_set, int(threads))}


def export(checkpoint: str) -> dict[str, Any]:
    """An export from the import of PyTorch to the written file: seconds and peak memory by step, sizes."""
    began = time.perf_counter()
    from localattn.exporter.export import ExportRequest, open_request
    from localattn.exporter.export import export as run_export

    loaded = peak_of_process()
    names, ends, peaks = ["Loading PyTorch"], [began], []

    def step(name: str | None) -> None:
        ends.append(time.perf_counter())
        peaks.append(peak_of_step())
        names.extend([] if name is None else [name])

    with tempfile.TemporaryDirectory() as folder:
        request = ExportRequest(checkpoint=Path(checkpoint), output=Path(folder) / "model.onnx")
        report = run_export(request, step)
        step(None)
        size = request.output.stat().st_size
        if report.sidecar.external_data is not None:
            size += request.output.with_name(report.sidecar.external_data).stat().st_size
        _, source = open_request(ExportRequest(checkpoint=Path(checkpoint), output=Path(folder) / "other.onnx"))
    seconds = [end - start for start, end in pairwise(ends)]
    return {
        "seconds": dict(zip(names, seconds, strict=True)),
        "step_peak_bytes": dict(zip(names, peaks, strict=True)),
        "total_seconds": ends[-1] - began,
        "class_name": report.sidecar.class_name,
        "seq_len": report.sidecar.seq_len,
        "attention_nodes": len(report.sidecar.windows),
        "checks": {check.name: check.status for check in report.sidecar.checks},
        "weights_fp32_bytes": 4 * sum(t.numel() for t in source.state.values()),
        "file_bytes": size,
        "peak_bytes": max(peaks),
        "libraries_bytes": loaded,
    }


def generate(candidate: str, folder: str, length: str, tokens: str) -> dict[str, Any]:
    """Peak memory from the opening of the model to so many tokens after the context; libraries are not counted.

    And what is resident in the end without mapped files: weights that were read are the file's, not the process's.
    """
    from .generators import CANDIDATES, Files, import_libraries

    import_libraries(candidate)

    kept = []

    def run() -> None:
        kept.append(CANDIDATES[candidate].prepare(Files.in_folder(Path(folder)), int(length)))
        for _ in range(int(tokens)):
            kept[0]()

    before = anonymous()
    return {"peak_bytes": peak_of_call(run, times=1), "own_bytes": anonymous() - before}


if __name__ == "__main__":
    called = {"node": node, "aft": aft, "windows": windows, "export": export, "generate": generate}[sys.argv[1]]
    print(json.dumps(called(*sys.argv[2:])))
