"""One-node ONNX models of grouped attention, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import DOMAIN, DOMAIN_VERSION, HEADS_FIRST, SEQUENCE_FIRST
from localattn.core.nodes.grouped import GroupedAttributes, GroupedVariant, choose_grouped_block
from localattn.exporter.lowering.grouped_function import build_grouped

from .. import reference
from .node_model import ELEMENT, NUMPY, Feed


@dataclass(frozen=True)
class GroupedCase:
    """A node and the sizes of its inputs; sizes given as text stay symbolic in the model."""

    geometry: WindowGeometry
    length: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    batch: int = 2
    mask: bool = False
    softcap: float = 0.0
    sinks: bool = False
    perm: tuple[int, ...] = SEQUENCE_FIRST
    dtype: str = "fp32"
    block: int = 0  # of queries, 0 for that which an export chooses
    opset: int = 20
    dynamic: bool = False
    scale: float = 0.35
    seed: int = 0

    @property
    def attributes(self) -> GroupedAttributes:
        block = self.block or choose_grouped_block(self.geometry, None if self.dynamic else self.length)
        return GroupedAttributes(self.geometry, self.scale, self.softcap, self.perm, block)

    @property
    def variant(self) -> GroupedVariant:
        return self.attributes.variant(has_mask=self.mask, has_sinks=self.sinks)

    def shape(self, heads: int) -> tuple[int, ...]:
        sizes = (self.batch, heads, self.length, self.head_dim)
        return tuple(sizes[axis] for axis in self.perm)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        keys = self.shape(self.kv_heads)
        known = {"query": self.shape(self.heads), "key": keys, "value": keys}
        known |= {"key_mask": (self.batch, self.length), "sinks": (self.heads,)}
        return {name: known[name] for name in self.variant.input_names}

    def feed(self, keep: float = 0.6) -> Feed:
        """Random inputs; `keep` is the share of keys that the mask keeps."""
        rng = np.random.default_rng(self.seed)
        shapes = self.shapes()
        feed = {name: rng.standard_normal(shape).astype(NUMPY[self.dtype]) for name, shape in shapes.items()}
        if self.softcap:
            feed["query"] *= 4  # scores that the cap changes
        if self.mask:
            feed["key_mask"] = rng.random(shapes["key_mask"]) < keep
        return feed

    def expected(self, feed: Feed) -> NDArray[np.float64]:
        return reference.grouped_attention(self.geometry, self.scale, self.softcap, self.perm, **feed)

    def at(self, length: int, batch: int = 2) -> GroupedCase:
        return replace(self, length=length, batch=batch)

    def symbolic(self, shape: tuple[int, ...], name: str) -> list[Any]:
        """The shape with its batch and length as names."""
        if name == "sinks" or not self.dynamic:
            return list(shape)
        length = 1 if name == "key_mask" else list(self.perm).index(2)
        return [{0: "batch", length: "length"}.get(axis, size) for axis, size in enumerate(shape)]

    def model(self, *, body: bool = True) -> onnx.ModelProto:
        """A checked model of the node and its function."""
        inputs = [
            ir.Value(
                name=name,
                shape=ir.Shape(self.symbolic(shape, name)),
                type=ir.TensorType(ir.DataType.BOOL if name == "key_mask" else ELEMENT[self.dtype]),
            )
            for name, shape in self.shapes().items()
        ]
        node = ir.node(self.variant.op_type, inputs, attributes=self.attributes.as_onnx(), domain=DOMAIN)
        (output,) = node.outputs
        output.name, output.type = "out", inputs[0].type
        output.shape = ir.Shape(self.symbolic(self.shape(self.heads), "query"))
        opsets = {"": self.opset, DOMAIN: DOMAIN_VERSION}
        graph = ir.Graph(inputs, [output], nodes=[node], opset_imports=opsets, name="one_node")
        functions = [build_grouped(self.variant.op_type, self.opset, [node])] if body else []
        model = ir.serde.serialize_model(ir.Model(graph, ir_version=10, functions=functions))
        if body:
            onnx.checker.check_model(model, full_check=True)
        return model


LAYOUTS = (SEQUENCE_FIRST, HEADS_FIRST)
