"""Pass: replace calls of ONNX functions by their nodes, for a provider that does not support functions.

onnxruntime shows a graph to its providers before it inlines functions. Its TensorRT provider makes a model of that
graph to ask TensorRT which nodes it takes, and leaves the functions out of it: such a model is not valid, and the
session ends there with "is not a registered function/op" (onnxruntime 1.31.1, `GetSupportedList`). Weights in other
files come into the copy, for TensorRT's parser does not know the file's place and would not find them.

Every pass is a function `apply(model)`: it returns the model itself if there is nothing to do, else another one; the
given model must not be used afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .graph_values import put_back, take_weights
from .library_errors import refused_as


def no_calls(domain: str, op_type: str) -> bool:
    """Keep no call."""
    return False


def apply(model: Any, keep: Callable[[str, str], bool] = no_calls) -> Any:
    """Return the model without functions; keep its weights.

    Args:
        model: the model.
        keep: whether calls of the function with this domain and name stay, and the function with them.
    """
    import onnx.inliner

    kept = [(function.domain, function.name) for function in model.functions if keep(function.domain, function.name)]
    if len(kept) == len(model.functions):
        return model
    weights = take_weights(model)
    with refused_as("The functions of the model cannot be inlined.", "Export the model again."):
        plain = onnx.inliner.inline_selected_functions(model, kept, exclude=True)
    put_back(plain, weights)
    return plain
