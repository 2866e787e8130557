"""Every check of a checkpoint's file with dynamic sizes.

Parity is compared over a sweep of lengths around the multiples of the window, because it is between them that upstream
pads and a traced constant would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from ...core.documents.sidecar import CheckRecord
from ...core.tolerance import Tolerance
from ...runtime.inputs.arrays import random_inputs
from ...runtime.inputs.size_sweep import sweep_sizes
from ...runtime.parity.inputs import InputSet
from ..source.dynamic_axes import BATCH, SEQUENCE
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from .layers import check_layer_memory, check_layer_windows
from .loads import check_loads, check_model
from .parity import check_input_sets


def dynamic_checks(
    path: Path, source: SourceModel, dtype: str, axes: Sequence[str], tolerance: Tolerance
) -> Iterator[CheckRecord]:
    """Each check of a written file, cheapest first."""
    yield check_model(path)
    record, session = check_loads(path)
    yield record
    reference = ReferenceRunner(source, dtype, axes)
    yield check_input_sets(session, reference, _input_sets(reference, axes), tolerance)
    written = onnx.load(path, load_external_data=False)
    yield check_layer_windows(written, [])
    open_axis = SEQUENCE if SEQUENCE in axes else ""
    yield check_layer_memory(written, {source.shapes.seq_len}, open_axis, lambda _: None)


def _input_sets(reference: ReferenceRunner, axes: Sequence[str]) -> Iterator[InputSet]:
    """Random inputs at every size of the sweep; sizes the class refuses are left out by the check."""
    source = reference.source
    windows = [] if source.geometry is None else [source.geometry]
    now: Mapping[str, int] = {BATCH: source.shapes.batch, SEQUENCE: source.shapes.seq_len}
    for sizes in sweep_sizes(axes, now, SEQUENCE, windows):
        drawn = random_inputs(reference.inputs, sum(sizes.values()), source.token_limit, sizes)
        yield InputSet(" ".join(f"{axis}={sizes[axis]}" for axis in axes), drawn)
