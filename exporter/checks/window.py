"""Check the window: a key just inside a query's window changes its output; a key outside does not.

The most common silent fault of other exporters is a lost window: validated at a length that fits in one window, a file
that attends to everything looks right. Here every different attention node of the written file is run alone, and then
the whole model is checked with its receptive field.

Changing everything outside a query's window must leave its output equal bit for bit. Changing a key inside must change
it. Through many layers the edge of the receptive field may have less influence than fp32 resolves; then the nearest
position that has some is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from ...core.documents.sidecar import CheckRecord
from ...core.machine.resident_memory import release_memory
from ...core.tensors import INTEGER_MASKS
from ...runtime.inputs.arrays import random_inputs
from ...runtime.session import Session
from ..source.source_model import SourceModel
from .outcome import failed, not_proven, passed, skipped
from .probe import NodeProbe, probes

Arrays = dict[str, NDArray[Any]]
# Sequence length above which the whole model is checked by changing one window of tokens.
LONG = 2048


@dataclass
class Findings:
    """Collect what the probes found.

    Args:
        boundaries: number of boundaries that were tried.
        faults: a sentence for each that does not hold.
        back: whether a query was tried that does not see the first token.
        ahead: whether a query was tried that does not see the last token.
    """

    boundaries: int = 0
    faults: list[str] = field(default_factory=list)
    back: bool = False
    ahead: bool = False

    def expect(self, condition: bool, fault: str) -> None:
        """Count one boundary, and record the fault if the condition does not hold."""
        self.boundaries += 1
        if not condition:
            self.faults.append(fault)


def check_window(
    model: onnx.ModelProto,
    session: Session,
    source: SourceModel,
    dtype: str,
    first_run: Mapping[str, Arrays] | None = None,
    *,
    nodes_only: bool = False,
) -> CheckRecord:
    """Check the window of every different node of a file, and of the file as a whole.

    Args:
        model: the written file, weights may be absent.
        session: the written file in onnxruntime.
        source: the model it was exported from.
        dtype: "fp32" or "fp16".
        first_run: "inputs" and "outputs" of an earlier run of the session, used if the inputs are the same as here.
        nodes_only: check the attention nodes only: in dynamic int8 the scales depend on every token.
    """
    findings = Findings()
    different = probes(model)
    for probe in different:
        check_node_window(probe, findings)
    # A run on a long sequence takes seconds, so there are only two runs.
    whole = check_model_window if source.shapes.seq_len > LONG and source.geometry is not None else _check_model
    if nodes_only:
        through = "the whole model was not tested: in dynamic int8 the scales depend on every token"
    elif source.token_limit == 1:
        through = "the whole model was not tested: with a vocabulary of one token no input can be changed"
    else:
        through = whole(session, source, findings, first_run or {})
    figures: dict[str, float | int | str] = {"boundaries": findings.boundaries, "nodes": len(different)}
    if findings.faults:
        return failed("; ".join(findings.faults[:3]), **figures)
    if source.geometry is None:
        detail = f"the layers have no window: every key has weight; {through}"
        return passed(detail, **figures) if findings.boundaries else skipped(detail)
    if not different and nodes_only:
        return not_proven("the file has no windowed attention, so there was no window to check", **figures)
    if source.geometry.sees_all:
        return not_proven(f"no layer has a window; {edges_hold(findings.boundaries, len(different))}", **figures)
    if not (findings.back and findings.ahead):
        reach = max(source.geometry.backward_reach, source.geometry.forward_reach) + source.geometry.window_size
        why = f"a sequence of {source.shapes.seq_len} fits in one window, so its edges could not be tested"
        return not_proven(f"{why}; export with {reach + 1} or more tokens to test them", **figures)
    return passed(f"{edges_hold(findings.boundaries, len(different))}; {through}", **figures)


def edges_hold(boundaries: int, nodes: int) -> str:
    """Say that all tested window edges are correct.

    Args:
        boundaries: how many were tried.
        nodes: in how many different attention nodes, and in the whole model.
    """
    return f"{boundaries} window edges tested, all correct ({nodes} distinct attention node{'s' * (nodes != 1)})"


def _queries(length: int, window: int) -> list[int]:
    """Return query positions at the edges and in the middle of windows, including the first and the last."""
    middle = length // 2 // window * window
    wanted = {0, window - 1, window, middle - 1, middle, middle + window // 2, length - 1}
    return sorted(t for t in wanted if 0 <= t < length)


def check_node_window(probe: NodeProbe, findings: Findings) -> None:
    """Check one node's window by changing keys and values inside and outside the windows of some queries."""
    geometry, length = probe.geometry, probe.length
    session = probe.session(probe.inputs())
    inputs = _window_inputs(session, None)
    # Scores of about 1, whatever the scale, because a saturated softmax would hide the influence of keys.
    spread = max(1.0, abs(probe.attributes["scale"]) * probe.head_dim**0.5)
    inputs["query"] = (inputs["query"] / spread).astype(inputs["query"].dtype)
    rows = list(probe.attributes["perm"])[2]
    baseline = session.run(inputs)["out"]
    generator = np.random.default_rng(1)

    def changes(query: int, keys: NDArray[np.int64]) -> bool:
        perturbed = dict(inputs)
        for name in ("key", "value"):
            array = np.moveaxis(inputs[name].copy(), rows, 0)
            array[keys] += (4 * generator.standard_normal(array[keys].shape)).astype(array.dtype)
            perturbed[name] = np.ascontiguousarray(np.moveaxis(array, 0, rows))
        out = session.run(perturbed)["out"]
        return not np.array_equal(np.take(out, query, rows), np.take(baseline, query, rows))

    position = np.arange(length)
    for query in _queries(length, geometry.window_size):
        first, end = (int(x[0]) for x in geometry.visible_interval(np.array([query]), length))
        findings.back |= first > 0
        findings.ahead |= end < length
        outside = position[(position < first) | (position >= end)]
        if len(outside):
            findings.expect(
                not changes(query, outside), f"{probe.node.name}: query {query} sees outside [{first}, {end})"
            )
        for key in {first, end - 1}:
            if probe.attributes.get("shared_qk") and key == query:
                continue  # a token's own weight is close to 0 by design
            findings.expect(changes(query, np.array([key])), f"{probe.node.name}: query {query} does not see key {key}")


def _check_model(session: Session, source: SourceModel, findings: Findings, first_run: Mapping[str, Arrays]) -> str:
    """Check the receptive field of two queries through the whole model, and return a sentence for the report."""
    length, depth, axis = source.shapes.seq_len, source.depth, source.family.sequence_axis
    whole = _WholeModel(session, source, first_run)
    sentence = f"the model's {depth} layer(s) together see all {length} positions"
    for query in (length // 2, length - 1):
        first, end = (int(x[0]) for x in source.receptive_intervals(np.array([query])))
        position = np.arange(length)
        outside = position[(position < first) | (position >= end)]
        if not len(outside):
            continue

        def difference(keys: NDArray[np.int64], query: int = query) -> float:
            return float(np.abs(np.take(whole.changed(keys), query, axis) - np.take(whole.output, query, axis)).max())

        leak = difference(outside)
        findings.expect(leak == 0, f"the model: query {query} changes by {leak:.1e} from outside [{first}, {end})")
        if first == 0:
            sentence = f"through {depth} layer(s) query {query} depends on nothing from token {end} on"
            continue
        seen = first
        while seen < query and difference(np.array([seen])) == 0:
            seen += max(1, (query - seen) // 4)
        findings.expect(seen < query or first == query, f"the model: query {query} sees no earlier token")
        tokens = f"tokens {seen}–{query} and on nothing earlier"
        if seen != first:  # the edge of the receptive field has less influence than fp32 resolves
            tokens = f"tokens {seen}–{query}, and on nothing before {first}"
        sentence = f"through {depth} layer(s) query {query} depends on {tokens}"
    return sentence


class _WholeModel:
    """Compute the first output of a file, also with other tokens or vectors at some positions.

    Args:
        session: the written file.
        source: the model it was exported from.
        first_run: "inputs" and "outputs" of an earlier run, used if the inputs are the same as here.

    Attributes:
        output: the output on the unchanged inputs.
    """

    def __init__(self, session: Session, source: SourceModel, first_run: Mapping[str, Arrays]) -> None:
        self._session, self._source = session, source
        self._inputs = inputs = _window_inputs(session, source.token_limit)
        known = first_run.get("inputs", {})
        same = known.keys() == inputs.keys() and all(np.array_equal(known[name], x) for name, x in inputs.items())
        outputs = first_run["outputs"] if same else session.run(inputs)
        self.output = outputs[source.outputs[0]]

    def changed(self, keys: NDArray[np.int64]) -> NDArray[Any]:
        """Run the file with other tokens or vectors at the positions `keys`, and return its first output."""
        generator = np.random.default_rng(2)
        family, limit = self._source.family, self._source.token_limit
        inputs = dict(self._inputs)
        for name in (name for name in inputs if name in family.tokens):
            array = inputs[name].copy()
            if array.dtype.kind == "i":
                assert limit is not None
                shift = generator.integers(1, limit, (array.shape[0], len(keys)))
                array[:, keys] = (array[:, keys] + shift) % limit
            else:
                along = np.moveaxis(array, family.sequence_axis, 0)  # a view of the copy
                along[keys] += (4 * generator.standard_normal((len(keys), *along.shape[1:]))).astype(array.dtype)
            inputs[name] = array
        return self._session.run(inputs)[self._source.outputs[0]]


def check_model_window(
    session: Session, source: SourceModel, findings: Findings, first_run: Mapping[str, Arrays]
) -> str:
    """Check the whole model by changing one window of tokens and comparing every output.

    In a sequence shorter than two windows, half is changed. Outputs before and behind whose receptive field has none of
    the changed tokens must stay equal bit for bit; the output at the last changed token must change.
    """
    length, depth, axis = source.shapes.seq_len, source.depth, source.family.sequence_axis
    size = min(source.window_size, length // 2)
    low, high = source.receptive_intervals(np.arange(length))
    # Starting in the middle of a window, so that some queries of the same window come before the change.
    starts = np.arange(size // 2, length - size + 1, size)
    before, behind = np.searchsorted(high, starts, "right"), length - np.searchsorted(low, starts + size)
    start = int(starts[np.lexsort((before + behind, np.minimum(before, behind)))[-1]])
    end = start + size
    keys = np.arange(start, end)
    release_memory()  # memory that the runs of single nodes left
    whole = _WholeModel(session, source, first_run)
    rows = np.moveaxis(whole.changed(keys) != whole.output, axis, 0).reshape(length, -1).any(axis=1)
    touched = (low < end) & (high > start)
    for side, name in ((slice(0, start), "before"), (slice(end, length), "behind")):
        if not touched[side].all():
            wrong = np.flatnonzero(rows[side] & ~touched[side]) + side.start
            findings.expect(
                not len(wrong),
                f"the model: query {wrong[:1]} {name} [{start}, {end}) sees tokens it must not",
            )
    findings.expect(bool(rows[keys[-1]]), f"the model: query {keys[-1]} does not see itself and earlier tokens")
    reached = np.flatnonzero(rows)
    may = f"only {np.argmax(touched)}–{np.flatnonzero(touched)[-1]} may change"
    changed = f"changing tokens {start}–{end - 1} changed queries {reached[0]}–{reached[-1]}"
    return f"through {depth} layer(s) {changed}; {may}"


def _window_inputs(session: Session, token_limit: int | None) -> Arrays:
    """Draw random inputs with masks that keep every key."""
    inputs = random_inputs(session.inputs, seed=0, token_limit=token_limit)
    keeps = {name for name, x in inputs.items() if x.dtype == np.bool_ or name in INTEGER_MASKS}
    return {name: np.ones_like(x) if name in keeps else x for name, x in inputs.items()}
