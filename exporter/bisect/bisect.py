"""Compare a file with its model at every module boundary, and explain the first that is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from ...core.documents.engine_facts import read_model_facts
from ...core.errors import UsageError
from ...core.tolerance import tolerance_for
from ...onnx_graph.onnx_file import OnnxFile
from ...runtime.inputs.arrays import load_arrays, random_inputs
from ...runtime.parity.report import ParityRequest
from ...runtime.parity.runner import SessionRunner
from ...runtime.session import Session, check_inputs, load, read_once
from ..parity import check_signature, source_of_file
from ..source.source_model import SourceModel
from .boundaries import Boundary, GraphIndex, find_boundaries
from .causes import likely_cause
from .evidence import Evidence, Measured, measure
from .marked import onnx_file_of, open_marked
from .reference import Floats, Recording, record
from .request import BisectReport, BisectRequest, BoundaryRow, Fault

Arrays = Mapping[str, NDArray[Any]]


def run_bisect(request: BisectRequest, progress: Callable[[str], None] = lambda _: None) -> BisectReport:
    """Find the first module whose output leaves the tolerance.

    Raises:
        UsageError: a file that cannot be read or does not belong to the checkpoint, or one that names no modules.
        CheckFailed: the ONNX file of an engine is another one.
        MissingDependency: onnxruntime, a provider, or what an engine needs is not there.
    """
    progress("Loading the model")
    path = onnx_file_of(request.model)
    facts = read_model_facts(request.model)
    file = OnnxFile.read(read_once(path))
    session = load(file, provider="cpu", plugin="none", verify=False)  # what was altered is what one looks for
    candidate = SessionRunner(session, file, facts)
    if not all(isinstance(size, int) for spec in session.inputs for size in spec.shape):
        raise UsageError(f"{path} has open dimensions.", why="This needs a file with static shapes.")
    source, notes = source_of_file(ParityRequest(path, request.checkpoint, config=request.config), candidate)
    dtype = candidate.dtype
    check_signature(candidate, source, source.inputs(dtype))
    inputs = _inputs(request, session, source, dtype)
    progress("Running the model in float64")
    bisection = _Bisection(request, source, dtype, file.parse())
    recording = record(source, inputs)
    boundaries = find_boundaries(bisection.index, recording)
    if not any(boundary.path for boundary in boundaries):
        raise UsageError(
            f"{path} does not say which module its nodes came from.",
            why="No value of the graph could be matched with a module's output.",
            fix="Export the model with localattn, and compare that file.",
        )
    progress("Running the file")
    return bisection.report(inputs, recording, boundaries, notes)


def _inputs(request: BisectRequest, session: Session, source: SourceModel, dtype: str) -> Arrays:
    if request.inputs is not None:
        return check_inputs(session.inputs, load_arrays(request.inputs))
    return random_inputs(source.inputs(dtype), request.seed, token_limit=source.token_limit)


# By how much the absolute tolerance of values on the way is wider than that of outputs.
_ROUNDING_TAILS = {"fp16": 5.0, "bf16": 5.0}


class _Bisection:
    """One file beside one model."""

    def __init__(self, request: BisectRequest, source: SourceModel, dtype: str, document: onnx.ModelProto) -> None:
        self.request, self.source, self.dtype = request, source, dtype
        self.document = document
        self.index = GraphIndex(document.graph)
        # Of the values on the way a few are rounded far worse than most: a module is to blame beyond that only.
        self.plain = tolerance_for(dtype, request.atol, request.rtol)
        slack = 1.0 if request.atol is not None else _ROUNDING_TAILS.get(dtype, 1.0)
        self.tolerance = replace(self.plain, atol=slack * self.plain.atol)

    def report(
        self, inputs: Arrays, recording: Recording, boundaries: list[Boundary], notes: list[str]
    ) -> BisectReport:
        """Run the file and judge every boundary in order."""
        with tempfile.TemporaryDirectory() as folder:
            names = [boundary.value for boundary in boundaries]
            session = open_marked(self.document, names, Path(folder), self.request)
            outputs = session.run(inputs)
            measured = [measure(b, outputs[b.value], self.tolerance) for b in boundaries]
            report = BisectReport(self.dtype, session.provider, [_row(m) for m in measured], notes=notes)
            wrong = next((m for m in measured if not m.passed), None)
            if wrong is not None:
                report.fault = self._explain(wrong, measured, recording, inputs, session)
            else:
                report.notes += self._outputs(measured)
        return report

    def _outputs(self, measured: list[Measured]) -> list[str]:
        """A word on outputs that miss the tolerance of parity although no module is to blame."""
        return [
            f"{m.boundary.value} misses the tolerance of parity ({self.plain.describe()}) by {miss:.2g}, and no module "
            f"is to blame: the rounding of {self.dtype} adds up"
            for m in measured
            if m.boundary.value in self.index.outputs and (miss := m.comparison.excess(self.plain)) > 0
        ]

    def _explain(
        self, wrong: Measured, measured: list[Measured], recording: Recording, inputs: Arrays, session: Session
    ) -> Fault:
        module = _responsible(wrong.boundary)
        by_value = {m.boundary.value: m for m in measured}
        before = self.index.behind(wrong.boundary.value, set(by_value))
        call, attributes = self._attention(wrong.boundary, recording)
        evidence = Evidence(
            fault=wrong,
            module=module,
            dtype=self.dtype,
            tolerance=self.tolerance,
            inputs=inputs,
            geometry=self.source.geometry,
            length=self.source.shapes.seq_len,
            call=call,
            attributes=attributes,
            weights=self._weights(module, recording),
            rerun=lambda other: self._measure_again(wrong.boundary.value, other, session),
        )
        rows = sorted((by_value[value] for value in before), key=lambda m: m.boundary.order)
        return Fault(module, _row(wrong), [_row(m) for m in rows], likely_cause(evidence))

    def _attention(self, boundary: Boundary, recording: Recording) -> tuple[Any, Mapping[str, Any]]:
        """The attention call whose query, key, value or output this is, and its node's attributes."""
        for (node, _), call in zip(self.index.attention, recording.attention, strict=False):
            if boundary.value in (*node.input[:3], node.output[0]):
                return call, {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        return None, {}

    def _measure_again(self, value: str, inputs: Arrays, session: Session) -> Measured:
        recording = record(self.source, inputs)
        boundary = next(b for b in find_boundaries(self.index, recording) if b.value == value)
        return measure(boundary, session.run(inputs)[value], self.tolerance)

    def _weights(self, module: str, recording: Recording) -> list[tuple[str, Floats, Floats]]:
        """The module's own tensors that the file holds, paired by shape where that leaves no doubt."""
        held = []
        for node, path in zip(self.index.nodes, self.index.modules, strict=True):
            if path == module:
                held += [self.index.initializers[name] for name in node.input if name in self.index.initializers]
        pairs = []
        for tensor in {tensor.name: tensor for tensor in held}.values():
            # Integers are shapes and indices, whatever their length.
            if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.data_type == onnx.TensorProto.INT64:
                continue
            in_file = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            fitting = [
                (name, own)
                for name, own in recording.parameters.get(module, {}).items()
                if in_file.shape in (own.shape, own.T.shape)
            ]
            if len(fitting) == 1:
                pairs.append((fitting[0][0], in_file, _alike(fitting[0][1], in_file)))
        return pairs


def _row(measured: Measured) -> BoundaryRow:
    boundary = measured.boundary
    return BoundaryRow(boundary.path, boundary.role, boundary.value, measured.passed, measured.comparison)


def _responsible(boundary: Boundary) -> str:
    """The module to blame: what is wrong before a module's input happened in the module around it."""
    return boundary.path.rpartition(".")[0] if boundary.role == "input" else boundary.path


def _alike(own: Floats, in_file: Floats) -> Floats:
    """A matrix the way round the file holds it; a square one may lie either way."""
    ways = [x for x in (own, own.T) if x.shape == in_file.shape]
    return min(ways, key=lambda x: float(np.abs(x - in_file).sum()))
