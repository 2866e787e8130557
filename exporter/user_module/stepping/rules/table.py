"""Name → rule, for every operator that a step file computes, and those that are refused with a reason of their own."""

from __future__ import annotations

from torch import fx

from ..plan import Rule, name_of
from . import attention, convolutions, elementwise, layout, norms, products, recurrent

_ELEMENTWISE = (
    *("relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardtanh", "hardswish"),
    *("hardsigmoid", "softplus", "softsign", "logsigmoid", "log_sigmoid", "sigmoid", "tanh", "tanhshrink", "prelu"),
    *("square", "where", "masked_fill", "clamp", "clip", "clamp_min", "clamp_max", "rsub", "true_divide", "divide"),
    *("multiply", "subtract", "negative", "absolute", "float_power", "threshold", "lerp", "addcmul"),
)
_OVER_AXES = (
    *("softmax", "log_softmax", "_softmax", "mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "var"),
    *("std", "var_mean", "std_mean", "prod", "all", "any", "logsumexp", "linalg_vector_norm", "norm", "sort", "topk"),
    *("median", "cumprod", "logcumsumexp", "cummax", "cummin"),
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise.elementwise),
    **dict.fromkeys(("to", "_to_copy", "type_as", "float", "half", "double"), elementwise.cast_like),
    "glu": elementwise.halves,
    "embedding": products.embedding,
    "linear": products.linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm"), products.matmul),
    "einsum": products.einsum,
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"),
        layout.reshape,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), layout.expand),
    **dict.fromkeys(
        ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "mT", "numpy_T"), layout.permute
    ),
    **dict.fromkeys(
        ("contiguous", "clone", "alias", "detach", "lift_fresh_copy", "dropout", "feature_dropout", "alpha_dropout"),
        layout.keep,
    ),
    **dict.fromkeys(("cat", "concat", "concatenate"), layout.join),
    "stack": layout.stack,
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "unbind", "tensor_split"), layout.cut),
    "getitem": layout.part_of,
    "select": layout.select,
    "index_select": layout.pick,
    **dict.fromkeys(("slice", "narrow"), layout.slice_),
    **dict.fromkeys(("pad", "constant_pad_nd"), layout.pad),
    **dict.fromkeys(("flip", "roll"), layout.reorder),
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), norms.over_last),
    "batch_norm": norms.by_channel,
    **dict.fromkeys(_OVER_AXES, norms.over_axes),
    **dict.fromkeys(
        ("group_norm", "instance_norm", "adaptive_avg_pool1d", "adaptive_max_pool1d"), norms.over_everything
    ),
    "cumsum": norms.running,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), convolutions.convolution),
    "captured_recurrent": recurrent.recurrent,
    "captured_last_state": recurrent.last_state,
    "captured_attention": attention.attention,
    "scaled_dot_product_attention": attention.dense,
}


def rules_of(graph: fx.Graph) -> dict[str, Rule]:
    """Return the rules for a graph: the table, and that of elements for every operator that PyTorch marks so."""
    called = [node for node in graph.nodes if node.op == "call_function"]
    marked = {name_of(node) for node in called if elementwise.is_elementwise(node)}
    return {**dict.fromkeys(marked, elementwise.elementwise), **RULES}
