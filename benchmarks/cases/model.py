"""A whole exported model: its time over that of its matrix products and attention nodes, and beside PyTorch's.

What a model takes beyond its products and attention is norms, activations, residual streams, rotary and copies. The
ratio comes from profiles, with the compiled kernels and without; the times come from interleaved calls.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from localattn.core.error_texts import named_line
from localattn.core.errors import LocalAttnError
from localattn.exporter.export import ExportRequest, open_request
from localattn.exporter.export import export as run_export
from localattn.runtime.inputs.arrays import random_inputs

from ..candidates import THREADS, open_session
from ..clock import Run, interleave
from ..target import Target
from .compiled import library, why_no_library
from .model_profile import Parts, profile

LIMIT = 1.15
_SAMPLES, _LEAST = 15, 5
KERNELS, BODIES = "compiled kernels", "function definitions"


def measure(checkpoint: Path, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        checkpoint: of a LocalTransformer, its configuration beside it.
        seconds: how long to wait for calm samples.
        tell: told each step.
    """
    reason = why_no_library()
    if reason:
        tell(f"No compiled kernels: {reason}")
    ways = {BODIES: None} if reason else {KERNELS: library(), BODIES: None}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, failed = _export(checkpoint, folder, tell)
        _, source = open_request(ExportRequest(checkpoint, folder / "other.onnx"))
        feed = random_inputs(source.inputs("fp32"), 0, token_limit=source.token_limit)
        tell("Profiling")
        parts = {way: profile(files["fp32"], feed, folder, kernels) for way, kernels in ways.items()}
        runs: dict[str, Callable[[], Run]] = {
            f"localattn, {precision}, {way}": _ready(path, kernels, feed)
            for precision, path in files.items()
            for way, kernels in ways.items()
        }
        runs["local-attention, eager"] = _upstream(source, feed)
        ready = _prepare(runs, failed)
        for candidate, reason in failed.items():
            tell(f"Failed: {candidate}: {reason}")
        tell("Timing")
        measured = interleave(ready, samples=_SAMPLES, least=_LEAST, seconds=seconds)
        sizes = {precision: path.stat().st_size for precision, path in files.items()}
    return {
        "checkpoint": checkpoint.name,
        "seq_len": source.shapes.seq_len,
        "threads": THREADS,
        "parts_ms": {way: found.to_dict() for way, found in parts.items()},
        "over_linear_layers_and_attention": {
            way: round(found.total / (found.linear + found.attention), 3) for way, found in parts.items()
        },
        "file_bytes": sizes,
        "others_cpu": None if math.isnan(measured.others) else round(measured.others, 3),
        "candidates": {name: timing.in_milliseconds() for name, timing in measured.timings.items()},
        "failed": failed,
        "targets": [
            Target(f"the model with {way} / its products and attention", ratio, LIMIT).to_dict()
            for way, ratio in ratios(parts).items()
        ],
    }


def _export(checkpoint: Path, folder: Path, tell: Callable[[str], None]) -> tuple[dict[str, Path], dict[str, str]]:
    """The file of each precision, and why others have none; without the one in fp32 there is nothing to measure."""
    files, failed = {}, {}
    for precision in ("fp32", "int8"):
        tell(f"Exporting, {precision}")
        path = folder / f"{precision}.onnx"
        try:
            run_export(ExportRequest(checkpoint, path, weight_dtype=None if precision == "fp32" else precision))
        except LocalAttnError as error:
            if precision == "fp32":
                raise
            failed[f"localattn, {precision}"] = " ".join(filter(None, (error.what, error.why)))
        else:
            files[precision] = path
    return files, failed


def _prepare(candidates: dict[str, Callable[[], Run]], failed: dict[str, str]) -> dict[str, Callable[[], Run]]:
    """Those that run; the reasons of the others are added to `failed`."""
    ready: dict[str, Callable[[], Run]] = {}
    for name, prepare in candidates.items():
        try:
            run = prepare()
            run()
        except Exception as error:  # an engine's or PyTorch's own: a finding, which must not hide the others
            failed[name] = named_line(error, 160)
        else:
            ready[name] = lambda run=run: run  # type: ignore[misc]
    return ready


def ratios(parts: dict[str, Parts]) -> dict[str, float]:
    """A call over its products and attention, for each way to compute it.

    The products of the residual streams count as what they take as operators of their own, also where a kernel
    computes them along with the rest.
    """
    streams = parts[BODIES].streams
    return {way: found.total / (found.linear + streams + found.attention) for way, found in parts.items()}


def _ready(path: Path, kernels: Path | None, feed: dict[str, Any]) -> Callable[[], Run]:
    session = open_session(str(path), kernels)
    return lambda: lambda: session.run(None, feed)


def _upstream(source: Any, feed: dict[str, Any]) -> Callable[[], Run]:
    """The model the weights are from, in eager PyTorch, with the same weights."""
    from local_attention import LocalTransformer

    torch.set_num_threads(THREADS)
    module = LocalTransformer(**source.args.model_dump())
    module.load_state_dict({name: x.float() for name, x in source.state.items()}, strict=False)
    tokens = torch.from_numpy(np.asarray(feed["tokens"]))

    def run() -> object:
        with torch.inference_mode():
            return module.eval()(tokens)

    return lambda: run
