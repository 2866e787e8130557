"""What each precision costs in accuracy: exported files of one checkpoint beside the float64 reference.

Every file is run in onnxruntime on random tokens and on held-out text. `share` is the largest error over the tolerance
of its precision, `atol + rtol·|e|`; 1 is the limit. Rows that end in "weights" are simulated in PyTorch: matrices,
embeddings and rotary tables stored in that precision, everything computed in fp32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from localattn.core.tolerance import TOLERANCES, Tolerance
from localattn.exporter.export import ExportRequest, export, open_request
from localattn.exporter.models.family import TORCH_DTYPE
from localattn.exporter.source.source_model import SourceModel
from localattn.runtime.inputs.arrays import random_inputs
from localattn.runtime.session import load

from ..report import console, new_table

Tokens = NDArray[np.int64]
Run = Callable[[Tokens], NDArray[Any]]
PRECISIONS = {"fp32": {}, "fp16": {"dtype": "fp16"}, "bf16": {"dtype": "bf16"}, "int8": {"weight_dtype": "int8"}}
# So wide that every file is written, whatever it misses.
_ANY = 1e9


def measure(checkpoint: Path, text: Path | None, rows: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        checkpoint: of a model that takes tokens; configuration beside it.
        text: bytes that the model was not trained on, for a model of 256 tokens; None measures random tokens only.
        rows: sequences of each kind.
        tell: told each step.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, source = open_request(ExportRequest(checkpoint, Path(folder) / "m.onnx"))
        tell("Computing the reference in float64")
        samples = dict(_samples(source, text, rows))
        expected = {kind: [_reference(source, row) for row in tokens] for kind, tokens in samples.items()}
        results = []
        for name, options in PRECISIONS.items():
            tell(f"Exporting {checkpoint.name} in {name}")
            path = Path(folder) / f"{name}.onnx"
            export(ExportRequest(checkpoint, path, atol=_ANY, rtol=_ANY, **options))  # type: ignore[arg-type]
            tell(f"Running it in {name}")
            run = _session(path, source.outputs[0])
            results.append({"name": name, "file_bytes": path.stat().st_size, **_errors(run, samples, expected, name)})
        for name in ("fp16", "bf16"):
            tell(f"Simulating weights in {name}")
            run = _stored_in(source, name)
            results.append({"name": f"{name} weights", "file_bytes": None, **_errors(run, samples, expected, name)})
    largest = {kind: round(max(float(np.abs(e).max()) for e in rows), 2) for kind, rows in expected.items()}
    return {
        "checkpoint": checkpoint.name,
        "class_name": source.class_name,
        "seq_len": source.shapes.seq_len,
        "rows": {kind: len(tokens) for kind, tokens in samples.items()},
        "largest_logit": largest,
        "precisions": results,
    }


def _samples(source: SourceModel, text: Path | None, rows: int) -> Iterator[tuple[str, list[Tokens]]]:
    length, limit = source.shapes.seq_len, source.token_limit
    specs = source.inputs("fp32")
    if limit is None or len(specs) != 1 or source.shapes.batch != 1:
        raise SystemExit("The model must take tokens and nothing else.")
    yield "random", [random_inputs(specs, seed, token_limit=limit)[specs[0].name] for seed in range(rows)]
    if text is not None:
        data = np.frombuffer(text.read_bytes(), dtype=np.uint8).astype(np.int64)
        whole = data[: len(data) // length * length].reshape(-1, 1, length)
        if limit != 256 or not len(whole):
            raise SystemExit(f"{text} does not fit: bytes for a model of 256 tokens, {length} and more of them.")
        yield "text", list(whole[:rows])


def _reference(source: SourceModel, tokens: Tokens) -> NDArray[np.float64]:
    return source.reference({source.inputs("fp32")[0].name: tokens})[source.outputs[0]]


def _session(path: Path, output: str) -> Run:
    session = load(path, provider="cpu")
    return lambda tokens: session.run({session.inputs[0].name: tokens})[output]


def _stored_in(source: SourceModel, dtype: str) -> Run:
    """The model in fp32 with its matrices rounded to `dtype`."""
    module = source.module(dtype)
    for part in module.modules():
        if next(iter((*part.parameters(recurse=False), *part.buffers(recurse=False))), None) is not None:
            part.float()
    assert all(p.dtype == torch.float32 for p in module.parameters()) and dtype in TORCH_DTYPE

    @torch.no_grad()
    def run(tokens: Tokens) -> NDArray[Any]:
        logits: NDArray[Any] = module(torch.from_numpy(tokens)).numpy()
        return logits

    return run


def _errors(
    run: Run, samples: dict[str, list[Tokens]], expected: dict[str, list[NDArray[np.float64]]], precision: str
) -> dict[str, Any]:
    return {
        kind: _judge(np.stack([run(row) for row in tokens]), np.stack(expected[kind]), TOLERANCES[precision])
        for kind, tokens in samples.items()
    }


def _judge(actual: NDArray[Any], expected: NDArray[np.float64], tolerance: Tolerance) -> dict[str, float | None]:
    actual = actual.astype(np.float64)
    error = np.abs(actual - expected)
    norms = float(np.linalg.norm(actual) * np.linalg.norm(expected))
    share = None  # of a tolerance for single elements, which rounded weights have not
    if tolerance.atol is not None:
        share = round(float((error / tolerance.allowed(np.abs(expected))).max()), 3)
    return {
        "rms": float(f"{np.sqrt(np.mean(error**2)):.3g}"),
        "max": float(f"{error.max():.3g}"),
        "share": share,
        "one_minus_cosine": float(f"{max(0.0, 1 - float((actual * expected).sum()) / norms):.2g}"),
        "same_token": round(float((actual.argmax(-1) == expected.argmax(-1)).mean()), 5),
    }


def print_precision(result: dict[str, Any]) -> None:
    """One table a kind of tokens, one row a precision."""
    for kind, count in result["rows"].items():
        title = f"{result['checkpoint']}, {count} × {result['seq_len']} tokens, {kind}; logits up to "
        title += f"{result['largest_logit'][kind]}"
        table = new_table(title, "precision", "MB", "rms", "max", "share", "1 - cosine", "same next token")
        for entry in result["precisions"]:
            size, figures = entry["file_bytes"], entry[kind]
            table.add_row(
                entry["name"],
                "" if size is None else f"{size / 1e6:.1f}",
                f"{figures['rms']:.2g}",
                f"{figures['max']:.2g}",
                "" if figures["share"] is None else f"{figures['share']:.2f}",
                f"{figures['one_minus_cosine']:.1g}",
                f"{figures['same_token']:.1%}",
            )
        console.print(table)
