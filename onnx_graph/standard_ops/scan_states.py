"""Pass: turn outer values that a Scan reads into its states, for engines that count them as states.

The subgraph of a Scan may read values of the graph around it (ONNX, operator Scan). OpenVINO 2026.4 counts each such
value that is computed at run time as a state without a result, and refuses the file: "num_scan_outputs can't be
negative". As a state that every round returns unchanged, the value means the same. Constants may stay outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..graph_values import rename_reads
from ..judgement import graphs_of


def apply(model: Any) -> Any:
    """Return the model with states in place of outer values, or the model itself if no Scan reads one.

    Args:
        model: an `onnx.ModelProto` without functions; its weights may be in other files.
    """
    import onnx

    constant = {tensor.name for tensor in model.graph.initializer}
    constant |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    computed = [[name for name in _captured(node) if name not in constant] for node in model.graph.node]
    if not any(computed):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node, names in zip(copy.graph.node, computed, strict=True):
        for name in names:
            _add_state(node, name)
    return copy


def _captured(node: Any) -> list[str]:
    """List the values that the subgraph of a Scan reads from outside, once each; none for another node."""
    if node.op_type != "Scan" or node.domain not in ("", "ai.onnx"):
        return []
    return list(dict.fromkeys(_read_from_outside(_body(node))))


def _body(node: Any) -> Any:
    return next(attribute.g for attribute in node.attribute if attribute.name == "body")


def _read_from_outside(graph: Any) -> Iterator[str]:
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        for name in (*node.input, *(name for inner in graphs_of(node) for name in _read_from_outside(inner))):
            if name and name not in own:
                yield name
        own |= set(node.output)
    for value in graph.output:
        if value.name not in own:
            yield value.name


def _add_state(node: Any, name: str) -> None:
    """Make one outer value the last state of a Scan, in place; type inference sets its type, as ONNX allows."""
    import onnx

    body, scanned = _body(node), next(a.i for a in node.attribute if a.name == "num_scan_inputs")
    states = len(node.input) - scanned
    # The names of the node's outputs are unique, so these are too.
    inner, kept, last = (f"{node.output[0]}/{name}/{part}" for part in ("state", "kept", "last"))
    rename_reads(body, {name: inner})
    body.node.append(onnx.helper.make_node("Identity", [inner], [kept], name=f"{node.name}/{name}/keep"))
    node.input.insert(states, name)
    node.output.insert(states, last)
    body.input.insert(states, onnx.ValueInfoProto(name=inner))
    body.output.insert(states, onnx.ValueInfoProto(name=kept))
