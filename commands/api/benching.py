"""Define `localattn.bench`: latency, throughput, memory and load time of models, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.wrong_file import check_exists
from .factory_args import as_json
from .notebook import IN_NOTEBOOKS
from .paths import as_path

if TYPE_CHECKING:
    from ...core.documents.bench_report import BenchReport
    from ...runtime.bench.request import BenchRequest

Progress = Callable[[str], None]
# What runs a module of the user's own in a process of its own.
_WORKER = f"{__package__.partition('.')[0]}.exporter.user_module.bench_worker"


def bench(
    model: str | Path,
    against: str | Path | Sequence[str | Path] = (),
    *,
    factory: str | None = None,
    factory_args: str | Mapping[str, Any] | None = None,
    entry: str | None = None,
    seq_len: Sequence[int] = (),
    batch: int | None = None,
    duration: float = 3.0,
    iterations: int = 10,
    warmup: float = 200.0,
    rounds: int = 12,
    threads: Sequence[int | None] = (None,),
    provider: Sequence[str] = ("auto",),
    plugin: Sequence[str] = ("auto",),
    runtime: Sequence[str] = ("auto",),
    percentile: Sequence[float] = (50.0, 90.0, 99.0),
    cuda_graph: bool = False,
    profile: bool = False,
    top: int = 15,
    inputs: str | Path | None = None,
    seed: int = 0,
    progress: Progress = IN_NOTEBOOKS,
) -> BenchReport:
    """Measure models side by side; each candidate has a process of its own, and they take turns in rounds.

    Args:
        model: the file or engine that the others are compared with.
        against: further files; and of a module of your own the checkpoint, for PyTorch's module as one more candidate.
        factory: a function that makes your own module, `package.module:function` or `file.py:function`, which PyTorch
            runs as one more candidate. By default, for a checkpoint in `against`, the one of the export.
        factory_args: its keyword arguments; by default those of the export.
        entry: the set of weights, where the checkpoint holds several.
        seq_len: lengths to measure at, for a dynamic axis; by default the longest.
        batch: sequences a call, for a dynamic axis.
        duration: seconds of timed calls of each candidate, at least.
        iterations: timed calls of each candidate, at least.
        warmup: milliseconds of untimed calls before, at least.
        rounds: turns of each candidate; 6 or more for an interval.
        threads: numbers of CPU threads for one operator; None leaves it to the runtime.
        provider: where to run: "auto", "cpu", "cuda" or "tensorrt".
        plugin: compiled kernels: "auto", "none", or paths of libraries.
        runtime: what runs ONNX files: "auto" (onnxruntime) or "openvino".
        percentile: percentiles of the latency.
        cuda_graph: replay a CUDA graph.
        profile: also profile ONNX files, by module, operator and node.
        top: rows of each table of a profile.
        inputs: an .npz of inputs; by default random ones.
        seed: of the random inputs and of the order of turns.
        progress: called with each step as it begins.

    Raises:
        UsageError: a model or inputs that do not fit, or an option that does not apply.
        MissingDependency: an engine, a provider or a package is not here.
        CheckFailed: the process of a candidate died.

    Examples:
        >>> report = localattn.bench("model.onnx", duration=0.01, iterations=2, rounds=1)
        >>> [row.label for row in report.rows]
        ['model.onnx']
    """
    from ...runtime.bench.measure import run_bench

    paths = [Path(against)] if isinstance(against, str | Path) else [Path(path) for path in against]
    request = _request(
        Path(model),
        paths,
        (factory, as_json(factory_args), entry),
        seq_lens=tuple(seq_len),
        batch=batch,
        duration=duration,
        iterations=iterations,
        warmup_ms=warmup,
        rounds=rounds,
        threads=tuple(threads),
        providers=tuple(provider),
        plugins=tuple(map(str, plugin)),
        runtimes=tuple(runtime),
        percentiles=tuple(percentile),
        cuda_graph=cuda_graph,
        profile=profile,
        top=top,
        inputs=as_path(inputs),
        seed=seed,
    )
    return run_bench(request, progress)


def _request(
    model: Path, against: Sequence[Path], made_by: tuple[str | None, str | None, str | None], **options: Any
) -> BenchRequest:
    """Separate exported files from a checkpoint, whose module PyTorch runs.

    Raises:
        UsageError: several checkpoints, or options of a module without one.
    """
    from ...runtime.backends import registry
    from ...runtime.bench.request import BenchRequest, TorchModule

    factory, factory_args, entry = made_by
    files = [path for path in against if registry.of_file(path) is not None]
    checkpoints = [path for path in against if path not in files]
    for path in checkpoints:
        check_exists(path)
    if len(checkpoints) > 1:
        raise UsageError(
            f"{' and '.join(map(str, checkpoints))} are no exported files.",
            why="One checkpoint gives the weights of one module of your own.",
            fix="Leave the others out.",
        )
    if factory is None and not checkpoints and (factory_args is not None or entry is not None):
        raise UsageError(f"{argument('factory_args')} and {argument('entry')} need {argument('factory')}.")
    module = None
    if factory is not None or checkpoints:
        module = TorchModule(_WORKER, factory, factory_args, next(iter(checkpoints), None), entry)
    return BenchRequest(models=(model, *files), module=module, **options)
