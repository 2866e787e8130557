"""Define the schema of what `localattn bench` measures: one document that console, Markdown and HTML show.

Importing this module imports pydantic: light modules import it inside functions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..spelling import spelled

# Minimum confidence level of each interval, shown next to it.
CONFIDENCE = 0.95
# If other programs take more than this share of the processors, figures say more about the machine than the models.
OTHERS = 0.10
# If a candidate is disturbed in this way in more than this share of its timed turns, its comparison has no verdict.
BUSY = 0.5


class _Part(BaseModel):
    """Base of every part of the document."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Latency(_Part):
    """Milliseconds per call, over all timed calls of a candidate.

    Args:
        percentiles: by name, "p50" and so on, in rising order.
    """

    mean: float
    std: float
    min: float
    max: float
    percentiles: dict[str, float]


class Histogram(_Part):
    """Number of calls by duration: `counts[i]` calls took from `edges[i]` to `edges[i + 1]` milliseconds.

    Calls beyond the last edge, the slowest percent, are in `beyond`.
    """

    edges: list[float]
    counts: list[int]
    beyond: int


class Ratio(_Part):
    """Time relative to another candidate: below 1 is faster.

    Args:
        against: label of that candidate.
        value: median over the rounds of the ratio of the two medians of a round.
        low: lower end of the interval of that median; None where there are too few rounds for one, or it is withheld.
        high: its upper end.
        busy: the machine was busy with other programs for more than half of the time: no interval and no verdict, for
            because the ratio then shows more than chance.
    """

    against: str
    value: float
    low: float | None
    high: float | None
    busy: bool = False

    @property
    def verdict(self) -> str:
        """The conclusion that the interval allows, in a few words."""
        if self.busy:
            return "withheld: machine busy"
        if self.low is None or self.high is None:
            return "too few rounds"
        if self.high < 1:
            return "faster"
        return "slower" if self.low > 1 else "no difference shown"


class Memory(_Part):
    """Resident host memory of a candidate's own process, in bytes; None where the system does not report it.

    Args:
        imports: what Python, numpy and the engine's library take before the model is opened.
        loaded: what opening the model adds to that.
        peak: what opening it and all its runs add at the most.
    """

    imports: int | None
    loaded: int | None
    peak: int | None


class BenchRow(_Part):
    """One candidate: a model on a provider, at a number of threads and one size of inputs.

    Args:
        label: short and unique in the document.
        model: the file.
        backend: name of the engine.
        provider: where it really ran.
        plugin: name of the library whose compiled kernels computed its attention nodes; None if ONNX functions did.
        threads: CPU threads for one operator; None left to the engine.
        seq_len: tokens a sequence; None where neither a sidecar nor the name of an axis says.
        batch: sequences a call; None likewise.
        bound: inputs and outputs lay in the engine's own buffers; else every call checked and copied them.
        cuda_graph: the engine replayed a CUDA graph.
        load_ms: opening the file, in a process that had the engine's library imported.
        first_run_ms: the first call, in which engines plan and allocate.
        calls: timed calls.
        latency: of these calls.
        histogram: of these calls.
        rounds_ms: median of each round, in order.
        runs_per_s: calls over the time spent in them.
        tokens_per_s: the same times `seq_len · batch`.
        others: mean share of the machine's processors that other processes took meanwhile; None where
            the system does not report it.
        busy: share of its timed turns in which they took more than `OTHERS`; None likewise.
        ratio: None for the first candidate.
    """

    label: str
    model: str
    backend: str
    provider: str
    plugin: str | None = None
    threads: int | None
    seq_len: int | None
    batch: int | None
    bound: bool
    cuda_graph: bool
    load_ms: float
    first_run_ms: float
    calls: int
    latency: Latency
    histogram: Histogram
    rounds_ms: list[float]
    runs_per_s: float
    tokens_per_s: float | None
    memory: Memory
    others: float | None
    busy: float | None = None
    ratio: Ratio | None


class Share(_Part):
    """Part of a run's time: `ms` milliseconds per run, and `share` of the sum over all nodes."""

    name: str
    ms: float
    share: float
    nodes: int


class NodeTime(_Part):
    """One node of the graph that ran: milliseconds a run, its operator, and the module it came from."""

    name: str
    operator: str
    module: str
    ms: float
    share: float


class Profile(_Part):
    """Where a candidate's time goes, measured by onnxruntime's profiler in a separate run.

    Args:
        label: of the candidate.
        runs: profiled runs; figures are means over them.
        run_ms: a run, profiling included.
        node_ms: the sum over its nodes.
        modules: by module path.
        patterns: by module path with its layer as `*`, so that equal modules of all layers are one row.
        operators: by operator.
        nodes: the slowest nodes.
        named: share of `node_ms` whose module is known.
    """

    label: str
    runs: int
    run_ms: float
    node_ms: float
    modules: list[Share]
    patterns: list[Share]
    operators: list[Share]
    nodes: list[NodeTime]
    named: float


class Machine(_Part):
    """The machine of the measurement, without names of hosts, users or paths."""

    cpu: str
    cores: int
    architecture: str
    system: str
    python: str


class BenchSettings(_Part):
    """The settings of the benchmark: times in seconds, except `warmup_ms`."""

    duration: float
    iterations: int
    warmup_ms: float
    rounds: int
    seed: int
    input_source: str


class BenchReport(_Part):
    """All results of one benchmark; the others are compared with the first row."""

    format: Literal["localattn-bench"] = "localattn-bench"
    format_version: Literal[1] = 1
    created: str
    machine: Machine
    versions: dict[str, str]
    settings: BenchSettings
    rows: list[BenchRow] = Field(min_length=1)
    profiles: list[Profile] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)

    def __repr__(self) -> str:
        """Return the report in one line."""
        return f"<BenchReport: {spelled('; '.join(map(_told, self.rows)))}>"

    def __str__(self) -> str:
        """Return a line for each candidate, and the warnings; `localattn bench` prints tables."""
        lines = [_told(row) for row in self.rows]
        return "\n".join(spelled(line) for line in (*lines, *(f"Warning: {line}" for line in self.warnings)))

    def to_json(self) -> str:
        """Return the document as JSON text."""
        return self.model_dump_json(indent=2) + "\n"


def _told(row: BenchRow) -> str:
    """Return one candidate in words: `model.onnx p50 1.21 ms`."""
    name, value = next(iter(row.latency.percentiles.items()))
    ratio = "" if row.ratio is None else f", {row.ratio.value:.2g}× {row.ratio.against} ({row.ratio.verdict})"
    return f"{row.label} {name} {value:.3g} ms{ratio}"
