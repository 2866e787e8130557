"""Rewriting a model for onnxruntime's TensorRT provider.

The provider makes TensorRT's plugins known to onnxruntime as operators of the domain `trt.plugins`, and refuses a model
with functions. So the attention nodes are moved to that domain, without their bodies. The bodies of all other functions
take the place of the nodes that call them; that goes for attention with xpos too, which no kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.files import publish, refuse_existing, sha256, staging
from ..core.fused_node import FUSED_DOMAIN
from ..core.node import DOMAIN, VARIANT_BY_OP_TYPE

if TYPE_CHECKING:
    import onnx

PROVIDER_DOMAIN = "trt.plugins"


@dataclass(frozen=True)
class Rewritten:
    """What was done.

    Args:
        nodes: names of the attention nodes that moved.
        kept: names of those with xpos, of which only the body is left.
        sha256: of the written file, without external data.
    """

    nodes: list[str]
    kept: list[str]
    sha256: str


def rewrite_for_provider(model: Path, output: Path, *, overwrite: bool = False) -> Rewritten:
    """Write `model` to `output` with its attention nodes in the provider's domain.

    Weights in a file beside the model are not copied: the output then goes into the same folder.

    Raises:
        UsageError: the model cannot be read or has no attention node that a kernel computes, or the output exists or
            would lose its weights.
    """
    import onnx

    refuse_existing(output, overwrite)
    try:
        proto = onnx.load(str(model), load_external_data=False)
    except Exception as error:  # protobuf's errors have no common base class
        raise UsageError(f"{model} cannot be read as an ONNX file.", why=str(error)) from error
    outside = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer)
    if outside and output.resolve().parent != model.resolve().parent:
        raise UsageError(
            f"{output} would not find the weights of {model}.",
            why="They lie in a file beside the model.",
            fix=f"Write it into {model.resolve().parent}.",
        )
    nodes, kept = _move_nodes(proto)
    if not nodes:
        raise UsageError(f"{model} has no attention node to rewrite.", why="No node of it is computed by a kernel.")
    with staging(output) as folder:
        staged = folder / output.name
        onnx.save(proto, str(staged))
        digest = sha256(staged)
        publish(staged, output)
    return Rewritten(nodes, kept, digest)


def _move_nodes(proto: onnx.ModelProto) -> tuple[list[str], list[str]]:
    """Names of the nodes moved, and of those left."""
    import onnx

    moved, kept = [], []
    for node in proto.graph.node:
        variant = VARIANT_BY_OP_TYPE.get(node.op_type) if node.domain == DOMAIN else None
        if variant is None:
            continue
        name = node.name or node.output[0]
        if variant.has_xpos:
            kept.append(name)
        else:
            node.domain = PROVIDER_DOMAIN
            moved.append(name)
    _inline_functions(proto)
    domains = {node.domain for node in proto.graph.node}
    gone = {DOMAIN, FUSED_DOMAIN} - domains
    imports = [entry for entry in proto.opset_import if entry.domain not in gone]
    del proto.opset_import[:]
    proto.opset_import.extend(imports)
    if moved and PROVIDER_DOMAIN not in {entry.domain for entry in imports}:
        proto.opset_import.append(onnx.helper.make_opsetid(PROVIDER_DOMAIN, 1))
    return moved, kept


def _inline_functions(proto: onnx.ModelProto) -> None:
    """Put the bodies of functions where they are called, and leave no function."""
    import onnx.inliner

    if proto.functions:
        proto.CopyFrom(onnx.inliner.inline_local_functions(proto))
    del proto.functions[:]
