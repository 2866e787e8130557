"""Run one attention node of a written file in a separate model with its ONNX function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray

from ...core.geometry import WindowGeometry
from ...core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE, NodeVariant, geometry_of
from ...core.nodes.grouped import GROUPED_BY_OP_TYPE, GroupedVariant
from ...core.tensors import TensorSpec
from ...runtime.backends.onnxruntime.session import open_bytes
from ...runtime.session import Session

_ELEMENT = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "bool": onnx.TensorProto.BOOL,
}


_VARIANTS: Mapping[str, NodeVariant | GroupedVariant] = {**VARIANT_BY_OP_TYPE, **GROUPED_BY_OP_TYPE}


@dataclass(frozen=True)
class NodeProbe:
    """An attention node, the ONNX function it calls, and the sizes it was exported with.

    Args:
        model: the file's model; its weights may be absent.
        node: one of its attention nodes.
        length: sequence length of the node's inputs, including its own padding; 0 if it is dynamic.
        head_dim: head size.
        dtype: "float32", "float16" or "bfloat16".
    """

    model: onnx.ModelProto
    node: onnx.NodeProto
    length: int
    head_dim: int
    dtype: str

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The node's attributes as Python values."""
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}

    @property
    def geometry(self) -> WindowGeometry:
        """The window that the node's attributes describe."""
        return geometry_of(self.attributes)

    @property
    def variant(self) -> NodeVariant | GroupedVariant:
        """The node's op type."""
        return _VARIANTS[self.node.op_type]

    @property
    def for_one_length(self) -> bool:
        """Whether the ONNX function computes the blocks in parts, which fit only the node's own length."""
        return any(node.op_type == "Split" for function in self._functions for node in function.node)

    @property
    def _functions(self) -> list[onnx.FunctionProto]:
        return [x for x in self.model.functions if (x.domain, x.name) == (DOMAIN, self.node.op_type)]

    def inputs(self, head_dim: int | None = None) -> list[TensorSpec]:
        """List the node's inputs for a batch of one and one head; a grouped node has two for its queries."""
        perm, geometry = self.attributes["perm"], self.geometry
        grouped = isinstance(self.variant, GroupedVariant)
        shapes: dict[str, tuple[str, tuple[int | str, ...]]] = {}
        for name, number in (("query", 2 if grouped else 1), ("key", 1), ("value", 1)):
            sizes = (1, number, self.length, head_dim or self.head_dim)
            shapes[name] = (self.dtype, tuple(sizes[axis] for axis in perm))  # the permutation is its own inverse
        if self.variant.has_mask:
            shapes["key_mask"] = ("bool", (1, self.length))
        if self.variant.has_bias:
            shapes["attn_bias"] = (self.dtype, (1, geometry.window_size, geometry.keys_per_window))
        if isinstance(self.variant, GroupedVariant) and self.variant.has_sinks:
            shapes["sinks"] = (self.dtype, (2,))
        return [TensorSpec(name, dtype, shape) for name, (dtype, shape) in shapes.items()]

    def proto(self, inputs: Sequence[TensorSpec]) -> onnx.ModelProto:
        """Build a model of this node alone."""
        node = onnx.NodeProto()
        node.CopyFrom(self.node)
        del node.input[:], node.output[:]
        node.input.extend(spec.name for spec in inputs)
        node.output.append("out")
        values = [onnx.helper.make_tensor_value_info(x.name, _ELEMENT[x.dtype], x.shape) for x in inputs]
        out = onnx.helper.make_tensor_value_info("out", _ELEMENT[self.dtype], inputs[0].shape)
        graph = onnx.helper.make_graph([node], "probe", values, [out])
        return onnx.helper.make_model(
            graph, opset_imports=self.model.opset_import, functions=self._functions, ir_version=self.model.ir_version
        )

    def session(self, inputs: Sequence[TensorSpec]) -> Session:
        """Open the node alone in onnxruntime."""
        return open_bytes(self.proto(inputs).SerializeToString(), provider="cpu")

    def measured_shapes(self, lengths: Collection[int] = ()) -> dict[str, tuple[int, ...]]:
        """Run the node, and return the shape of every tensor inside its ONNX function by name.

        Of a tensor inside a Scan it is the shape in one round. It runs with one head whose size differs from the node's
        length and from `lengths`, so that no dimension equals a length by chance.
        """
        head_dim = next(size for size in count(8, 2) if size not in (self.length, *lengths))
        inputs = self.inputs(head_dim=head_dim)
        inlined = onnx.inliner.inline_local_functions(self.proto(inputs))
        known = {value.name for value in inlined.graph.output}
        rounds = _show_rounds(inlined.graph)
        for node in inlined.graph.node:
            if node.op_type != "Constant":
                extra = [name for name in node.output if name and name not in known]
                inlined.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in extra)
        session = open_bytes(inlined.SerializeToString(), provider="cpu")
        # The session's own element types, because its bf16 inputs are float32.
        arrays = {x.name: np.ones([int(size) for size in x.shape], dtype=x.dtype) for x in session.inputs}
        outputs: dict[str, NDArray[Any]] = session.run(arrays)
        return {name: value.shape[1:] if name in rounds else value.shape for name, value in outputs.items()}


def _show_rounds(graph: onnx.GraphProto) -> set[str]:
    """Make every tensor of a Scan's subgraph an output of the Scan, stacked over its rounds; return their names."""
    shown: set[str] = set()
    for node in graph.node:
        for body in (a.g for a in node.attribute if node.op_type == "Scan" and a.name == "body"):
            known = {value.name for value in body.output}
            inner = [name for x in body.node if x.op_type != "Constant" for name in x.output if name not in known]
            body.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in inner)
            node.output.extend(f"{node.name}/{name}" for name in inner)
            shown |= set(node.output)
    return shown


def probes(model: onnx.ModelProto) -> list[NodeProbe]:
    """Return one probe for each different attention node of a model.

    Raises:
        ValueError: the file does not record the shape of a node's query.
    """
    found: dict[str, NodeProbe] = {}
    values = {v.name: v for v in (*model.graph.value_info, *model.graph.input)}
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in _VARIANTS:
            continue
        query = values.get(node.input[0])
        if query is None:
            raise ValueError(f"no shape is recorded for {node.input[0]}")
        sizes = [dim.dim_value for dim in query.type.tensor_type.shape.dim]
        perm = next(a.ints for a in node.attribute if a.name == "perm")
        dtype = next(name for name, element in _ELEMENT.items() if element == query.type.tensor_type.elem_type)
        probe = NodeProbe(model, node, length=sizes[perm[2]], head_dim=sizes[perm[3]], dtype=dtype)
        key = repr((node.op_type, sorted(probe.attributes.items()), probe.length, probe.head_dim))
        found.setdefault(key, probe)
    return list(found.values())
