"""Faults planted in exported files: each is a change that no reader of the file sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper


def alter(model: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """A file that was changed after its export, with its sidecar as it was."""
    proto = onnx.load(model)
    change(proto)
    onnx.save(proto, model)
    return model


def one_weight(proto: onnx.ModelProto) -> None:
    tensor = max(proto.graph.initializer, key=lambda x: len(x.raw_data))
    values = numpy_helper.to_array(tensor).copy()
    values[0, 0] += 1
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def attention_nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    found = [node for node in proto.graph.node if node.domain == "localattn"]
    assert found
    return found


def wider_window(proto: onnx.ModelProto) -> None:
    for node in attention_nodes(proto):
        (attribute,) = (x for x in node.attribute if x.name == "look_backward")
        attribute.i += 1


def mask_ignored(proto: onnx.ModelProto) -> None:
    nodes = [helper.make_node("Not", ["mask"], ["hidden"]), helper.make_node("Or", ["mask", "hidden"], ["all"])]
    for node in proto.graph.node:
        node.input[:] = ["all" if name == "mask" else name for name in node.input]
    for node in reversed(nodes):
        proto.graph.node.insert(0, node)


def not_a_number(proto: onnx.ModelProto) -> None:
    tensor = max(proto.graph.initializer, key=lambda x: len(x.raw_data))
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32("nan"), tensor.name))


def renamed_output(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.output[:] = ["scores" if name == "logits" else name for name in node.output]
    proto.graph.output[0].name = "scores"


def second_output(proto: onnx.ModelProto) -> None:
    logits = proto.graph.output[0]
    proto.graph.node.append(helper.make_node("Neg", ["logits"], ["negated"]))
    more = proto.graph.output.add()
    more.CopyFrom(logits)
    more.name = "negated"


def longest_only(proto: onnx.ModelProto) -> None:
    shape = helper.make_node("Shape", ["tokens"], ["sizes"], start=1, end=2)
    full = helper.make_node("Equal", ["sizes", "longest"], ["is_full"])
    factor = helper.make_node("Where", ["is_full", "one", "two"], ["factor"])
    for node in proto.graph.node:
        node.output[:] = ["before" if name == "logits" else name for name in node.output]
    last = helper.make_node("Mul", ["before", "factor"], ["logits"])
    for name, value in (("longest", np.array([64])), ("one", np.float32([1])), ("two", np.float32([2]))):
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    proto.graph.node.extend([shape, full, factor, last])


def forgetful(proto: onnx.ModelProto) -> None:
    lost = next(x.name for x in proto.graph.output if x.name == "next_key_cache.0")
    for node in proto.graph.node:
        node.output[:] = ["lost" if name == lost else name for name in node.output]
    proto.graph.node.append(helper.make_node("Identity", ["key_cache.0"], [lost]))
