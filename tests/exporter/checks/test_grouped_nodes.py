"""The checks of window and memory on the grouped nodes, and functions that they must refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from localattn.core.errors import UsageError
from localattn.core.geometry import ALL_KEYS, WindowGeometry
from localattn.core.nodes.attention import DOMAIN, geometry_of
from localattn.core.nodes.check import check_attributes
from localattn.core.nodes.grouped import GROUPED_VARIANTS, GroupedAttributes
from localattn.exporter.checks.layers import check_layer_memory, check_layer_windows
from localattn.exporter.checks.probe import probes
from localattn.exporter.checks.quadratic_memory import is_square
from localattn.exporter.lowering.function_parts import define
from localattn.exporter.lowering.grouped_function import grouped_function
from localattn.onnx_graph.summary import inspect_onnx
from localattn.onnx_graph.windows import windows_of_file

from ...support.models.grouped_model import GroupedCase

CAUSAL, OPEN = (WindowGeometry.all_keys(causal=causal) for causal in (True, False))
CASES = (
    GroupedCase(CAUSAL, 40, mask=True, softcap=30.0),
    GroupedCase(OPEN, 300, sinks=True),
    GroupedCase(WindowGeometry.reaching(7, 0), 60, sinks=True),
    GroupedCase(WindowGeometry.reaching(6, 4), 61, softcap=20.0, mask=True),
    GroupedCase(WindowGeometry(8, 0, 0, causal=True), 40),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.variant.op_type)


def memory(case: GroupedCase, model: onnx.ModelProto) -> str:
    return check_layer_memory(model, {case.length}, ["length"] if case.dynamic else [], lambda _: None).status


@each_case
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_window_and_memory_hold(case: GroupedCase, dynamic: bool) -> None:
    case = replace(case, dynamic=dynamic)
    model = case.model()
    found = check_layer_windows(model, [])
    window = "not proven" if case.geometry.sees_all else "passed"  # all keys: there is none to prove
    assert (found.status, memory(case, model)) == (window, "passed"), found.detail
    assert found.figures["boundaries"] > 0


def dense_function(case: GroupedCase) -> onnx.FunctionProto:
    """What other exporters write: the scores of all queries at once, and no window."""

    def body(op: Any, query: Any, key: Any, value: Any) -> Any:
        query, key, value = (op.Transpose(x, perm=case.perm) for x in (query, key, value))
        key, value = (op.Concat(x, x, axis=1) for x in (key, value))
        weights = op.Softmax(op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])))
        return op.Transpose(op.MatMul(weights, value), perm=case.perm)

    names = case.variant.input_names, case.variant.attribute_names
    return ir.serde.serialize_function(define(body, case.variant.op_type, *names, case.opset))


@pytest.mark.parametrize("geometry", [CAUSAL, OPEN, WindowGeometry.reaching(6, 4)], ids=lambda g: g.describe())
def test_a_dense_function_is_refused(geometry: WindowGeometry) -> None:
    for dynamic in (False, True):
        case = GroupedCase(geometry, 60, heads=2, kv_heads=1, dynamic=dynamic)
        model = case.model()
        model.functions[0].CopyFrom(dense_function(case))
        assert memory(case, model) == "failed"
        lost = check_layer_windows(model, [])
        assert lost.status == ("not proven" if geometry is OPEN else "failed")


def test_shapes_inside_a_scan_are_seen() -> None:
    case = GroupedCase(OPEN, 300)
    (probe,) = probes(case.model())
    shapes = probe.measured_shapes()
    scores = [shape for name, shape in shapes.items() if shape[-1:] == (300,) and len(shape) == 5]
    assert (1, 1, 2, 64, 300) in scores
    assert not any(is_square(shape, {300}) for shape in shapes.values())


def test_reports_call_it_all_keys(tmp_path: Any) -> None:
    for case, words in ((CASES[0], "causal, all keys"), (CASES[2], "window 7, 1 back")):
        path = tmp_path / "model.onnx"
        onnx.save(case.model(), str(path))
        (view,) = windows_of_file(inspect_onnx(path))
        assert words in view.describe() and view.examples()
        assert view.sequence < 100


@pytest.mark.parametrize("variant", GROUPED_VARIANTS, ids=lambda v: v.op_type)
def test_attributes_are_those_of_the_contract(variant: Any) -> None:
    geometry = CAUSAL if variant.sees_all else WindowGeometry.reaching(6, 4)
    attributes = GroupedAttributes(geometry, 0.5, 3.0 if variant.has_softcap else 0.0)
    stored = attributes.as_onnx()
    assert tuple(stored) == variant.attribute_names
    assert attributes.variant(has_mask=variant.has_mask, has_sinks=variant.has_sinks) == variant
    assert geometry_of(stored) == geometry
    check_attributes(DOMAIN, variant.op_type, stored)
    for name, value in stored.items():
        wrong = stored | {name: None if isinstance(value, str) else float("nan")}
        with pytest.raises(UsageError, match=f"Attribute {name} is"):
            check_attributes(DOMAIN, variant.op_type, wrong)
        missing = {key: x for key, x in stored.items() if key != name}
        with pytest.raises(UsageError, match=f"Attribute {name} is missing"):
            check_attributes(DOMAIN, variant.op_type, missing)
    if variant.has_softcap:
        with pytest.raises(UsageError, match="finite number above 0"):
            check_attributes(DOMAIN, variant.op_type, stored | {"softcap": 0.0})


def test_windows_of_two_reaches() -> None:
    assert WindowGeometry.reaching(6, 4) == WindowGeometry(2, 3, 2, exact_windowsize=True)
    assert WindowGeometry.reaching(511, 0) == WindowGeometry(511, 1, 0, causal=True, exact_windowsize=True)
    assert WindowGeometry.reaching(0, 3) == WindowGeometry(3, 0, 1, exact_windowsize=True)
    for back, ahead in ((0, 0), (7, 5), (3, 0), (0, 9), (12, 8)):
        seen = WindowGeometry.reaching(back, ahead)
        assert (seen.backward_reach, seen.forward_reach) == (back, ahead)
        visible = seen.visibility(range(30), range(30), 30)  # type: ignore[arg-type]
        assert all(visible[t, s] == (t - back <= s <= t + ahead) for t in range(30) for s in range(30))
    with pytest.raises(UsageError):
        WindowGeometry.reaching(-1, 2)
    assert CAUSAL.sees_all and CAUSAL.window_size == ALL_KEYS and not WindowGeometry(ALL_KEYS - 1).sees_all


def test_functions_do_not_differ_by_what_built_them() -> None:
    for variant in GROUPED_VARIANTS:
        function = grouped_function(variant, 20)
        assert not any(node.metadata_props for node in function.all_nodes())
        again = ir.serde.serialize_function(grouped_function(variant, 20))
        assert ir.serde.serialize_function(function).SerializeToString(deterministic=True) == again.SerializeToString(
            deterministic=True
        )
