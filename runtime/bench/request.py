"""List the candidates of a benchmark: models × providers × threads × lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.limits import check_threads
from ..backends import registry
from ..backends.backend import AUTO

# trtexec's defaults, so that the figures can be compared with trtexec's.
DURATION, ITERATIONS, WARMUP_MS = 3.0, 10, 200.0
PERCENTILES = (50.0, 90.0, 99.0)
ROUNDS = 12


@dataclass(frozen=True)
class TorchModule:
    """The module that the first model was exported from, which PyTorch runs in a process of its own.

    Args:
        worker: the Python module whose `main` runs it; this package never imports PyTorch.
        factory: the function that makes it; None for the one of the export.
        factory_args: its keyword arguments, JSON.
        weights: the checkpoint; None for the weights that the function makes.
        entry: the set of weights of the checkpoint.
    """

    worker: str
    factory: str | None
    factory_args: str | None
    weights: Path | None
    entry: str | None

    def made_by(self) -> dict[str, str | None]:
        """Return what the worker is told, in JSON types."""
        weights = None if self.weights is None else str(self.weights.absolute())
        return {"factory": self.factory, "factory_args": self.factory_args, "weights": weights, "entry": self.entry}

    @property
    def name(self) -> str:
        """What it is called in reports."""
        return f"{self.factory or (self.weights.name if self.weights else 'the module')} (PyTorch)"


@dataclass(frozen=True)
class BenchRequest:
    """What the user asked to measure.

    Args:
        models: the files; the first is what the others are compared with.
        providers: where to run each; names of `runtime.session.load`.
        threads: CPU threads for one operator; None leaves it to the engine.
        plugins: compiled kernels for each; as `runtime.session.load` takes them.
        runtimes: what runs each ONNX file; as `runtime.session.load` takes them.
        seq_lens: lengths for dynamic axes; if empty, the sidecar's length.
        batch: sequences a call for dynamic axes; None takes the sidecar's.
        duration: minimum seconds of timed calls of each candidate.
        iterations: minimum number of timed calls of each candidate.
        warmup_ms: minimum milliseconds of calls before them; two calls in any case.
        rounds: turns of each candidate.
        percentiles: of the latency, each above 0 and at most 100.
        cuda_graph: replay a CUDA graph.
        profile: profile each candidate too, after the timing.
        top: rows of each table of a profile.
        inputs: an `.npz` file; None draws at random.
        seed: of the random inputs and of the order of turns.
        module: the module that the first model was exported from, as one more candidate.

    Raises:
        UsageError: nothing to measure, or a number out of its range.
    """

    models: tuple[Path, ...]
    providers: tuple[str, ...] = ("auto",)
    threads: tuple[int | None, ...] = (None,)
    plugins: tuple[str, ...] = ("auto",)
    runtimes: tuple[str, ...] = ("auto",)
    seq_lens: tuple[int, ...] = ()
    batch: int | None = None
    duration: float = DURATION
    iterations: int = ITERATIONS
    warmup_ms: float = WARMUP_MS
    rounds: int = ROUNDS
    percentiles: tuple[float, ...] = PERCENTILES
    cuda_graph: bool = False
    profile: bool = False
    top: int = 15
    inputs: Path | None = None
    seed: int = 0
    module: TorchModule | None = None

    def __post_init__(self) -> None:
        lists: dict[str, tuple[object, ...]] = {
            "model": self.models,
            "provider": self.providers,
            "number of threads": self.threads,
            "plugin": self.plugins,
            "runtime": self.runtimes,
        }
        for name, values in lists.items():
            if not values:
                raise UsageError(f"There is no {name} to measure.")
            if len(set(values)) < len(values):
                raise UsageError(f"A {name} is given twice.", why="Each candidate is measured only once.")
        tuned = {AUTO, *(backend.name for backend in registry.by_name() if backend.tuned)}
        if (self.cuda_graph or self.profile) and not tuned.issuperset(self.runtimes):
            raise UsageError(
                "cuda_graph and profile apply to onnxruntime only.",
                why=f"The runtimes are {', '.join(self.runtimes)}.",
                fix=f"Leave out {argument('profile')} and {argument('cuda_graph')}, or {argument('runtime')}.",
            )
        for threads in self.threads:
            check_threads(threads)
        if len(set(self.seq_lens)) < len(self.seq_lens):
            raise UsageError("A length is given twice.")
        if any(not 0 < percentile <= 100 for percentile in self.percentiles) or not self.percentiles:
            raise UsageError(
                f"The percentiles are {', '.join(f'{p:g}' for p in self.percentiles) or 'none'}.",
                why="A percentile must be above 0 and at most 100.",
                fix=f"For example {argument('percentile', (50, 90, 99))}.",
            )
        if not (self.duration >= 0 and self.warmup_ms >= 0 and self.iterations >= 1 and self.rounds >= 1):
            raise UsageError("A duration is negative, or the number of repetitions is 0.")
        if self.inputs is not None and self.seq_lens:
            raise UsageError("Inputs from a file have their own length.", fix=f"Leave {argument('seq_len')} out.")

    def candidates(self) -> list[Candidate]:
        """List every combination of the options as candidates, the first model's first.

        If the request has ONNX files too, an engine is one candidate for each length: it runs on its GPU, whatever
        providers, threads and plugins the ONNX files are measured with.
        """
        lengths: tuple[int | None, ...] = self.seq_lens or (None,)
        any_free = any(_is_free(model) for model in self.models)
        combined: list[Candidate] = []
        for model in self.models:
            free = _is_free(model)
            measures_all = free or not any_free
            for provider, threads, plugin, runtime, length in product(
                self.providers if measures_all else ("auto",),
                self.threads if measures_all else (None,),
                self.plugins if measures_all else ("auto",),
                self.runtimes if free else (AUTO,),
                lengths,
            ):
                combined.append(Candidate(model, provider, threads, length, plugin, runtime))
        if self.module is not None:
            combined += [
                Candidate(self.models[0], "cpu", threads, length, module=self.module)
                for threads, length in product(self.threads, lengths)
            ]
        return combined


@dataclass(frozen=True)
class Candidate:
    """One candidate; `seq_len` None is the model's own length, `module` what PyTorch runs instead of the model."""

    model: Path
    provider: str
    threads: int | None
    seq_len: int | None
    plugin: str = "auto"
    runtime: str = "auto"
    module: TorchModule | None = None

    @property
    def name(self) -> str:
        """What it is called in reports, without the options."""
        return self.model.name if self.module is None else self.module.name

    def compared_with(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the candidate to compare with.

        It is the first model's candidate under the most similar conditions; for the first model, the first candidate.
        """
        first = candidates[0]
        if self.model == first.model and self.module is None:
            return first

        def unlike(other: Candidate) -> tuple[bool, ...]:
            names = ("seq_len", "provider", "threads", "plugin", "runtime")
            return tuple(getattr(self, name) != getattr(other, name) for name in names)

        return min((x for x in candidates if x.model == first.model and x.module is None), key=unlike)


def _is_free(model: Path) -> bool:
    """Return whether the options choose where the file runs: one that was built runs where it was built for."""
    backend = registry.of_file(model)
    return backend is not None and not backend.built


def labels(candidates: Sequence[Candidate]) -> dict[Candidate, str]:
    """Give each candidate a short name: its file, and the options in which the candidates differ."""
    files = [candidate for candidate in candidates if candidate.module is None]
    paths = {candidate.model for candidate in files}
    by_name = len({path.name for path in paths}) == len(paths)
    parts: dict[Candidate, list[str]] = {
        candidate: [candidate.name if by_name or candidate.module else str(candidate.model)] for candidate in candidates
    }
    for option, worded in _WORDED.items():
        of_files = option in _OF_FILES
        if len({getattr(candidate, option) for candidate in (files if of_files else candidates)}) > 1:
            for candidate, words in parts.items():
                if of_files and candidate.module is not None:
                    continue
                words.append(worded(getattr(candidate, option)))
    return {candidate: ", ".join(words) for candidate, words in parts.items()}


# Options that PyTorch's module has not.
_OF_FILES = ("provider", "plugin", "runtime")
# How options appear in names of candidates, in this order.
_WORDED: dict[str, Callable[[Any], str]] = {
    "provider": str,
    "threads": lambda count: f"{count} thread{'s' if count != 1 else ''}",
    "plugin": "plugin {}".format,
    "runtime": lambda name: next(iter(registry.ROWS)) if name == AUTO else name,
    "seq_len": "n={}".format,
}
