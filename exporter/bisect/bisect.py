"""Compare a file with its model at every module boundary, and explain the first that is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from ...core.at_work import temporary_folder
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.geometry import WindowGeometry
from ...core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST
from ...core.progress import timed_steps
from ...core.tensors import SEQUENCE, TensorSpec
from ...core.tolerance import tolerance_for
from ...onnx_graph.library_errors import infer_shapes
from ...onnx_graph.onnx_file import OnnxFile
from ...onnx_graph.windows import windows_of_sidecar
from ...runtime.inputs.arrays import load_arrays, random_inputs
from ...runtime.parity.report import ParityRequest
from ...runtime.parity.runner import FileRunner, Runner, SessionRunner
from ...runtime.session import check_inputs, find_model, load, read_model_sidecar
from ..parity import check_signature, dynamic_axes, source_of_file
from ..source.dynamic_axes import dynamic_specs, sizes_of
from ..user_module.of_file import OwnReference, is_own_module, notes_on_weights, own_module
from .boundaries import Boundary, GraphIndex, find_boundaries, first_column
from .causes import likely_cause
from .evidence import Evidence, Measured, measure
from .marked import chosen_sizes, fix, onnx_file_of, open_marked
from .reference import AttentionCall, Floats, Recording, record, record_calls
from .request import BisectReport, BisectRequest, Fault

_log = logging.getLogger(__name__)

Arrays = Mapping[str, NDArray[Any]]


@timed_steps(_log)
def run_bisect(request: BisectRequest, progress: Callable[[str], None] = lambda _: None) -> BisectReport:
    """Find the first module whose output leaves the tolerance.

    Raises:
        UsageError: a file that cannot be read or does not belong to the checkpoint, or one that names no modules.
        CheckFailed: the engine was built from another ONNX file than the one in its folder.
        MissingDependency: onnxruntime, a provider, or something an engine needs is not installed.
    """
    progress("Loading the model")
    path = onnx_file_of(request.model)
    sidecar = read_model_sidecar(request.model)
    file = OnnxFile.read(find_model(path))
    session = load(file, provider="cpu", plugin="none", verify=False)  # bisect must accept changed files
    candidate = SessionRunner(session, file, sidecar)
    if candidate.sidecar is not None and candidate.sidecar.step is not None:
        raise UsageError(
            f"{path} is a step file, which bisect does not read.",
            why="It computes a few tokens a call, and the model whole sequences.",
            fix=f"Bisect the whole file of this checkpoint: export it without {argument('mode')}. "
            "parity compares step files.",
        )
    own = request.factory is not None or is_own_module(candidate.sidecar)
    subject, notes = (_own_subject if own else _checkpoint_subject)(request, path, candidate)
    dtype, axes, specs = candidate.dtype, subject.axes, subject.specs
    sizes = subject.sizes if axes else {}
    if request.inputs is None:
        inputs: Arrays = random_inputs(specs, request.seed, token_limit=subject.token_limit, sizes=sizes)
    else:
        inputs = check_inputs(session.inputs, load_arrays(request.inputs))
    sizes = sizes_of(specs, inputs)
    if axes:
        notes.append(f"compared at {', '.join(f'{name}={size}' for name, size in sizes.items())}")
    progress("Running the model in float64")
    document = file.parse()
    if not document.graph.value_info:  # a file in standard operators omits shapes that inference finds
        document = infer_shapes(document, data_prop=True)
    fix(document.graph, sizes)
    bisection = _Bisection(request, subject, dtype, document, sizes.get(SEQUENCE, subject.length))
    recording = bisection.record(inputs)
    boundaries = find_boundaries(bisection.index, recording)
    if not any(boundary.path for boundary in boundaries):
        raise UsageError(
            f"{path} does not record which module its nodes came from.",
            why="No value in the graph matches a module's output.",
            fix="Export the model with localattn and bisect that file.",
        )
    progress("Running the file")
    return bisection.report(inputs, recording, boundaries, notes)


@dataclass(frozen=True)
class _Subject:
    """The model that a file is compared with.

    Args:
        record: runs it in float64 on inputs.
        specs: the inputs of the file.
        axes: its dynamic axes.
        sizes: what they are in the comparison.
        length: of a sequence where it is fixed.
        token_limit: size of the vocabulary; None where unknown.
        geometry: the window, or the widest; None where it is not known.
        layers: the windows of its attention calls, in order; empty where they are not known.
    """

    record: Callable[[Arrays], Recording]
    specs: Sequence[TensorSpec]
    axes: Sequence[str]
    sizes: Mapping[str, int]
    length: int
    token_limit: int | None
    geometry: WindowGeometry | None
    layers: Sequence[WindowGeometry]


def _checkpoint_subject(request: BisectRequest, path: Path, candidate: FileRunner) -> tuple[_Subject, list[str]]:
    """Return the model of a checkpoint, and notes on how it was read."""
    assert request.checkpoint is not None
    asked = ParityRequest(path, request.checkpoint, config=request.config, entry=request.entry)
    source, notes = source_of_file(asked, candidate)
    axes = dynamic_axes(candidate)
    if axes:
        source = source.resized(dynamic_length=SEQUENCE in axes)
    specs = dynamic_specs(source, candidate.dtype, axes)
    check_signature(candidate, source, specs)
    found = _Subject(
        partial(record, source),
        specs,
        axes,
        chosen_sizes(source),
        source.shapes.seq_len,
        source.token_limit,
        source.geometry,
        source.layers,
    )
    return found, notes


def _own_subject(request: BisectRequest, path: Path, candidate: FileRunner) -> tuple[_Subject, list[str]]:
    """Return the user's own module, and notes on how it was made."""
    sidecar = candidate.sidecar
    module, origin = own_module(
        path, sidecar, request.factory, request.factory_args, request.checkpoint, request.entry, "bisect"
    )
    reference = OwnReference(module, candidate)
    named = {size: x.shape[axis] for spec, x in zip(candidate.inputs, reference.example.values(), strict=True)
             for axis, size in enumerate(spec.shape) if isinstance(size, str)}  # fmt: skip
    windows = {view.geometry for view in windows_of_sidecar(sidecar)}
    length = sidecar.seq_len if sidecar is not None else max(named.values(), default=1)
    found = _Subject(
        lambda inputs: record_calls(reference.running, lambda: reference.compute(dict(inputs))),
        candidate.inputs,
        list(named),
        named,
        length,
        reference.token_limit,
        windows.pop() if len(windows) == 1 else None,
        [],
    )
    return found, [*notes_on_weights(path, sidecar, origin), *reference.notes]


# How many times wider the absolute tolerance of intermediate values is than that of outputs.
_ROUNDING_TAILS = {"fp16": 5.0, "bf16": 10.0}


class _Bisection:
    """One file compared with one model, at one length."""

    def __init__(
        self, request: BisectRequest, subject: _Subject, dtype: str, document: onnx.ModelProto, length: int
    ) -> None:
        self.request, self.subject, self.dtype, self.length = request, subject, dtype, length
        self.document = document
        self.index = GraphIndex(document.graph)
        # A few intermediate values are rounded far worse than most, so only a larger error is attributed to a module.
        self.plain = tolerance_for(dtype, request.atol, request.rtol)
        slack = 1.0 if request.atol is not None else _ROUNDING_TAILS.get(dtype, 1.0)
        self.tolerance = self.plain.scaled(slack)

    def record(self, inputs: Arrays) -> Recording:
        """Run the model in float64, with attention calls in the layout of the file's nodes."""
        recording = self.subject.record(inputs)
        nodes = [node for node, _ in self.index.attention]
        if len(nodes) != len(recording.attention):
            return recording
        calls = [
            call.laid_out(tuple(_attributes(node).get("perm", HEADS_FIRST)) == SEQUENCE_FIRST)
            for node, call in zip(nodes, recording.attention, strict=True)
        ]
        return replace(recording, attention=calls)

    def report(
        self, inputs: Arrays, recording: Recording, boundaries: list[Boundary], notes: list[str]
    ) -> BisectReport:
        """Run the file and compare every boundary in order."""
        with temporary_folder() as folder:
            names = [boundary.value for boundary in boundaries]
            session = open_marked(self.document, names, folder, self.request)
            runner = SessionRunner(session)
            measured = measure(runner, boundaries, inputs, self.tolerance)
            report = BisectReport(self.dtype, session.provider, measured, notes=notes)
            wrong = next((m for m in measured if not m.passed), None)
            if wrong is not None:
                report.fault = self._explain(wrong, measured, recording, inputs, runner)
            else:
                report.notes += self._outputs(measured)
        return report

    def _outputs(self, measured: list[Measured]) -> list[str]:
        """Write a note for each output that misses its tolerance although no module causes it alone."""
        return [
            f"{m.value} misses the table of tolerances ({self.plain.describe()}) by {miss:.2g}, and no module "
            f"causes it alone: rounding errors of {self.dtype} add up"
            for m in measured
            if m.value in self.index.outputs and (miss := m.comparison.excess(self.plain)) > 0
        ]

    def _explain(
        self, wrong: Measured, measured: list[Measured], recording: Recording, inputs: Arrays, runner: Runner
    ) -> Fault:
        # The faulty module; for a wrong input, the parent of the module that it enters.
        module = wrong.path.rpartition(".")[0] if wrong.role == "input" else wrong.path
        by_value = {m.value: m for m in measured}
        before = self.index.behind(wrong.value, set(by_value))
        call, attributes, geometry = self._attention(wrong, recording)

        def rerun(other: Arrays) -> Measured:
            """Measure the same boundary on other inputs."""
            boundaries = find_boundaries(self.index, self.record(other))
            (again,) = measure(runner, [b for b in boundaries if b.value == wrong.value], other, self.tolerance)
            return again

        evidence = Evidence(
            fault=wrong,
            dtype=self.dtype,
            tolerance=self.tolerance,
            inputs=inputs,
            geometry=geometry,
            length=self.length,
            call=call,
            attributes=attributes,
            weights=self._weights(module, recording),
            rerun=rerun,
        )
        rows = sorted((by_value[value] for value in before), key=lambda m: m.order)
        return Fault(module, wrong, rows, likely_cause(evidence))

    def _attention(
        self, boundary: Boundary, recording: Recording
    ) -> tuple[AttentionCall | None, Mapping[str, Any], WindowGeometry | None]:
        """Find the attention call that this boundary belongs to, its node's attributes, and its layer's window."""
        layers: Sequence[WindowGeometry | None] = self.subject.layers
        if len(layers) != len(recording.attention):
            layers = [self.subject.geometry] * len(recording.attention)
        for (node, _), call, window in zip(self.index.attention, recording.attention, layers, strict=False):
            if boundary.value in (*node.input[:3], node.output[0]):
                return call, _attributes(node), window
        return None, {}, self.subject.geometry

    def _weights(self, module: str, recording: Recording) -> list[tuple[str, Floats, Floats]]:
        """Pair the module's own tensors with those in the file, by shape where that is unambiguous."""
        own_nodes = (x for x, path in zip(self.index.nodes, self.index.modules, strict=True) if path == module)
        names = dict.fromkeys(name for node in own_nodes for name in node.input)
        pairs = []
        for tensor in (self.index.initializers[name] for name in names if name in self.index.initializers):
            # Integers are shapes and indices, whatever their length.
            if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.data_type == onnx.TensorProto.INT64:
                continue
            in_file = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            start = first_column(tensor.name)
            held_by_module = recording.parameters.get(module, {}).items()
            fitting = [
                (name, part)
                for name, own in held_by_module
                # A packed matrix has as many columns as upstream's matrix has rows.
                for part in [own if start is None else own[start : start + in_file.shape[-1]]]
                if in_file.shape in (part.shape, part.T.shape)
            ]
            if len(fitting) == 1:
                pairs.append((fitting[0][0], in_file, _alike(fitting[0][1], in_file)))
        return pairs


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def _alike(own: Floats, in_file: Floats) -> Floats:
    """Return a matrix transposed as the file stores it; for a square one both ways are tried."""
    ways = [x for x in (own, own.T) if x.shape == in_file.shape]
    return min(ways, key=lambda x: float(np.abs(x - in_file).sum()))
