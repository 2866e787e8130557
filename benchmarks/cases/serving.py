"""Bundles of the shipped model on a real Triton server: requests a second, and tokens a second of several sequences.

The server's own onnxruntime backend is not on PyPI: the stand-in of the tests runs the file, one process an instance.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from localattn.core.machine.processor import host_arch
from localattn.demo import checkpoint_path, config_path
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.open_inference import Server
from localattn.runtime.bundle.triton import Serving

CONCURRENCY = (1, 2, 4, 8)
LENGTH, TOKENS = 512, 64
_MANY = f"{TOKENS} tokens a request"
_ROUNDS = 3
# What is served, by its title: instances, threads of each, and whether with the compiled kernel.
SETTINGS: dict[str, tuple[int, int | None, bool]] = {
    "as written": (1, None, False),
    "with the kernel": (1, None, True),
    "2 instances, one thread each": (2, 1, False),
    "2 instances, one thread each, with the kernel": (2, 1, True),
}


def prepare(folder: Path, library: Path, tell: Callable[[str], None]) -> None:
    """Export the shipped model twice and write a bundle for each setting; not timed."""
    weights, config = checkpoint_path(), config_path()
    tell("Exporting")
    full, steps = folder / "full.onnx", folder / "steps.onnx"
    shapes = ShapeRequest(seq_len=LENGTH)
    export(ExportRequest(weights, full, config=config, shapes=shapes, dynamic=("batch",), checks="quick"))
    export(ExportRequest(weights, steps, config=config, mode="step", checks="quick"))
    for index, (instances, threads, kernel) in enumerate(SETTINGS.values()):
        tell(f"Bundle {index}")
        serving = Serving(instances=instances, threads=threads)
        libraries = (library,) if kernel else ()
        create_bundle(BundleRequest(full, folder / f"bundle{index}", plugins=libraries, triton=serving))
    create_bundle(BundleRequest(steps, folder / "streams", plugins=(library,), triton=Serving(instances=2)))


def measure(folder: Path, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Serve each bundle in turn, and count what clients get.

    Args:
        folder: where `prepare` wrote.
        seconds: of each figure.
        tell: is told each step.
    """
    tokens = np.random.default_rng(0).integers(0, 256, (1, LENGTH))
    asks: dict[tuple[str, str], tuple[int, Callable[[int], object]]] = {}
    models: dict[tuple[str, str], tuple[Server, str]] = {}
    with contextlib.ExitStack() as stack:
        for index, title in enumerate(SETTINGS):
            server = Server(stack.enter_context(_served(folder / f"bundle{index}", folder / f"scratch{index}")))
            asks["requests", title] = 1, lambda _, s=server: s.infer("full", {"tokens": tokens}, ["logits"])
            models["requests", title] = server, "full"
        server = Server(stack.enter_context(_served(folder / "streams", folder / "scratch_streams")))
        for name, count, title in (("steps", 1, "one token a request"), ("steps_stream", TOKENS, _MANY)):
            asks["streams", title] = count, _Client(server, name, count)
            models["streams", title] = server, name
        rates: dict[tuple[str, str, int], list[float]] = {}
        calls: dict[tuple[str, str, int], list[float]] = {}
        for turn in range(_ROUNDS):  # in turns, so that a busy machine slows all alike
            tell(f"Round {turn + 1} of {_ROUNDS}")
            for (kind, title), (count, ask) in asks.items():
                for clients in CONCURRENCY:
                    key, before = (kind, title, clients), _executed(*models[kind, title])
                    rates.setdefault(key, []).append(count * _rate(clients, seconds / _ROUNDS, ask))
                    number, took = (b - a for a, b in zip(before, _executed(*models[kind, title]), strict=True))
                    calls.setdefault(key, []).append(took / number)
    tables: dict[str, list[dict[str, Any]]] = {"requests": [], "streams": []}
    for kind, title in asks:
        row = {str(clients): median(rates[kind, title, clients]) for clients in CONCURRENCY}
        tables[kind].append(
            {
                "setting": title,
                **row,
                "rounds": [rates[kind, title, n] for n in CONCURRENCY],
                "backend_ms": {str(n): median(calls[kind, title, n]) for n in CONCURRENCY},
            }
        )
    return {"length": LENGTH, **tables}


class _Client:
    """A client of each sequence, which begins anew before the model's last position."""

    def __init__(self, server: Server, model: str, count: int) -> None:
        self._server, self._model, self._count = server, model, count
        self._sent: dict[int, int] = {}

    def __call__(self, client: int) -> None:
        sent = self._sent.get(client, 0)
        last = sent >= 256
        tokens = {"tokens": np.array([[101]])}
        more = {"new_tokens": np.array([[self._count]], np.int32)} if self._count > 1 else {}
        wanted = ["generated" if more else "logits"]
        flags = {"sequence_id": client + 1, "sequence_start": sent == 0, "sequence_end": last}
        self._server.infer(self._model, tokens | more, wanted, **flags)
        self._sent[client] = 0 if last else sent + self._count


@contextlib.contextmanager
def _served(bundle: Path, scratch: Path) -> Iterator[str]:
    from localattn.tests.support.serving.triton import serve

    scratch.mkdir(exist_ok=True)
    kernels = bundle / "kernels" / host_arch()
    with serve([bundle / "triton"], scratch, {"LD_LIBRARY_PATH": str(kernels), "OMP_NUM_THREADS": "2"}) as server:
        yield server.url


def _executed(server: Server, model: str) -> tuple[int, float]:
    """Return how many requests a model has answered, and the milliseconds that they spent in its backend."""
    with urllib.request.urlopen(f"{server.url}/v2/models/{model}/stats", timeout=30) as answer:
        (found,) = json.load(answer)["model_stats"]
    spent = found["inference_stats"]["compute_infer"]
    return int(spent["count"]), int(spent["ns"]) / 1e6


def _rate(clients: int, seconds: float, ask: Callable[[int], object]) -> float:
    """Return answers a second of clients that each wait for their last answer."""

    def work(client: int) -> int:
        count = 0
        while time.perf_counter() < end:
            ask(client)
            count += 1
        return count

    start = time.perf_counter()
    end = start + seconds
    with ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(work, range(clients)))
    return total / (time.perf_counter() - start)


def print_serving(result: dict[str, Any]) -> None:
    """Print both tables as Markdown."""
    for title in ("requests", "streams"):
        print(f"\n| {title} a second | {' | '.join(map(str, CONCURRENCY))} |")
        print(f"|---|{'---|' * len(CONCURRENCY)}")
        for row in result[title]:
            print(f"| {row['setting']} | {' | '.join(f'{row[str(n)]:.3g}' for n in CONCURRENCY)} |")
        print("Milliseconds of a request in the backend:")
        for row in result[title]:
            print(f"  {row['setting']}: {', '.join(f'{x:.3g}' for x in row['backend_ms'].values())}")
