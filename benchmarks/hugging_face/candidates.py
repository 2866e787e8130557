"""What both measurements of a Hugging Face model share: each candidate's file is made once, and runs in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..machine import ROOT, own_result
from ..target import Target

# Variables that name Python interpreters. optimum-onnx takes an older transformers, onnxruntime-genai may be anywhere.
OPTIMUM = "LOCALATTN_BENCHMARKS_OPTIMUM"
GENAI = "LOCALATTN_BENCHMARKS_GENAI"
# Files of one model differ by rounding alone; hidden states and logits are about 1.
AGREEMENT = 1e-3
SCRIPTS = ROOT / "benchmarks" / "hugging_face"


@dataclass(frozen=True)
class Measurement:
    """A model, its candidates, and how one is measured.

    Args:
        name: of the result.
        size: what a row's size is called, "length".
        header: entries of the document before its rows; `labels` among them has a text for each candidate.
        targets: what is asked of the rows.
        file: the file of a candidate for a size, made once; or why there is none.
        run: measures a candidate's file at a size, as the entry of its row.
    """

    name: str
    size: str
    header: Mapping[str, Any]
    targets: Callable[[Sequence[dict[str, Any]]], list[Target]]
    file: Callable[[str, int], Path | dict[str, str]]
    run: Callable[[str, Path, int], dict[str, Any]]

    def measure(
        self,
        values: Sequence[int],
        only: Sequence[str],
        tell: Callable[[str], None],
        keep: Callable[[dict[str, Any]], object],
    ) -> dict[str, Any]:
        """Measure, beside what this processor has already, and return the whole document.

        Args:
            values: sizes.
            only: candidates; the others keep their figures. Empty: all.
            tell: told each step.
            keep: given the document after each candidate: a large size takes minutes.
        """
        known = (own_result(self.name) or {"sizes": []})["sizes"] if only else []
        sizes = {row[self.size]: row["candidates"] for row in known}
        labels = self.header["labels"]
        for name in (name for name in labels if not only or name in only):
            for value in values:
                tell(f"Its file: {labels[name]}")
                path = self.file(name, value)
                entry = sizes.setdefault(value, {})
                entry[name] = path if isinstance(path, dict) else self.run(name, path, value)
                tell(f"{value}: {labels[name]}: {entry[name]}")
                keep(self._document(sizes))
        return self._document(sizes)

    def _document(self, sizes: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        rows = [{self.size: value, "candidates": sizes[value]} for value in sorted(sizes)]
        return {**self.header, "sizes": rows, "targets": [target.to_dict() for target in self.targets(rows)]}


def in_process(words: Sequence[object], *, elsewhere: str | None = None) -> str | dict[str, str]:
    """Run Python with these words, that of another environment if a variable is given: what it printed, or why not."""
    python, environment = sys.executable, dict(os.environ)
    if elsewhere is not None:
        if elsewhere not in os.environ:
            return {"skipped": f"{elsewhere} names no interpreter"}
        python, environment = os.environ[elsewhere], {**os.environ, "PYTHONPATH": ""}
    command = [python, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return {"failed": last[:200]}
    return done.stdout


def made(path: Path, words: Sequence[object], *, elsewhere: str | None = None) -> Path | dict[str, str]:
    """The file that these words make, made once; or why there is none."""
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    done = in_process(words, elsewhere=elsewhere)
    return done if isinstance(done, dict) else path


def measured(
    words: Sequence[object],
    output: Path,
    expected: Path,
    what: str,
    *,
    exact: bool = True,
    elsewhere: str | None = None,
) -> dict[str, Any]:
    """Run a candidate that prints its figures and saves its outputs; how far those are from the expected, if known."""
    done = in_process([*words, output], elsewhere=elsewhere)
    if isinstance(done, dict):
        return done
    entry: dict[str, Any] = json.loads(done.splitlines()[-1])
    entry["peak_mib"] = round(entry.pop("peak_bytes") / 2**20)
    if expected.exists() and output.exists():
        differs = float(np.abs(np.load(output) - np.load(expected)).max())
        entry["differs_by"] = float(f"{differs:.2g}")
        if differs > AGREEMENT and exact:
            entry["failed"] = f"its {what} differ by {differs:.2g}"
    return entry
