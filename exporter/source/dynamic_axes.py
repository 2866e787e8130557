"""The dynamic batch and sequence axes of a checkpoint's file: the axes of its inputs, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.tensors import BATCH, SEQUENCE, TensorSpec
from .source_model import SourceModel

# The upper bound that PyTorch's exporter needs.
LARGEST_BATCH = 1 << 16


def check_axes(source: SourceModel, axes: Sequence[str]) -> None:
    """Refuse axes that cannot be dynamic.

    Raises:
        UsageError: an unknown name, a model without dynamic-length export, or a length of one token.
    """
    for name in axes:
        if name not in (BATCH, SEQUENCE):
            raise UsageError(
                f"{argument('dynamic')} names {name!r}: a checkpoint has no such axis.", fix="Known: batch, seq."
            )
    if axes and source.family.why_static:
        raise UsageError(
            f"{argument('dynamic')} does not apply to {source.class_name.split('.')[1]}.", why=source.family.why_static
        )
    if SEQUENCE in axes and source.shapes.seq_len < 2:
        raise UsageError("The longest sequence is 1 token.", why="A dynamic length needs 2 or more.")


def sizes_of(specs: Iterable[TensorSpec], inputs: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Return the sizes of the dynamic axes, by name, that arrays have."""
    return {
        name: int(size)
        for spec in specs
        for name, size in zip(spec.shape, inputs[spec.name].shape, strict=True)
        if isinstance(name, str)
    }


def dynamic_axes_of(source: SourceModel, axes: Sequence[str]) -> list[dict[int, str]]:
    """List the dynamic axes of each input: those that change with the sizes."""
    shapes = source.shapes
    grown = {BATCH: replace(shapes, batch=shapes.batch + 1), SEQUENCE: replace(shapes, seq_len=shapes.seq_len + 1)}
    found: list[dict[int, str]] = [{} for _ in source.inputs("fp32")]
    now = source.family.inputs(source.args, shapes)
    for name in axes:
        other = source.family.inputs(source.args, grown[name])
        for place, key in enumerate(now):
            pairs = enumerate(zip(now[key][1], other[key][1], strict=True))
            found[place] |= {axis: name for axis, (before, after) in pairs if before != after}
    return found


def dimensions(source: SourceModel, axes: Sequence[str]) -> list[dict[int, torch.export.Dim]]:
    """Return the dynamic axes in the form that PyTorch's exporter takes."""
    largest = {BATCH: LARGEST_BATCH, SEQUENCE: source.shapes.seq_len}
    dims = {name: torch.export.Dim(name, min=1, max=largest[name]) for name in axes}
    return [{axis: dims[name] for axis, name in of_input.items()} for of_input in dynamic_axes_of(source, axes)]


def dynamic_specs(source: SourceModel, dtype: str, axes: Sequence[str]) -> list[TensorSpec]:
    """List the file's inputs, with dynamic axes by name."""
    return [
        replace(spec, shape=tuple(names.get(axis, size) for axis, size in enumerate(spec.shape)))
        for spec, names in zip(source.inputs(dtype), dynamic_axes_of(source, axes), strict=True)
    ]
