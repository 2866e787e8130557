"""Pass: compute a model of fp32 in fp16 or bf16 where rounding costs little, as mixed precision does in training.

Each operator on real numbers is one of three kinds:

- products (`MatMul`, `Gemm`, `Conv`) and the attention nodes read and return the narrow type, and their matrices are
  stored in it. Engines sum them in fp32.
- operators that move numbers or compute one from one compute in the narrow type where all that they read comes from
  products, in fp32 elsewhere. So a residual stream stays in fp32.
- all others, such as norms, softmax, sums and powers, compute in fp32: there half precision would cost most of the
  accuracy. Recurrent layers are among them; their matrices are stored in the narrow type.

Tables that tokens look up are stored in the narrow type, and what is looked up counts as fp32. Constants that do not
fit the narrow type, as the -1e30 of a mask, keep the operator that reads them in fp32.

The rule is that of `torch.autocast` (pytorch.org/docs/stable/amp.html), with residual streams kept in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import weights_beyond
from ...core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE
from ...core.nodes.fused import FUSED_DOMAIN, GATES, ROTATIONS
from ...core.nodes.grouped import GROUPED_BY_OP_TYPE
from ...core.nodes.step import STEP_VARIANT_BY_OP_TYPE
from .half_to_fp32 import EXACT

_PRODUCTS = frozenset(("Attention", "Conv", "ConvTranspose", "Gemm", "MatMul"))
# Nodes whose functions compute in fp32 from any type.
_NODES = VARIANT_BY_OP_TYPE.keys() | GROUPED_BY_OP_TYPE.keys() | STEP_VARIANT_BY_OP_TYPE.keys()
# Operators that compute one number from one or two, besides those that only move numbers.
_FOLLOWING = EXACT | {
    *("Add", "Clip", "Div", "Dropout", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Mul"),
    *("PRelu", "Selu", "Sigmoid", "Softsign", "Sub", "Swish", "Tanh", "ThresholdedRelu"),
}
_RECURRENT = frozenset(("GRU", "LSTM", "RNN"))
_FUSED = frozenset((*ROTATIONS, *GATES))


def apply(model: Any, dtype: str) -> Any:
    """Return the `onnx_ir.Model` in half precision; the given model is changed.

    Inputs and outputs of an fp16 file are fp16; those of a bf16 file stay fp32, because numpy has no bf16. The types of
    all values must be known. Names of inputs, outputs and nodes stay.

    Args:
        model: computes in fp32, with or without ONNX functions.
        dtype: "fp16" or "bf16".

    Raises:
        UsageError: a weight is beyond the largest number of the type; the error names it.
    """
    _Narrowing(model.graph, dtype).run()
    return model


class _Narrowing:
    """One pass over a graph, in place.

    Args:
        graph: the graph of the model.
        dtype: "fp16" or "bf16".
    """

    def __init__(self, graph: Any, dtype: str) -> None:
        import onnx_ir as ir

        self._graph, self._dtype = graph, dtype
        self._fp32 = ir.DataType.FLOAT
        self._type = ir.DataType.FLOAT16 if dtype == "fp16" else ir.DataType.BFLOAT16
        self._numpy = self._type.numpy()
        self._inputs_narrow = dtype == "fp16"
        self._taken = {name for node in graph.all_nodes() for x in node.outputs if (name := x.name)}
        self._taken |= {*graph.initializers, *(x.name for x in graph.inputs)}
        # Values that are of the narrow type now, and those of them that count as fp32 in operators that follow.
        self._narrow: set[Any] = set()
        self._counts_as_fp32: set[Any] = set()
        # What is only moved out of tables.
        self._follows: set[Any] = set()
        # The other version of a value, of either type.
        self._others: dict[Any, Any] = {}

    def run(self) -> None:
        """Convert the graph."""
        if self._inputs_narrow:
            for value in self._graph.inputs:
                if value.dtype == self._fp32 and value.name not in self._graph.initializers:
                    self._set_narrow(value)
                    self._counts_as_fp32.add(value)
        for node in list(self._graph):
            self._convert(node)
        self._convert_outputs()
        for name in [name for name, value in self._graph.initializers.items() if value in self._others]:
            value = self._graph.initializers[name]
            if not value.uses() and not value.is_graph_output() and value not in self._graph.inputs:
                self._graph.initializers.pop(name)

    def _convert(self, node: Any) -> None:
        inner = [graph for attribute in node.attributes.values() for graph in _graphs(attribute)]
        for graph in inner:
            self._widen_captured(graph)
        read = [(place, x) for place, x in enumerate(node.inputs) if x is not None and self._is_real(x)]
        made = [x for x in node.outputs if x.dtype == self._fp32]
        if not read or inner:
            self._read_wide(node, read)
        elif self._is_narrow(node, read):
            for place, x in read:
                node.replace_input_with(place, self._narrow_of(x))
            for x in made:
                self._set_narrow(x)
        elif self._moves_constants(node, read):
            for place, x in read:
                node.replace_input_with(place, self._narrow_of(x))
            for x in made:
                self._set_narrow(x)
                self._follows.add(x)
        else:
            if node.op_type in _RECURRENT and not node.domain:
                self._store_matrices(read)
            self._read_wide(node, read)

    def _is_real(self, value: Any) -> bool:
        """Return whether a value is fp32, or was."""
        return value.dtype == self._fp32 or value in self._narrow

    def _is_narrow(self, node: Any, read: Sequence[tuple[int, Any]]) -> bool:
        """Return whether a node computes in the narrow type."""
        if (not node.domain and node.op_type in _PRODUCTS) or (node.domain == DOMAIN and node.op_type in _NODES):
            return True
        fused = node.domain == FUSED_DOMAIN and node.op_type in _FUSED  # its tables follow what it rotates
        if not fused and not (not node.domain and node.op_type in _FOLLOWING):
            return False
        others = [x for _, x in read if self._constant(x) is None and not (fused and x in self._follows)]
        as_fp32 = (self._counts_as_fp32, self._follows)
        narrow = bool(others) and all(x in self._narrow and not any(x in kept for kept in as_fp32) for x in others)
        return narrow and all(self._fits(x) for _, x in read if self._constant(x) is not None)

    def _moves_constants(self, node: Any, read: Sequence[tuple[int, Any]]) -> bool:
        """Return whether a node looks rows up in a table, or otherwise only moves constants."""
        if node.domain or node.op_type not in EXACT:
            return False
        return all(x in self._follows or (self._is_table(x) and self._fits(x)) for _, x in read)

    def _is_table(self, value: Any) -> bool:
        constant = self._constant(value)
        return constant is not None and len(constant.shape) > 1 and constant.size > 1

    def _constant(self, value: Any) -> Any:
        """Return the constant that a value is; None for one that is computed."""
        producer = value.producer()
        if producer is not None and producer.op_type == "Constant" and "value" in producer.attributes:
            return producer.attributes["value"].as_tensor()
        return value.const_value if value.is_initializer() else None

    def _fits(self, value: Any) -> bool:
        """Return whether a constant keeps its size in the narrow type: none becomes infinite, no single one zero."""
        numbers = self._constant(value).numpy()
        with np.errstate(over="ignore"):
            rounded = numbers.astype(self._numpy).astype(np.float32)
        whole = np.isfinite(rounded) | ~np.isfinite(numbers)
        return bool(whole.all()) and (numbers.size != 1 or bool(rounded.any()) or not bool(numbers.any()))

    def _set_narrow(self, value: Any) -> None:
        value.dtype = self._type
        self._narrow.add(value)

    def _narrow_of(self, value: Any) -> Any:
        """Return a value in the narrow type."""
        if value in self._narrow:
            return value
        if value not in self._others:
            constant = self._constant(value)
            self._others[value] = (
                self._cast(value, self._type) if constant is None else self._stored(value, constant.numpy())
            )
        return self._others[value]

    def _stored(self, value: Any, numbers: Any) -> Any:
        import onnx_ir as ir

        with np.errstate(over="ignore"):
            narrow = numbers.astype(self._numpy)
        beyond = np.isfinite(numbers) & ~np.isfinite(narrow.astype(np.float32))
        if beyond.any():
            raise weights_beyond(value.name, float(np.abs(numbers[np.isfinite(numbers)]).max()), self._dtype)
        name = self._new(value.name)
        tensor = ir.tensor(narrow, dtype=self._type, name=name)
        made = ir.Value(name=name, shape=ir.Shape(narrow.shape), type=ir.TensorType(self._type), const_value=tensor)
        self._graph.register_initializer(made)
        return made

    def _wide_of(self, value: Any) -> Any:
        """Return a value in fp32."""
        if value not in self._narrow:
            return value
        if value not in self._others:
            self._others[value] = self._cast(value, self._fp32)
        return self._others[value]

    def _read_wide(self, node: Any, read: Sequence[tuple[int, Any]]) -> None:
        for place, x in read:
            node.replace_input_with(place, self._wide_of(x))

    def _store_matrices(self, read: Sequence[tuple[int, Any]]) -> None:
        """Store a recurrent layer's matrices in the narrow type; the layer reads them through a Cast."""
        for _, x in read:
            if self._is_table(x) and self._fits(x) and x not in self._narrow:
                stored = self._narrow_of(x)
                self._narrow.add(stored)
                wide = self._wide_of(stored)
                for user, place in list(x.uses()):
                    if user.op_type in _RECURRENT:
                        user.replace_input_with(place, wide)

    def _widen_captured(self, graph: Any) -> None:
        """Let a graph inside a node read the values around it in fp32."""
        for node in graph.all_nodes():
            for place, x in enumerate(node.inputs):
                if x is not None and x in self._narrow:
                    node.replace_input_with(place, self._wide_of(x))

    def _convert_outputs(self) -> None:
        """Give the outputs of the graph the types that a file of this precision has, and their names."""
        for place, value in enumerate(list(self._graph.outputs)):
            if not self._is_real(value):
                continue
            wanted = self._narrow_of(value) if self._inputs_narrow else self._wide_of(value)
            if wanted is value:
                continue
            name = value.name
            value.name = self._new(name)
            wanted.name = name
            self._graph.outputs[place] = wanted

    def _cast(self, value: Any, dtype: Any) -> Any:
        """Add a Cast behind a value, and return its result."""
        import onnx_ir as ir

        name = self._new(value.name)
        result = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
        producer = value.producer()
        properties = {} if producer is None else dict(producer.metadata_props)
        made = ir.node(
            "Cast", [value], {"to": dtype.value}, outputs=[result], name=f"{name}.Cast", metadata_props=properties
        )
        if producer is not None:
            self._graph.insert_after(producer, made)
        else:
            self._graph.insert_before(self._graph[0], made)
        return result

    def _new(self, name: str) -> str:
        """Return a name that no value has."""
        made = f"{name}.{self._dtype}"
        while made in self._taken:
            made += "_"
        self._taken.add(made)
        return made


def _graphs(attribute: Any) -> Iterator[Any]:
    """Yield the graphs that an attribute holds."""
    import onnx_ir as ir

    if attribute.type == ir.AttributeType.GRAPH:
        yield attribute.as_graph()
    elif attribute.type == ir.AttributeType.GRAPHS:
        yield from attribute.as_graphs()
