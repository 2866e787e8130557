"""Check or draw the inputs of one call of a file; for a step file, those of the first call of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.tensors import TensorSpec, named_sizes
from ..session import Arrays
from .arrays import random_inputs
from .vocabulary import allowed_tokens, check_tokens, vocabulary

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar
    from ...core.documents.step_record import StepRecord


def first_call(step: StepRecord) -> Arrays:
    """Return the position and the caches of a step file's first call.

    Raises:
        UsageError: a cache is of a type that numpy does not have.
    """
    begun: Arrays = {step.position_input: np.zeros(1, dtype=np.int64)}
    for cache in step.caches:
        try:
            begun[cache.input] = np.full(cache.shape, cache.fill, cache.dtype)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"Cache {cache.input!r} cannot be filled.",
                why=f"The sidecar describes it as {cache.dtype} {cache.shape}: {error}.",
                fix="Export the model again, or give the inputs in a file.",
            ) from error
    return begun


def draw_call(
    specs: Sequence[TensorSpec],
    seed: int,
    sidecar: Sidecar | None,
    sizes: Mapping[str, int] | None = None,
    token_limit: int | None = None,
) -> Arrays:
    """Draw random inputs that fit `specs`; those of a step file are for the first call of a sequence.

    Args:
        specs: what the file takes.
        seed: see `runtime.inputs.arrays.random_inputs`.
        sidecar: its sidecar, for the vocabulary and the caches; None without one.
        sizes: of the dynamic axes, by name; None: the sidecar's sizes of the export.
        token_limit: the vocabulary where the sidecar does not state it.

    Raises:
        UsageError: they cannot be drawn; see `runtime.inputs.arrays.random_inputs`.
    """
    if sizes is None and sidecar is not None:
        sizes = named_sizes(sidecar.batch, sidecar.seq_len)
    begun = {} if sidecar is None or sidecar.step is None else first_call(sidecar.step)
    drawn = random_inputs(
        [spec for spec in specs if spec.name not in begun], seed, vocabulary(sidecar) or token_limit, sizes
    )
    return {spec.name: begun[spec.name] if spec.name in begun else drawn[spec.name] for spec in specs}


def check_call(inputs: Mapping[str, Any], sidecar: Sidecar | None, source: str = "") -> None:
    """Refuse tokens outside the vocabulary, and a position that a step file does not have.

    Args:
        inputs: arrays; integers are tokens, except the position of a step file.
        sidecar: the sidecar of the file; None checks nothing.
        source: where the inputs come from, for the error.

    Raises:
        UsageError: a token is outside the vocabulary, or a position is out of range.
    """
    step = None if sidecar is None else sidecar.step
    tokens = dict(inputs)
    if step is not None and step.position_input in tokens:
        _check_position(np.asarray(tokens.pop(step.position_input)), step, source)
    check_tokens(tokens, allowed_tokens(sidecar), source)


def _check_position(given: NDArray[Any], step: StepRecord, source: str) -> None:
    if given.dtype.kind not in "iu" or given.size != 1:
        return  # the session refuses it for its type or its shape
    position, of = int(given.reshape(-1)[0]), f" of {source}" if source else ""
    last = None if step.max_positions is None else step.max_positions - step.chunk
    if position < 0 or (last is not None and position > last):
        has = "any number of positions" if last is None else f"{step.max_positions} positions"
        raise UsageError(
            f"Input {step.position_input!r}{of} is {position}.",
            why=f"The model has {has}, counted from 0, and this file needs {step.chunk} per call.",
            fix="Give the number of tokens consumed before this call"
            + ("." if last is None else f", from 0 to {last}."),
        )
