"""What the runners share: read cases, run each form call by call, write the largest errors as JSON.

A runner is a script for the environment of its runtime, which has numpy and that runtime: `run_X.py FOLDER [KIND...]`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Takes the path of a file and its case, and returns what runs it: arrays by name → arrays by name.
Opener = Callable[[Path, dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]


def main(opened: Opener, version: str) -> None:
    """Run all cases of a folder, and print one JSON document; whatever the runtime prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    results: dict[str, Any] = {}
    for case in sorted(path.parent for path in folder.glob("*/case.json")):
        document = json.loads((case / "case.json").read_text())
        if kinds and document["kind"] not in kinds:
            continue
        for form, name in document["forms"].items():
            result = _result(opened, case, name, document)
            results.setdefault(document["kind"], {})[form] = result
    json.dump({"version": version, "results": results}, answers)
    answers.close()


def _result(opened: Opener, case: Path, name: str, document: dict[str, Any]) -> dict[str, Any]:
    with contextlib.chdir(case) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        try:
            return {"error": largest_error(opened(case / name, document), case, document)}
        except BaseException as error:  # a runtime may end with anything, and the next case is tried all the same
            if isinstance(error, KeyboardInterrupt):
                raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return {"failed": f"{type(error).__name__}: {' '.join(lines)[:400]}"}


def largest_error(run: Callable[[dict[str, Any]], dict[str, Any]], case: Path, document: dict[str, Any]) -> float:
    """The largest difference to what onnxruntime returned, over all calls and outputs."""
    blob = (case / "arrays.bin").read_bytes()

    def array(described: dict[str, Any]) -> Any:
        data = np.frombuffer(blob, np.uint8, described["bytes"], described["offset"]).tobytes()
        return np.frombuffer(data, described["dtype"]).reshape(described["shape"]).copy()

    state = {name: array(described) for name, described in document["start"].items()}
    worst = 0.0
    for call in document["calls"]:
        inputs = {name: array(described) for name, described in call["inputs"].items()}
        outputs = run({name: {**inputs, **state}[name] for name in document["order"]["inputs"]})
        for name, described in call["outputs"].items():
            wanted, got = array(described), np.asarray(outputs[name])
            if got.shape != wanted.shape:
                raise ValueError(f"{name} has shape {got.shape}, not {wanted.shape}")
            difference = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
            worst = max(worst, float(np.max(difference, initial=0.0)) if np.isfinite(difference).all() else np.inf)
        state = {kept: np.array(outputs[name]) for name, kept in document["carried"].items()}
    return worst
