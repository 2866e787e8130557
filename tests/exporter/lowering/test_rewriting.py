"""Patterns that end in several nodes look at their first node first, and find the same."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from localattn.exporter.lowering.rewriting import first_nodes_tried_first

rewriter = pytest.importorskip("onnxscript.rewriter")
matcher = pytest.importorskip("onnxscript.rewriter._matcher")


def _halves() -> ir.Model:
    """Both halves of the last axis, sliced as a rotary embedding does, behind nodes that no pattern takes."""
    kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([2, 8])
    x = ir.Value(name="x", type=kind, shape=shape)
    nodes = [ir.node("Tanh", [x])]
    nodes.append(ir.node("Tanh", [nodes[0].outputs[0]]))
    for node in nodes:
        node.outputs[0].type, node.outputs[0].shape = kind, shape
    given = {name: ir.tensor([value], name=name) for name, value in {"0": 0, "4": 4, "8": 8, "last": 1}.items()}
    values = {name: ir.Value(name=name, const_value=tensor) for name, tensor in given.items()}
    for value in values.values():
        value.type, value.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
    for start, end in (("0", "4"), ("4", "8")):
        nodes.append(ir.node("Slice", [nodes[1].outputs[0], values[start], values[end], values["last"]]))
    nodes += [ir.node("Tanh", [node.outputs[0]]) for node in nodes[2:]]
    for node in nodes[2:]:
        node.outputs[0].type, node.outputs[0].shape = kind, ir.Shape([2, 4])
    outputs = [node.outputs[0] for node in nodes[-2:]]
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=values.values(), opset_imports={"": 20}, name="halves")
    return ir.Model(graph, ir_version=9)


def _matched(model: ir.Model) -> list[list[str]]:
    """Return, for each default rule and node, the nodes that the rule's pattern finds there."""
    rules = rewriter._DEFAULT_REWRITE_RULES
    pairs = [(rule._matcher, node) for rule in rules for node in model.graph]
    found = (pattern.match(model, model.graph, node) for pattern, node in pairs)
    return [[str(node.op_type) for node in match.nodes] if match else [] for match in found]


def test_patterns_find_the_same() -> None:
    own, model = vars(matcher.SimplePatternMatcher)["match"], _halves()
    expected = _matched(model)
    with first_nodes_tried_first():
        found = _matched(model)
    assert any(nodes.count("Slice") for nodes in expected), "no pattern was found: nothing was compared"
    assert found == expected
    assert vars(matcher.SimplePatternMatcher)["match"] is own


def test_a_pattern_does_not_list_the_graph_for_other_nodes() -> None:
    model, listed = _halves(), 0

    class Counted(ir.Graph):
        def __iter__(self):  # type: ignore[no-untyped-def]
            nonlocal listed
            listed += 1
            return super().__iter__()

    rule = next(x for x in rewriter._DEFAULT_REWRITE_RULES if not x._matcher.pattern.has_single_output_node)
    model.graph.__class__ = Counted
    with first_nodes_tried_first():
        rule.try_rewrite(model, model.graph, model.graph[0])
    assert listed == 0
    rule.try_rewrite(model, model.graph, model.graph[0])
    assert listed > 0
