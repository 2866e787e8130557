"""Check that onnxruntime loads the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.documents.sidecar import CheckRecord
from ...onnx_graph import block_weights
from ...runtime.backends.onnxruntime.session import open_file
from .checked_file import CheckedFile
from .outcome import passed

if TYPE_CHECKING:
    import onnx


def check_loads(file: CheckedFile) -> CheckRecord:
    """Open the file on the CPU, which every machine has, and keep the session for the other checks.

    Those checks run the session a few times with long computations in between, so it keeps no memory between runs, and
    no copies of large matrices, but for a step file, of which each token is a run. Products of blocks of weights are
    computed otherwise without these copies, and are checked as users run them.

    Raises:
        MissingDependency: onnxruntime is not installed.
        UsageError: onnxruntime refuses the file.
    """
    arranged = file.kind == "steps" or _has_blocks(file.model)
    file.session = open_file(file.path, provider="cpu", plugin="none", lean=True, arranged=arranged)
    return passed("; ".join((f"provider {file.session.provider}", *file.session.notes)))


def _has_blocks(model: onnx.ModelProto) -> bool:
    """Return whether a model multiplies by weights in blocks, which onnxruntime also makes of nodes that widen them."""
    nodes = (*model.graph.node, *(node for function in model.functions for node in function.node))
    return any(node.domain == block_weights.DOMAIN or node.op_type == "DequantizeLinear" for node in nodes)
