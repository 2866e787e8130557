"""Pass: sum the products of an fp16 model in fp32, for a provider that would sum them in fp16.

From 1.29 on onnxruntime's CPU provider has fp16 kernels for MatMul and Gemm on Arm processors, and they sum in fp16:
the error of a product of 256 terms is 11 times that of rounding the result once, of 1024 terms 22 times (1.29.0 and
1.31.1, Cortex-A76 emulated), and a model leaves fp16's tolerance. Elsewhere, and before, it has no such kernels: it
casts, sums in fp32 and rounds once, as tensor cores and the kernels of this package do. In the copy made here these
Casts are in the model. Those of weights are folded when the session loads, so they cost memory and no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.nodes.attention import DOMAIN
from ..graph_values import element_types, put_back, set_nodes, take_weights, types_of
from ..judgement import graphs_of
from ..library_errors import infer_shapes

_PRODUCTS = ("Gemm", "MatMul")


def apply(model: Any) -> Any:
    """Return the model with Casts around its products, or the model itself if nothing in it is fp16.

    Functions stay functions, so that compiled kernels take their nodes. Products inside the attention's own functions
    get the Casts too; other functions stay as they are, because the types of their values are not known. External data
    is not read: the copy refers to it as the model does.
    """
    import onnx

    if "float16" not in element_types(model):
        return model
    weights = take_weights(model)
    typed = infer_shapes(model)
    halves = {name for name, kind in types_of(typed.graph) if kind == onnx.TensorProto.FLOAT16}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    put_back(copy, weights)
    casts = _Casts(halves)
    casts.inside(copy.graph)
    for function in copy.functions:
        if function.domain.partition(".")[0] == DOMAIN:
            casts.inside(function, like_inputs=True)
    return copy


class _Casts:
    """Rewriter that puts Casts around products, in place.

    Args:
        halves: names of the values that are fp16.
    """

    def __init__(self, halves: set[str]) -> None:
        import onnx

        self._fp16, self._fp32 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
        self._make = onnx.helper.make_node
        self._halves = halves

    def inside(self, part: Any, *, like_inputs: bool = False) -> None:
        """Put Casts around the products of a graph or function.

        With `like_inputs` around every product, and its result has the type of its inputs.
        """
        set_nodes(part, [new for node in part.node for new in self._node(node, like_inputs)])

    def _node(self, node: Any, like_inputs: bool) -> Iterable[Any]:
        for inner in graphs_of(node):
            self.inside(inner, like_inputs=like_inputs)
        product = node.op_type in _PRODUCTS and node.domain in ("", "ai.onnx")
        if not product or not (like_inputs or node.output[0] in self._halves):
            return [node]
        result, first = node.output[0], node.input[0]
        wide = {name: f"{result}/summed_in_fp32.{index}" for index, name in enumerate(node.input) if name}
        casts = [self._make("Cast", [name], [wide[name]], to=self._fp32) for name in wide]
        node.input[:] = [wide.get(name, name) for name in node.input]
        node.output[0] = f"{result}/summed_in_fp32"
        if like_inputs:
            back = self._make("CastLike", [node.output[0], first], [result])
        else:
            back = self._make("Cast", [node.output[0]], [result], to=self._fp16)
        return [*casts, node, back]
