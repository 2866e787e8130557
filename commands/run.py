"""Define `localattn run`: run an exported model and print its outputs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.limits import MOST_ITERATIONS
from ..core.storage.file_kinds import NPZ
from .parts.console import say, say_page, suggest, warn
from .parts.options import FormatOption, ProviderOption, RuntimeOption, ThreadsOption, seed_option
from .parts.paths import INPUT, ForceOption, OutputPath
from .parts.plugins.kernels_in_use import has_nodes, say_kernels
from .parts.plugins.options import PluginLibraryOption, PluginOption, plugin_asked

if TYPE_CHECKING:
    from ..runtime.session import Arrays, Session


def run(
    model: Annotated[
        Path, typer.Argument(help="The exported model (model.onnx), or an engine.", show_default=False), INPUT
    ],
    load_inputs: Annotated[
        Path | None, typer.Option(help="Inputs (.npz), one array per input. (Default: random inputs.)"), INPUT
    ] = None,
    save_outputs: Annotated[
        Path | None, typer.Option(help="Write the outputs to this .npz file."), OutputPath(NPZ)
    ] = None,
    provider: ProviderOption = "auto",
    threads: ThreadsOption = None,
    plugin: PluginOption = "auto",
    plugin_library: PluginLibraryOption = None,
    runtime: RuntimeOption = "auto",
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Record the run as a CUDA graph and replay it (engines).")
    ] = False,
    iterations: Annotated[int, typer.Option(min=1, max=MOST_ITERATIONS, help="Number of runs.")] = 1,
    seed: Annotated[int, seed_option("Seed of the random inputs.")] = 0,
    force: ForceOption = False,
    output_format: FormatOption = "console",
) -> None:
    """Run an exported model and show its outputs."""
    from ..runtime.inputs.arrays import load_arrays, save_arrays
    from ..runtime.inputs.example_inputs import check_call, draw_call
    from ..runtime.session import find_model, load, read_model_sidecar

    asked = plugin_asked(plugin, plugin_library)
    file = find_model(model)
    has_kernels = has_nodes(file)
    session = load(file, provider, threads, plugin=asked, runtime=runtime)
    del file  # the session has what it needs
    if cuda_graph:
        session.use_cuda_graph()
    sidecar = read_model_sidecar(model)
    if load_inputs is None:
        inputs, source = draw_call(session.inputs, seed, sidecar), f"random, seed {seed}"
    else:
        inputs, source = load_arrays(load_inputs), str(load_inputs)
    check_call(inputs, sidecar)
    outputs, milliseconds = _timed(session, inputs, iterations)
    if save_outputs is not None:
        save_arrays(save_outputs, outputs, overwrite=force)
    report = {
        "model": str(model),
        **_of_session(session),
        "input_source": source,
        "inputs": [_summary(name, array) for name, array in inputs.items()],
        "outputs": [_summary(name, array) for name, array in outputs.items()],
        "saved_outputs": None if save_outputs is None else str(save_outputs),
        "milliseconds": milliseconds,
    }
    for kind in ("input", "output"):
        for array in report[f"{kind}s"]:
            if not array["finite"]:
                warn(f"{kind} {array['name']!r} holds NaN or Inf.")
    if output_format == "json":
        say_page(json.dumps(report, allow_nan=False))
        return
    for line in _lines(report):
        say(line)
    say_kernels(lambda: has_kernels, session, asked)
    named = () if plugin_library is None else ("--plugin-library", plugin_library)
    suggest("localattn", "bench", model, *named)


def _of_session(session: Session) -> dict[str, Any]:
    """Return what ran the model, as the report has it."""
    return {
        "backend": session.backend,
        "provider": session.provider,
        "plugin": session.plugin,
        "kernels": list(session.kernels),
        "notes": list(session.notes),
    }


def _timed(session: Session, inputs: Arrays, iterations: int) -> tuple[Arrays, dict[str, float | int]]:
    """Run the model; return the outputs, and how long the runs took."""
    import statistics

    times: list[float] = []
    outputs: Arrays = {}
    for _ in range(iterations):
        start = time.perf_counter()
        outputs = session.run(inputs)
        times.append((time.perf_counter() - start) * 1e3)
    return outputs, {"first": times[0], "median": statistics.median(times), "iterations": iterations}


def _summary(name: str, array: Any) -> dict[str, Any]:
    """Describe an array for the reader; its range is that of its finite values."""
    import numpy as np

    finite = np.isfinite(array)
    values = array[finite]
    return {
        "name": name,
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "finite": bool(finite.all()),
        "min": float(values.min()) if values.size else None,
        "max": float(values.max()) if values.size else None,
    }


def _lines(report: dict[str, Any]) -> list[str]:
    spent = report["milliseconds"]
    runs = f"median of {spent['iterations']} runs" if spent["iterations"] > 1 else "one run"
    from ..runtime.session import place

    where = place(report["provider"], report["plugin"])
    lines = [
        f"{report['model']} ran on {where} ({report['backend']}): {spent['median']:.2f} ms, {runs}",
        f"Inputs ({report['input_source']}):",
        *_table(report["inputs"]),
        "Outputs:",
        *_table(report["outputs"]),
    ]
    if report["kernels"]:
        lines += ["Kernels:", *(f"  {line}" for line in report["kernels"])]
    lines += [f"Note: {line}" for line in report["notes"]]
    if report["saved_outputs"] is not None:
        lines.append(f"Outputs saved to {report['saved_outputs']}")
    return lines


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    width = max((len(row["name"]) for row in rows), default=0)
    lines = []
    for row in rows:
        span = "" if row["min"] is None else f", from {row['min']:.6g} to {row['max']:.6g}"
        finite = "finite" if row["finite"] else "NOT FINITE"
        lines.append(f"  {row['name']:<{width}}  {row['dtype']} {row['shape']}  {finite}{span}")
    return lines
