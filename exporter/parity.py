"""`parity`: an exported file beside the fp64 oracle of its checkpoint, over a sweep of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.config import RawConfig
from ..core.errors import UsageError
from ..core.sidecar import Sidecar, read_sidecar
from ..core.tolerance import tolerance_for
from ..runtime.arrays import load_arrays, random_inputs, save_arrays
from ..runtime.compare import Comparison
from ..runtime.session import Session, load
from .checks.parity import compare_with_oracle
from .open import open_checkpoint
from .source import NUMPY_DTYPE, ShapeRequest, SourceModel

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ParityRequest:
    """What to compare.

    Args:
        model: the exported file.
        checkpoint: its weights.
        config: configuration file; by default the sidecar's, else the one beside the checkpoint.
        seeds: one set of random inputs each.
        inputs: an .npz of inputs instead.
        atol: absolute tolerance instead of the dtype's.
        rtol: relative tolerance instead of the dtype's.
        provider: where to run the file.
        causal: AFTLocal only, whether it was exported as causal; by default the sidecar's word.
        keep_reference: keep the reference's outputs on the worst inputs too.
    """

    model: Path
    checkpoint: Path
    config: Path | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    inputs: Path | None = None
    atol: float | None = None
    rtol: float | None = None
    provider: str = "auto"
    causal: bool | None = None
    keep_reference: bool = False


@dataclass
class ParityReport:
    """What came out.

    Args:
        dtype: the file's, which chose the tolerance.
        provider: what really ran.
        comparisons: by description of the inputs, one comparison an output.
        notes: what the user should know.
        inputs: those of the worst comparison.
        outputs: the file's outputs on them, and the reference's as `NAME.reference`.
    """

    dtype: str
    provider: str
    comparisons: list[tuple[str, Comparison]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inputs: Arrays = field(default_factory=dict)
    outputs: Arrays = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every output of every set of inputs is within its tolerance."""
        return all(comparison.passed for _, comparison in self.comparisons)

    def rows(self) -> list[dict[str, Any]]:
        """One row an output and set of inputs."""
        return [
            {"output": c.name, "inputs": source, "passed": c.passed, **c.figures()} for source, c in self.comparisons
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "passed": self.passed,
            "dtype": self.dtype,
            "provider": self.provider,
            "comparisons": self.rows(),
            "notes": self.notes,
        }

    def save(self, inputs: Path | None, outputs: Path | None) -> None:
        """Write the arrays of the worst comparison as .npz."""
        if inputs is not None:
            save_arrays(inputs, self.inputs)
        if outputs is not None:
            save_arrays(outputs, self.outputs)


def run_parity(request: ParityRequest, progress: Callable[[str], None] = lambda _: None) -> ParityReport:
    """Run the file and the oracle on the same inputs.

    Raises:
        UsageError: a file that cannot be read, or that does not belong to the checkpoint.
        CheckFailed: an output is missing or has another shape than the reference.
        MissingDependency: onnxruntime, or the provider asked for, is not there.
    """
    progress("Loading the model")
    session = load(request.model, provider=request.provider)
    sidecar = read_sidecar(request.model)
    source, notes = _source(request, session, sidecar)
    dtype = _dtype(session, source, sidecar)
    _check_signature(session, source, dtype)
    tolerance = tolerance_for(dtype, request.atol, request.rtol)
    report = ParityReport(dtype, session.provider, notes=notes)
    worst = -np.inf
    for name, inputs in _input_sets(request, source, dtype):
        progress(f"Comparing: {name}")
        outputs = session.run(inputs)
        for comparison in compare_with_oracle(outputs, source, inputs, tolerance):
            report.comparisons.append((name, comparison))
            if not report.outputs or comparison.excess(tolerance) > worst:
                worst = comparison.excess(tolerance)
                report.inputs, report.outputs = inputs, outputs
    if request.keep_reference:
        expected = source.reference(report.inputs)
        report.outputs = report.outputs | {f"{name}.reference": x for name, x in expected.items()}
    return report


def _source(request: ParityRequest, session: Session, sidecar: Sidecar | None) -> tuple[SourceModel, list[str]]:
    """The checkpoint at the shapes of the file."""
    known = None
    notes = []
    if sidecar is not None:
        known = RawConfig(sidecar.class_name, sidecar.kwargs, sidecar.hyper_connections, "the sidecar")
    opened = open_checkpoint(request.checkpoint, request.config, known=known)
    if sidecar is not None and sidecar.checkpoint_sha256 != opened.loaded.sha256:
        notes.append(f"{request.checkpoint} is not the checkpoint {request.model} was exported from")
    inputs = {spec.name: spec for spec in session.inputs}
    data = session.inputs[0]
    if not all(isinstance(size, int) for spec in session.inputs for size in spec.shape):
        raise UsageError(f"{request.model} has open dimensions.", why="Parity needs a file with static shapes.")
    is_attention, is_aft = "q" in inputs, "query" in inputs
    causal = request.causal
    if causal is None:
        causal = bool(sidecar is not None and sidecar.options.get("causal"))
    shapes = ShapeRequest(
        batch=int(data.shape[1 if is_aft else 0]),
        seq_len=int(data.shape[2 if is_attention else 0 if is_aft else 1]),
        heads=int(data.shape[1]) if is_attention else None,
        dim_head=int(data.shape[3]) if is_attention else None,
        mask="mask" in inputs,
        attn_bias="attn_bias" in inputs,
        causal=causal,
        full_mask="full_mask" in inputs,
    )
    return opened.source(shapes), notes + opened.notes


def _dtype(session: Session, source: SourceModel, sidecar: Sidecar | None) -> str:
    if sidecar is not None:
        return sidecar.dtype
    names = {numpy_name: name for name, numpy_name in NUMPY_DTYPE.items()}
    element = next((x.dtype for x in session.outputs if x.name == source.output_name), "float32")
    return names.get(element, "fp32")


def _check_signature(session: Session, source: SourceModel, dtype: str) -> None:
    """The file must take what this checkpoint takes."""
    wanted, found = source.inputs(dtype), session.inputs
    if wanted != found:
        raise UsageError(
            "The model and the checkpoint do not belong together.",
            why=f"The model takes {_listed(found)}; the checkpoint's {source.class_name} takes {_listed(wanted)}.",
            fix="Give the checkpoint and configuration the model was exported from.",
        )


def _listed(specs: list[Any]) -> str:
    return ", ".join(spec.describe() for spec in specs)


def _input_sets(request: ParityRequest, source: SourceModel, dtype: str) -> Iterator[tuple[str, Arrays]]:
    if request.inputs is not None:
        yield str(request.inputs), load_arrays(request.inputs)
        return
    for seed in request.seeds:
        yield f"seed {seed}", random_inputs(source.inputs(dtype), seed, token_limit=source.token_limit)
