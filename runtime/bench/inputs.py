"""Make the inputs of each candidate; candidates with the same signature get the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.tensors import BATCH_AXES, SEQUENCE_AXES, TensorSpec, named_sizes
from ..inputs.arrays import load_arrays
from ..inputs.example_inputs import draw_call
from ..session import Arrays, check_inputs

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call; None where unknown."""

    batch: int | None
    seq_len: int | None

    @property
    def tokens(self) -> int | None:
        """Tokens per call."""
        return None if self.batch is None or self.seq_len is None else self.batch * self.seq_len


def sizes_of(
    model: Path, specs: Sequence[TensorSpec], sidecar: Sidecar | None, batch: int | None, seq_len: int | None
) -> Sizes:
    """Return the sizes to measure at: those asked for on dynamic axes, else the sizes the model is made for.

    Raises:
        UsageError: a size was asked for that the file fixes to another value.
    """
    names = {size for spec in specs for size in spec.shape}
    made_for = Sizes(None, None) if sidecar is None else Sizes(sidecar.batch, sidecar.seq_len)
    found: list[int | None] = []
    for name, asked, known, axes in (
        ("batch", batch, made_for.batch, BATCH_AXES),
        ("seq_len", seq_len, made_for.seq_len, SEQUENCE_AXES),
    ):
        is_open = not names.isdisjoint(axes)
        if asked is not None and not is_open and asked != known:
            fixed = "its sizes are fixed" if known is None else f"it is fixed to {known}"
            raise UsageError(
                f"{argument(name, asked)} does not fit {model}.",
                why=f"The file has no dynamic axis for it: {fixed}.",
                fix=f"Export it for that size, or with {argument('dynamic', ('batch', 'seq'))}.",
            )
        if name == "seq_len" and asked is not None and known is not None and asked > known:
            raise UsageError(
                f"{argument('seq_len', asked)} is longer than {model} allows.",
                why=f"It was exported for up to {known} tokens.",
            )
        if asked is None and is_open and known is None:
            raise UsageError(
                f"The {name} of {model} is dynamic.",
                why="It has no sidecar that gives a size.",
                fix=f"Give {argument(name)}, or the inputs in a file: {argument('inputs')}.",
            )
        found.append(known if asked is None else asked)
    return Sizes(*found)


def draw(
    specs: Sequence[TensorSpec],
    sizes: Sizes,
    sidecar: Sidecar | None,
    seed: int,
    shared: Mapping[str, Any] | None = None,
    token_limit: int | None = None,
) -> Arrays:
    """Draw random inputs, or reuse those of the first model (`shared`) where they fit.

    Args:
        specs: what the candidate takes.
        sizes: of its dynamic axes.
        sidecar: its sidecar, for the vocabulary and the caches of a step file.
        seed: of numpy's generator.
        shared: inputs another candidate was given.
        token_limit: size of the vocabulary where the sidecar does not state it.

    Raises:
        UsageError: they cannot be drawn; see `draw_call`.
    """
    if shared is not None and _fits(specs, shared, sizes):
        return dict(shared)
    return draw_call(specs, seed, sidecar, named_sizes(sizes.batch, sizes.seq_len), token_limit)


def _fits(specs: Sequence[TensorSpec], arrays: Mapping[str, Any], sizes: Sizes) -> bool:
    """Return whether arrays are inputs of these specs, and of these sizes where axes are dynamic."""
    try:
        checked = check_inputs(specs, arrays)
    except UsageError:
        return False
    wanted = named_sizes(sizes.batch, sizes.seq_len)
    for spec in specs:
        for axis, size in zip(spec.shape, checked[spec.name].shape, strict=True):
            if wanted.get(str(axis), size) != size:
                return False
    return True


def from_file(path: Path, specs: Sequence[TensorSpec], sidecar: Sidecar | None) -> tuple[Arrays, Sizes]:
    """Read inputs from an `.npz`, and the sizes of their named axes.

    Raises:
        UsageError: the file does not exist, or does not fit the model.
    """
    arrays = check_inputs(specs, load_arrays(path))
    sizes: dict[int | str, int] = {}
    for spec in specs:
        sizes.update(zip(spec.shape, arrays[spec.name].shape, strict=True))
    batch = next((sizes[name] for name in BATCH_AXES if name in sizes), None if sidecar is None else sidecar.batch)
    length = next(
        (sizes[name] for name in SEQUENCE_AXES if name in sizes), None if sidecar is None else sidecar.seq_len
    )
    return arrays, Sizes(batch, length)
