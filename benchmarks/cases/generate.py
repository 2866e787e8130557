"""Time of a token, and memory, of generating over the length of the context before it.

The checkpoint's position embeddings are repeated until there are enough of them; nothing else is changed, and time does
not depend on their values. Full files are traced for each length; the checks of an export, whose reference is dense,
are left out. Instead the logits of all exact candidates are compared at every context before anything is timed.
Upstream's cached generation is known to compute something else (keys that were rotated are rotated again): its
difference is reported, not judged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..clock import Measurement, interleave
from ..generators import CANDIDATES, KEPT, STRETCH, THREADS, Files, products
from ..target import Target
from .memory import MIB, in_child, leave_some_memory

CONTEXTS = (1024, 4096, 16384, 65536)
CHUNK = 128
# The parity tolerance of an fp32 export.
AGREEMENT = 1e-4
# Tokens in the measurement of memory, and of time; some candidates need seconds for one.
_TOKENS, _SLOW_TOKENS = 200, 3
_SAMPLES, _LEAST_SAMPLES, _SLOW_SAMPLES = 15, 7, 3


def measure(checkpoint: Path, contexts: Sequence[int], seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        checkpoint: a LocalTransformer's, with its configuration beside it.
        contexts: tokens before the one that is generated.
        seconds: how long to wait for calm samples, of the fast candidates and of the slow ones.
        tell: told each step.
    """
    leave_some_memory()
    with TemporaryDirectory() as name:
        folder, positions = Path(name), max(contexts) + STRETCH
        tell(f"Exporting {checkpoint.name} with {positions} position embeddings")
        files = prepare(checkpoint, folder, positions)
        for length in contexts:
            tell(f"Tracing the full file, context {length}")
            write_full(files, length)
        sizes = [_untimed(files, folder, length, tell) for length in contexts]
        tell("Timing tokens of the step file and of upstream's cached generation")
        fast = _time(files, contexts, slow=False, seconds=seconds)
        tell("Timing tokens of full recomputation")
        slow = _time(files, contexts, slow=True, seconds=seconds)
    for size in sizes:
        for name, entry in size["candidates"].items():
            part = slow if CANDIDATES[name].slow else fast
            entry |= part.timings[f"{name} {size['length']}"].in_milliseconds()
    result = {
        "checkpoint": checkpoint.name,
        "setting": {"batch": 1, "dtype": "fp32", "threads": THREADS, "kept": KEPT, "prefill_chunk": CHUNK},
        "labels": {name: candidate.label for name, candidate in CANDIDATES.items()},
        "samples": fast.samples,
        "samples_slow": slow.samples,
        "others_cpu": None if math.isnan(fast.others) else round(fast.others, 3),
        "limit": fast.timings["products"].in_milliseconds(),
        "sizes": sizes,
        "as_it_is": _unchanged(checkpoint, seconds, tell),
    }
    return result | {"targets": [target.to_dict() for target in targets(result)]}


def prepare(checkpoint: Path, folder: Path, positions: int | None = None) -> Files:
    """Checkpoint and step file in a folder; with `positions`, the position embeddings are repeated so far."""
    import torch

    from localattn.exporter.checkpoint.load import load_state
    from localattn.exporter.export import ExportRequest, export

    files = Files.in_folder(folder)
    configuration = json.loads(checkpoint.with_suffix(".json").read_text(encoding="utf-8"))
    state = dict(load_state(checkpoint).state)
    if positions is not None:
        table = state["pos_emb.weight"]
        state["pos_emb.weight"] = table.repeat(math.ceil(positions / len(table)), 1)[:positions].contiguous()
        configuration["kwargs"]["max_seq_len"] = positions
    torch.save(state, files.checkpoint)
    files.checkpoint.with_suffix(".json").write_text(json.dumps(configuration), encoding="utf-8")
    export(ExportRequest(files.checkpoint, files.step, mode="step", chunk=CHUNK))
    return files


def write_full(files: Files, length: int) -> None:
    """The file that recomputes everything, of a static length."""
    from localattn.exporter.artifact.publish import save_model
    from localattn.exporter.export import ExportRequest, open_request
    from localattn.exporter.lowering import functions, trace
    from localattn.exporter.options import EXTERNAL_DATA_FROM, ShapeRequest

    request = ExportRequest(files.checkpoint, files.full(length), shapes=ShapeRequest(seq_len=length))
    model = trace.trace(open_request(request)[1], request.dtype, request.opset)
    functions.attach_functions(model)
    save_model(model, request.output, EXTERNAL_DATA_FROM)


def compare(files: Files, length: int) -> dict[str, float]:
    """The largest difference of each candidate's logits after a context from those of upstream's full forward pass.

    Raises:
        AssertionError: an exact candidate differs by more than the tolerance.
    """
    truth = CANDIDATES["uncached"].prepare(files, length)().copy()
    found = {}
    for name, candidate in CANDIDATES.items():
        difference = np.abs(candidate.prepare(files, length)() - truth)
        found[name] = float(f"{difference.max():.2g}")
        within = (difference <= AGREEMENT * (1 + np.abs(truth))).all()
        assert within or not candidate.exact, f"{name} differs by {found[name]} at context {length}"
    return found


def _untimed(files: Files, folder: Path, length: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Differences and peak memory of all candidates at a context."""
    tell(f"Comparing logits, context {length}")
    differences = compare(files, length)
    entries = {}
    for name, candidate in CANDIDATES.items():
        tell(f"Memory, context {length}: {candidate.label}")
        tokens = _SLOW_TOKENS if candidate.slow else _TOKENS
        memory = in_child("generate", name, str(folder), str(length), str(tokens))
        peak, own = (round(memory[key] / MIB, 1) for key in ("peak_bytes", "own_bytes"))
        entries[name] = {"peak_mib": peak, "own_mib": own, "max_difference": differences[name]}
    return {"length": length, "candidates": entries}


def _time(files: Files, contexts: Sequence[int], *, slow: bool, seconds: float) -> Measurement:
    """Time the fast or the slow candidates at all contexts in turn; the limit is among the fast ones."""
    runs = {
        f"{name} {length}": partial(candidate.prepare, files, length)
        for name, candidate in CANDIDATES.items()
        for length in contexts
        if candidate.slow == slow
    }
    if slow:
        return interleave(runs, samples=_SLOW_SAMPLES, least=_SLOW_SAMPLES, seconds=seconds)
    runs["products"] = partial(products, files)
    return interleave(runs, samples=_SAMPLES, least=_LEAST_SAMPLES, seconds=seconds)


def _unchanged(checkpoint: Path, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The step file and upstream's cached generation with the checkpoint as it is, half-way through its positions."""
    with TemporaryDirectory() as name:
        tell(f"Exporting {checkpoint.name} as it is")
        files = prepare(checkpoint, Path(name))
        configuration = json.loads(files.checkpoint.with_suffix(".json").read_text(encoding="utf-8"))
        length = configuration["kwargs"]["max_seq_len"] // 2
        tell(f"Timing tokens, context {length}")
        runs = {name: partial(CANDIDATES[name].prepare, files, length) for name in ("step", "cached")}
        runs["products"] = partial(products, files)
        measured = interleave(runs, samples=_SAMPLES, least=_LEAST_SAMPLES, seconds=seconds)
    return {"length": length, **{name: timing.in_milliseconds() for name, timing in measured.timings.items()}}


def targets(result: dict[str, Any]) -> list[Target]:
    """What is asked of the result."""
    steps = [size["candidates"]["step"] for size in result["sizes"]]
    # Rows of the position table grow with the context; they are weights of a mapped file, not the process's own.
    times, own_memory = ([entry[figure] for entry in steps] for figure in ("median_ms", "own_mib"))
    own, contexts = result["as_it_is"], [size["length"] for size in result["sizes"]]
    span = f"contexts {min(contexts)} to {max(contexts)}"
    return [
        Target(f"time of a token, slowest / fastest of {span}", max(times) / min(times), 1.1),
        Target(f"memory without mapped weights, most / least of {span}", max(own_memory) / min(own_memory), 1.1),
        Target(
            "time of a token / upstream's cached generation",
            own["step"]["median_ms"] / own["cached"]["median_ms"],
            1 / 3,
        ),
        Target("time of a token / the weights' products", own["step"]["median_ms"] / own["products"]["median_ms"], 1.5),
    ]
