"""Pass: rewrite a model for onnxruntime's TensorRT provider.

The provider makes TensorRT's plugins known to onnxruntime as operators of the domain `trt.plugins`, and refuses a model
with functions. So the attention nodes are moved to that domain, without their ONNX functions. All other functions are
inlined; so is attention that no kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.nodes.attention import DOMAIN
from ...core.nodes.fused import FUSED_DOMAIN
from ...core.storage.file_kinds import REWRITTEN
from ...core.storage.files import publish, sha256
from ...core.storage.outputs import Output, writing
from ...onnx_graph import inlining
from ...onnx_graph.gpu_nodes import gpu_nodes
from ...onnx_graph.graph_values import outside_weights
from ...onnx_graph.library_errors import refused_as
from ...onnx_graph.onnx_file import OnnxFile

PROVIDER_DOMAIN = "trt.plugins"


@dataclass(frozen=True)
class RewriteResult:
    """Result of the rewrite.

    Args:
        nodes: names of the attention nodes that moved.
        kept: those that no kernel computes, which were inlined, by name, and why.
        sha256: SHA-256 of the written file, without external data.
    """

    nodes: list[str]
    kept: dict[str, str]
    sha256: str


def rewrite_for_provider(model: Path, output: Path, *, overwrite: bool = False) -> RewriteResult:
    """Write `model` to `output` with its attention nodes in the provider's domain.

    External weights are not copied, so the output must then be in the same folder.

    Raises:
        UsageError: the model cannot be read or has no attention node that a kernel computes, or the output exists or
            would lose its weights.
    """
    import onnx

    with writing(Output(output, REWRITTEN), inputs=[model], overwrite=overwrite) as folder:
        file = OnnxFile.read(model)
        file.check()
        proto = file.parse()
        if outside_weights(proto) and output.resolve().parent != model.resolve().parent:
            raise UsageError(
                f"{output} would not find the weights of {model}.",
                why="The weights are in a file in the model's folder.",
                fix=f"Write the output into {model.resolve().parent}.",
            )
        with refused_as(f"{model} cannot be rewritten.", "Export the model again."):
            found = gpu_nodes(proto)
        nodes = [node.name for node in found if not node.why_not]
        if not nodes:
            why = f"{found[0].name}: {found[0].why_not}." if found else "It has no attention node."
            raise UsageError(f"{model} has no attention node to rewrite.", why=why)
        staged = folder / output.name
        what = f"{model} cannot be rewritten."
        with refused_as(what, "Export the model again; this file was not made by an exporter."):
            onnx.save(apply(proto), str(staged))
        digest = sha256(staged)
        publish(staged, output)
    return RewriteResult(nodes, {node.name: node.why_not for node in found if node.why_not}, digest)


def apply(model: Any) -> Any:
    """Return the model with its attention nodes in the provider's domain and without functions."""
    import onnx

    served = [node.proto for node in gpu_nodes(model) if not node.why_not]
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
