"""The checks of a checkpoint's file with dynamic sizes.

Parity is compared over a sweep of lengths around the multiples of the window, because between the multiples upstream
pads, and a length that was traced as a constant would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx

from ...core.documents.sidecar import CheckRecord
from ...core.tensors import BATCH, SEQUENCE
from ...core.tolerance import Tolerance
from ...runtime.inputs.arrays import random_inputs
from ...runtime.inputs.size_sweep import sweep_sizes
from ...runtime.parity.inputs import InputSet
from ...runtime.session import Session
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from .layers import check_layer_memory, check_layer_windows
from .left_out import inputs_of
from .parity import baseline_meter, check_input_sets


def check_sweep(
    session: Session, source: SourceModel, dtype: str, axes: Sequence[str], tolerance: Tolerance, *, quick: bool = False
) -> CheckRecord:
    """Compare a written file with the float64 reference over a sweep of sizes; quick checks compare at the first."""
    reference = ReferenceRunner(source, dtype, axes)
    meter = baseline_meter(source, dtype, tolerance)
    return check_input_sets(session, reference, inputs_of(_input_sets(reference, axes), quick), tolerance, meter)


def dynamic_node_checks(model: onnx.ModelProto, source: SourceModel, axes: Sequence[str]) -> Iterator[CheckRecord]:
    """Run each check of a model's attention nodes; its weights may be absent."""
    yield check_layer_windows(model, [])
    dynamic_axis = SEQUENCE if SEQUENCE in axes else ""
    yield check_layer_memory(model, {source.shapes.seq_len}, dynamic_axis, lambda _: None)


def _input_sets(reference: ReferenceRunner, axes: Sequence[str]) -> Iterator[InputSet]:
    """Draw random inputs at every size of the sweep; the check leaves out sizes that the class refuses."""
    source = reference.source
    windows = [] if source.geometry is None else [source.geometry]
    now: Mapping[str, int] = {BATCH: source.shapes.batch, SEQUENCE: source.shapes.seq_len}
    for sizes in sweep_sizes(axes, now, SEQUENCE, windows):
        drawn = random_inputs(reference.inputs, sum(sizes.values()), source.token_limit, sizes)
        yield InputSet(" ".join(f"{axis}={sizes[axis]}" for axis in axes), drawn)
