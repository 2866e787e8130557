"""Run the demo: export the shipped model, check it, and let it write a few lines of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.documents.sidecar import read_sidecar
from ..core.errors import LocalAttnError
from ..core.storage.files import is_file, sha256
from ..exporter.export import export
from ..exporter.export_report import ExportReport
from ..exporter.options import Dtype, ExportRequest
from ..runtime.session import Session, load
from . import checkpoint_path, config_path, validation_path


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo.

    Args:
        report: of the export.
        session: the exported file, ready to run.
        bits_per_byte: on text held out of its training, from the exported file.
        stated: the same as its trainer measured it in PyTorch.
        rows: how many rows of text were measured.
    """

    report: ExportReport
    session: Session
    bits_per_byte: float
    stated: float
    rows: int


def run_demo(
    folder: Path, rows: int, progress: Callable[[str], None], *, dtype: Dtype = "fp32", overwrite: bool = False
) -> DemoResult:
    """Export into `folder` in an element type and measure the file on `rows` rows of held-out text.

    Raises:
        UsageError: the file is there and may not be replaced, or the folder cannot be written.
        CheckFailed: a check of the export found a fault.
    """
    import json

    folder.mkdir(exist_ok=True)
    output = folder / "pybytes.onnx"
    again = overwrite or _is_of_demo(output)
    request = ExportRequest(checkpoint_path(), output, config=config_path(), dtype=dtype, overwrite=again)
    report = export(request, progress)
    progress("Running the file on held-out text")
    session = load(output, provider="cpu")
    text = np.frombuffer(validation_path().read_bytes(), dtype=np.uint8)
    text = text.reshape(-1, report.sidecar.seq_len)[:rows]
    stated = json.loads(config_path().read_text(encoding="utf-8"))["about"]["bits_per_byte"]
    return DemoResult(report, session, bits_per_byte(session, text), stated, len(text))


def _is_of_demo(output: Path) -> bool:
    """Return whether a file is the unchanged one of an earlier demo."""
    try:
        sidecar = read_sidecar(output) if is_file(output) else None
    except LocalAttnError:
        return False
    shipped = sidecar is not None and sidecar.checkpoint_name == checkpoint_path().name
    return shipped and sidecar is not None and sidecar.model_sha256 == sha256(output)


def bits_per_byte(session: Session, rows: np.ndarray) -> float:  # type: ignore[type-arg]
    """Return the mean of `-log2 p(next byte)` over all but the last position of every row `[R, N]` uint8."""
    losses = []
    for row in rows.astype(np.int64):
        logits = session.run({"tokens": row[None]})["logits"][0].astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        log_probability = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        losses.append(-log_probability[np.arange(len(row) - 1), row[1:]] / np.log(2))
    return float(np.mean(losses))


def write_on(session: Session, prompt: bytes, count: int, seed: int, temperature: float) -> Iterator[int]:
    """Yield `count` bytes that the model writes after `prompt`, which is not empty, one at a time.

    The file's length is fixed: a causal model does not see what stands after a position, so the text is padded with
    zeros, and only its last `N` bytes count.
    """
    generator = np.random.default_rng(seed)
    length = int(session.inputs[0].shape[1])
    text = list(prompt)
    for _ in range(count):
        visible = text[-length:]
        tokens = np.zeros((1, length), dtype=np.int64)
        tokens[0, : len(visible)] = visible
        logits = session.run({"tokens": tokens})["logits"][0, len(visible) - 1].astype(np.float64)
        weights = np.exp((logits - logits.max()) / temperature)
        text.append(int(generator.choice(len(weights), p=weights / weights.sum())))
        yield text[-1]
