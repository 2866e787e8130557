"""Make sample inputs with onnxruntime's outputs on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.documents.step_record import StepRecord
from ...core.error_texts import argument
from ...core.errors import CheckFailed, UsageError
from ...core.tensors import TensorSpec, named_sizes
from ..backends.step_file import other_tensors
from ..generation.array_step import ArrayStep
from ..inputs.arrays import load_arrays, random_inputs
from ..inputs.example_inputs import check_call
from ..inputs.vocabulary import vocabulary
from ..session import Arrays, Session, load
from ..text_inputs.rows import fill, token_names
from ..text_inputs.tokens import open_tokens
from .parts import ModelPart


@dataclass(frozen=True)
class Sample:
    """One call: inputs, expected outputs, and the source of the inputs."""

    inputs: Arrays
    outputs: Arrays
    source: str


def make_samples(part: ModelPart, count: int, seed: int, given: Sequence[Path] = ()) -> list[Sample]:
    """Make samples of a model, from files or drawn from seeds.

    Args:
        part: the model.
        count: how many to draw; ignored where `given` has files.
        seed: of the first; each further one takes the next.
        given: `.npz` files, each with one array an input.

    Raises:
        UsageError: inputs that do not fit the model, or that cannot be drawn.
        CheckFailed: the model gives NaN or Inf, with which nothing can be compared.
        MissingDependency: onnxruntime is not installed.
    """
    if not (count or given):
        return []
    session = load(part.file, provider="cpu", plugin="none")
    limit = vocabulary(part.sidecar)
    step = part.step
    drawn: Iterator[tuple[Arrays, str]]
    if given:
        drawn = ((load_arrays(path), path.name) for path in given)
    elif step is not None:
        drawn = _stream(session, step, count, seed, limit)
    else:
        drawn = _draw(session.inputs, part, count, seed, limit)
    samples = []
    for inputs, source in drawn:
        check_call(inputs, part.sidecar, source)
        samples.append(Sample(inputs, _finite(session.run(inputs), source), source))
    return samples


def example_inputs(session: Session, part: ModelPart, samples: Sequence[Sample]) -> list[Arrays]:
    """Return inputs for a model of whole sequences: those of its samples, or random ones if it has none.

    Raises:
        UsageError: inputs that cannot be drawn.
    """
    given = [sample.inputs for sample in samples]
    return given or [inputs for inputs, _ in _draw(session.inputs, part, 2, 0, vocabulary(part.sidecar))]


def sequence_inputs(part: ModelPart, samples: Sequence[Sample], seed: int) -> Arrays:
    """Return the inputs of every call up to the last sample of a step file, as one sequence.

    Args:
        part: the step file.
        samples: of it, drawn with `seed`.
        seed: of the first call.
    """
    step = part.step
    if step is None or not samples:
        return {}
    data, _ = other_tensors(part, step)
    calls = int(samples[-1].inputs[step.position_input][0]) // step.chunk + 1
    drawn = [random_inputs(data, seed + call, vocabulary(part.sidecar)) for call in range(calls)]
    return {spec.name: np.concatenate([call[spec.name] for call in drawn], step.sequence_axis) for spec in data}


def _draw(
    specs: Sequence[TensorSpec], part: ModelPart, count: int, seed: int, limit: int | None
) -> Iterator[tuple[Arrays, str]]:
    """Draw realistic inputs, or random floats; with dynamic axes, the longest first and then a shorter one."""
    sidecar = part.sidecar
    config = None if sidecar is None else sidecar.kwargs.get("config")
    known = config if isinstance(config, dict) else None
    tokens = open_tokens([part.path.parent], limit, known) if token_names(specs) else None
    for index in range(count):
        sizes = {}
        if sidecar is not None:
            length = sidecar.seq_len if index % 2 == 0 else max(1, sidecar.seq_len * 2 // 3)
            sizes = named_sizes(sidecar.batch, length)
        try:
            drawn = random_inputs(specs, seed + index, limit, sizes)
            if tokens is None:
                yield drawn, f"random, seed {seed + index}"
            else:
                yield fill(drawn, specs, tokens, seed + index), f"{tokens.kind}, seed {seed + index}"
        except UsageError as error:
            raise UsageError(
                error.what, why=error.why, fix=f"Give the samples' inputs in a file: {argument('inputs')}."
            ) from error


def _stream(
    session: Session, step: StepRecord, count: int, seed: int, limit: int | None
) -> Iterator[tuple[Arrays, str]]:
    """Yield calls of a step file with the caches of a real run: the first, and some after the caches have wrapped."""
    steps = ArrayStep(step, {step.chunk: session})
    slots = max((max(cache.shape[:-1], default=1) for cache in step.caches), default=1)
    apart = slots // step.chunk + 2
    for call in range(apart * (count - 1) + 1):
        if step.max_positions is not None and steps.position + step.chunk > step.max_positions:
            return
        drawn = random_inputs(steps.inputs, seed + call, limit)
        if call % apart == 0:
            inputs = drawn | steps.state
            yield {spec.name: inputs[spec.name] for spec in session.inputs}, f"random, seed {seed}, call {call}"
        steps.advance(drawn)


def _finite(outputs: Arrays, source: str) -> Arrays:
    for name, array in outputs.items():
        if not np.isfinite(array).all():
            raise CheckFailed(
                f"Output {name!r} contains NaN or Inf for the sample {source}.",
                why="A device's result cannot be compared with such an output.",
                fix=f"Give other inputs in a file, {argument('inputs')}, or export in a wider type.",
            )
    return outputs
