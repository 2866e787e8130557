"""One-node ONNX models of windowed attention, and inputs for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from localattn.core.nodes.attention import DOMAIN, DOMAIN_VERSION, SEQUENCE_FIRST, NodeAttributes, NodeVariant
from localattn.exporter.lowering.attention_function import attention_function
from localattn.exporter.lowering.function_properties import properties_of
from localattn.runtime.backends.onnxruntime.session import OnnxRuntimeSession, open_bytes

HEADS, HEAD_DIM = 2, 8
ELEMENT = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
NUMPY = {"fp32": np.float32, "fp16": np.float16, "bf16": np.float32}  # sessions take bf16 as float32

Feed = dict[str, NDArray[Any]]


def data_shape(attributes: NodeAttributes, batch: Any, length: Any) -> list[Any]:
    """Shape of query, key, value and output."""
    if attributes.perm == SEQUENCE_FIRST:
        return [batch, length, HEADS, HEAD_DIM]
    return [batch, HEADS, length, HEAD_DIM]


def one_node(
    variant: NodeVariant,
    attributes: NodeAttributes,
    length: int | str,
    batch: int | str = 2,
    *,
    dtype: str = "fp32",
    opset: int = 20,
) -> onnx.ModelProto:
    """A checked model of one node and its body; sizes given as text stay symbolic."""
    geometry = attributes.geometry
    shapes = {
        **dict.fromkeys(("query", "key", "value"), data_shape(attributes, batch, length)),
        "key_mask": [batch, length],
        "attn_bias": [HEADS, geometry.window_size, geometry.keys_per_window],
    }
    inputs = [
        ir.Value(
            name=name,
            shape=ir.Shape(shapes[name]),
            type=ir.TensorType(ir.DataType.BOOL if name == "key_mask" else ELEMENT[dtype]),
        )
        for name in variant.input_names
    ]
    node = ir.node(variant.op_type, inputs, attributes=attributes.as_onnx(), domain=DOMAIN)
    output = node.outputs[0]
    output.name, output.shape, output.type = "out", ir.Shape(shapes["query"]), ir.TensorType(ELEMENT[dtype])
    graph = ir.Graph(inputs, [output], nodes=[node], opset_imports={"": opset, DOMAIN: DOMAIN_VERSION}, name="one_node")
    sequences = batch * HEADS if isinstance(batch, int) else None
    properties = properties_of(variant, attributes.as_onnx(), length if isinstance(length, int) else None, sequences)
    body = attention_function(variant, opset, properties)
    model = ir.serde.serialize_model(ir.Model(graph, ir_version=10, functions=[body]))
    onnx.checker.check_model(model, full_check=True)
    return model


def feed_for(
    variant: NodeVariant,
    attributes: NodeAttributes,
    length: int,
    batch: int = 2,
    *,
    dtype: str = "fp32",
    seed: int = 0,
    keep: float = 0.6,
) -> Feed:
    """Random inputs of a node; `keep` is the share of keys the mask keeps."""
    rng = np.random.default_rng(seed)
    shape = data_shape(attributes, batch, length)
    feed = {name: rng.standard_normal(shape).astype(NUMPY[dtype]) for name in ("query", "key", "value")}
    if variant.has_mask:
        feed["key_mask"] = rng.random((batch, length)) < keep
    if variant.has_bias:
        geometry = attributes.geometry
        bias = rng.standard_normal((HEADS, geometry.window_size, geometry.keys_per_window))
        feed["attn_bias"] = bias.astype(NUMPY[dtype])
    return feed


def session(model: onnx.ModelProto) -> OnnxRuntimeSession:
    """The model in onnxruntime, on one CPU thread."""
    return open_bytes(model.SerializeToString(), "cpu", threads=1)


def run(model: onnx.ModelProto, feed: Feed) -> NDArray[Any]:
    """The model's one output."""
    return session(model).run(feed)["out"]
