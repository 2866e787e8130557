"""Pass: rewrite a model for onnxruntime's TensorRT provider.

The provider makes TensorRT's plugins known to onnxruntime as operators of the domain `trt.plugins`, and refuses a model
with functions. So the attention nodes are moved to that domain, without their ONNX functions. All other functions are
inlined; so is attention that no kernel computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UsageError
from ..core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE
from ..core.nodes.fused import FUSED_DOMAIN
from ..core.nodes.gpu import SERVED_BY_OP_TYPE, SMALLEST_XPOS_BASE
from ..core.nodes.grouped import GROUPED_BY_OP_TYPE
from ..core.storage.file_kinds import REWRITTEN
from ..core.storage.files import publish, sha256
from ..core.storage.outputs import Output, writing
from . import inlining
from .onnx_file import OnnxFile

PROVIDER_DOMAIN = "trt.plugins"


@dataclass(frozen=True)
class RewriteResult:
    """Result of the rewrite.

    Args:
        nodes: names of the attention nodes that moved.
        kept: names of those that no kernel computes, which were inlined.
        sha256: SHA-256 of the written file, without external data.
    """

    nodes: list[str]
    kept: list[str]
    sha256: str


def rewrite_for_provider(model: Path, output: Path, *, overwrite: bool = False) -> RewriteResult:
    """Write `model` to `output` with its attention nodes in the provider's domain.

    Weights in a file beside the model are not copied: the output then goes into the same folder.

    Raises:
        UsageError: the model cannot be read or has no attention node that a kernel computes, or the output exists or
            would lose its weights.
    """
    import onnx

    with writing(Output(output, REWRITTEN), inputs=[model], overwrite=overwrite) as folder:
        proto = OnnxFile.read(model).parse()
        outside = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer)
        if outside and output.resolve().parent != model.resolve().parent:
            raise UsageError(
                f"{output} would not find the weights of {model}.",
                why="They lie in a file beside the model.",
                fix=f"Write it into {model.resolve().parent}.",
            )
        nodes: dict[bool, list[str]] = {True: [], False: []}
        for node, served in attention_nodes(proto):
            nodes[served].append(node.name or node.output[0])
        if not nodes[True]:
            raise UsageError(f"{model} has no attention node to rewrite.", why="No node of it is computed by a kernel.")
        staged = folder / output.name
        onnx.save(apply(proto), str(staged))
        digest = sha256(staged)
        publish(staged, output)
    return RewriteResult(nodes[True], nodes[False], digest)


def apply(model: Any) -> Any:
    """Return the model with its attention nodes in the provider's domain and without functions."""
    import onnx

    served = [node for node, kernel in attention_nodes(model) if kernel]
    for node in served:
        node.domain = PROVIDER_DOMAIN
    plain = inlining.apply(model)
    del plain.functions[:]
    gone = {DOMAIN, FUSED_DOMAIN} - {node.domain for node in plain.graph.node}
    imports = [entry for entry in plain.opset_import if entry.domain not in gone]
    del plain.opset_import[:]
    plain.opset_import.extend(imports)
    if served and PROVIDER_DOMAIN not in {entry.domain for entry in imports}:
        plain.opset_import.append(onnx.helper.make_opsetid(PROVIDER_DOMAIN, 1))
    return plain


def attention_nodes(model: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the attention nodes of the graph, and whether a kernel computes them.

    None computes both sinks and a softcap, nor xpos with a small base.
    """
    for node in model.graph.node:
        if node.domain == DOMAIN and (node.op_type in VARIANT_BY_OP_TYPE or node.op_type in GROUPED_BY_OP_TYPE):
            served = SERVED_BY_OP_TYPE.get(node.op_type)
            base = next((a.f for a in node.attribute if a.name == "xpos_scale_base"), 0.0)
            too_small = getattr(served, "has_xpos", False) and base < SMALLEST_XPOS_BASE
            yield node, served is not None and not too_small
