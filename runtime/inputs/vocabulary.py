"""Find a model's vocabulary, and check tokens against it before the graph reads a wrong row for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import UsageError
from ...core.tensors import INTEGER_MASKS, POSITION_IDS

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar
    from ...onnx_graph.onnx_file import OnnxFile


# Names of the vocabulary's size in the arguments of model classes.
_VOCABULARY = ("num_tokens", "vocab_size")


def vocabulary(sidecar: Sidecar | None) -> int | None:
    """Return one more than the largest token from a sidecar; None without one, or for embeddings.

    Of a module of the user's own with several inputs of integers, the smallest limit.
    """
    if sidecar is not None and sidecar.token_limits:
        return min(sidecar.token_limits.values())
    sizes = [] if sidecar is None else [sidecar.kwargs.get(name) for name in _VOCABULARY]
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool)), None)


def allowed_tokens(sidecar: Sidecar | None) -> int | Mapping[str, int] | None:
    """Return what `check_tokens` takes: a limit of each input where a sidecar has them, else one of all."""
    return vocabulary(sidecar) if sidecar is None or not sidecar.token_limits else sidecar.token_limits


def rows_of_table(file: OnnxFile) -> int | None:
    """Return the size of a file's embedding table; None if no input is looked up directly.

    If there are several tables, the smallest counts.
    """
    graph = file.model.graph
    whole = {value.name for value in graph.input}
    rows = {tensor.name: tensor.dims[0] for tensor in graph.initializer if len(tensor.dims) >= 2}
    found = [
        rows[node.input[0]]
        for node in graph.node
        if node.op_type == "Gather" and node.input[0] in rows and node.input[1] in whole
        # The axis of a lookup is the first, as in ONNX by default.
        if not any(attribute.name == "axis" and attribute.i for attribute in node.attribute)
    ]
    return min(found, default=None)


def check_tokens(inputs: Mapping[str, Any], limit: int | Mapping[str, int] | None, source: str = "") -> None:
    """Refuse tokens outside the vocabulary.

    The graph would not: a negative index counts from the end of the embedding, and a GPU may read zeros.

    Args:
        inputs: arrays; integers are tokens.
        limit: one more than the largest, or that of each input; None checks nothing.
        source: where they come from, for the error.

    Raises:
        UsageError: a token is outside the vocabulary.
    """
    if limit is None:
        return
    of = f" of {source}" if source else ""
    for name, array in inputs.items():
        most = limit if isinstance(limit, int) else limit.get(name)
        if (
            most is not None
            and name not in {*INTEGER_MASKS, POSITION_IDS}
            and array.dtype.kind in "iu"
            and array.size
            and not 0 <= array.min() <= array.max() < most
        ):
            raise UsageError(
                f"Input {name!r}{of} holds tokens outside the vocabulary.",
                why=f"They range from {array.min()} to {array.max()}; the model has {most} tokens.",
                fix=f"Use tokens from 0 to {most - 1}.",
            )
