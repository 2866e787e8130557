"""A checkpoint's file with open batch and sequence axes: which axes those are, and how the file is checked.

Parity is judged over a sweep of lengths around the multiples of the window, because it is between them that upstream
pads and a traced constant would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import torch

from ..core.errors import UsageError
from ..core.sidecar import CheckRecord
from ..core.size_sweep import sweep_sizes
from ..core.tensors import TensorSpec
from ..core.tolerance import Tolerance
from ..runtime.arrays import random_inputs
from .checks.layers import check_layer_memory, check_layer_windows
from .checks.loads import check_loads, check_model
from .checks.untouched import Arrays, Trial, check_untouched
from .models.family import NUMPY_DTYPE, ShapeRequest
from .source import SourceModel

BATCH, SEQUENCE = "batch", "seq"
# Only a bound for PyTorch's exporter.
LARGEST_BATCH = 1 << 16


def check_axes(source: SourceModel, axes: Sequence[str]) -> None:
    """Refuse axes that cannot be open.

    Raises:
        UsageError: an unknown name, a model without an open-length export, or a length of one token.
    """
    for name in axes:
        if name not in (BATCH, SEQUENCE):
            raise UsageError(f"--dynamic {name}: a checkpoint has no such axis.", fix="Known: batch, seq.")
    if axes and source.kind.why_static:
        raise UsageError(f"--dynamic does not apply to {source.class_name.split('.')[1]}.", why=source.kind.why_static)
    if SEQUENCE in axes and source.shapes.seq_len < 2:
        raise UsageError("The longest sequence is 1 token.", why="An open length needs 2 or more.")


def at_open_sizes(source: SourceModel, request: ShapeRequest, axes: Sequence[str]) -> SourceModel:
    """The model to trace: no open axis of size 1, which PyTorch's exporter would take for a constant."""
    batch = max(2, request.batch) if BATCH in axes else request.batch
    return source.at(replace(request, batch=batch, open_length=SEQUENCE in axes))


def at_sizes(source: SourceModel, sizes: Mapping[str, int]) -> SourceModel:
    """The model at another batch and length.

    Raises:
        UsageError: it takes no such length.
    """
    request = ShapeRequest(
        heads=source.shapes.heads,
        dim_head=source.shapes.dim_head,
        mask=source.shapes.mask,
        attn_bias=source.shapes.attn_bias,
        seq_len=sizes[SEQUENCE],
        batch=sizes[BATCH],
    )
    return source.at(request)


def open_axes(source: SourceModel, axes: Sequence[str]) -> list[dict[int, str]]:
    """For each input its open axes: those that change with the size."""
    shapes = source.shapes
    grown = {BATCH: replace(shapes, batch=shapes.batch + 1), SEQUENCE: replace(shapes, seq_len=shapes.seq_len + 1)}
    found: list[dict[int, str]] = [{} for _ in source.inputs("fp32")]
    now = source.kind.inputs(source.args, shapes)
    for name in axes:
        other = source.kind.inputs(source.args, grown[name])
        for place, key in enumerate(now):
            pairs = enumerate(zip(now[key][1], other[key][1], strict=True))
            found[place] |= {axis: name for axis, (before, after) in pairs if before != after}
    return found


def dimensions(source: SourceModel, axes: Sequence[str]) -> list[dict[int, torch.export.Dim]]:
    """The open axes as PyTorch's exporter takes them."""
    largest = {BATCH: LARGEST_BATCH, SEQUENCE: source.shapes.seq_len}
    dims = {name: torch.export.Dim(name, min=1, max=largest[name]) for name in axes}
    return [{axis: dims[name] for axis, name in of_input.items()} for of_input in open_axes(source, axes)]


def open_specs(source: SourceModel, dtype: str, axes: Sequence[str]) -> list[TensorSpec]:
    """The file's inputs, open axes by name."""
    return [
        replace(spec, shape=tuple(names.get(axis, size) for axis, size in enumerate(spec.shape)))
        for spec, names in zip(source.inputs(dtype), open_axes(source, axes), strict=True)
    ]


def open_checks(
    path: Path, source: SourceModel, dtype: str, axes: Sequence[str], tolerance: Tolerance
) -> Iterator[CheckRecord]:
    """Each check of a written file, cheapest first."""
    yield check_model(path)
    record, session = check_loads(path)
    yield record
    specs = open_specs(source, dtype, axes)

    def reference(inputs: Arrays) -> Arrays:
        return dict(at_sizes(source, _sizes_of(inputs, specs, source)).reference(inputs))

    yield check_untouched(session, reference, "the float64 oracle", _trials(source, dtype, axes), tolerance)
    written = onnx.load(path, load_external_data=False)
    yield check_layer_windows(written, [])
    open_axis = SEQUENCE if SEQUENCE in axes else ""
    yield check_layer_memory(written, {source.shapes.seq_len}, open_axis, lambda _: None)


def _sizes_of(inputs: Arrays, specs: Sequence[TensorSpec], source: SourceModel) -> dict[str, int]:
    sizes = {BATCH: source.shapes.batch, SEQUENCE: source.shapes.seq_len}
    for spec in specs:
        named = zip(spec.shape, inputs[spec.name].shape, strict=True)
        sizes |= {name: size for name, size in named if isinstance(name, str)}
    return sizes


def _trials(source: SourceModel, dtype: str, axes: Sequence[str]) -> Iterator[Trial]:
    """Random inputs at every size of the sweep; sizes the class refuses are left out by the check."""
    shapes = source.shapes
    element = {"float": NUMPY_DTYPE[dtype]}
    windows = [] if source.geometry is None else [source.geometry]
    now: Mapping[str, int] = {BATCH: shapes.batch, SEQUENCE: shapes.seq_len}
    for sizes in sweep_sizes(axes, now, SEQUENCE, windows):
        at = replace(shapes, batch=sizes[BATCH], seq_len=sizes[SEQUENCE])
        specs = [
            TensorSpec(name, element.get(kind, kind), shape)
            for name, (kind, shape) in source.kind.inputs(source.args, at).items()
        ]
        drawn = random_inputs(specs, sum(sizes.values()), token_limit=source.token_limit)
        yield Trial(" ".join(f"{axis}={sizes[axis]}" for axis in axes), drawn)
