"""Choose the kernels of a library (the full set, or what given models need) and its default GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.nodes.attention import DOMAIN
from ...core.nodes.gpu import SERVED_BY_OP_TYPE, SMALLEST_XPOS_BASE
from ...onnx_graph.onnx_file import OnnxFile
from ..kernel.spec import KernelSpec, spec_for
from ..kernel.spec import full_set as full_set
from ..kernel.targets import TARGETS, Target
from .facts import Arch

if TYPE_CHECKING:
    import onnx

# Every library has PTX that runs on all of them. Machine code is added where that PTX cannot use the matrix units (9.0,
# 10.0, 11.0) and for the most common device of a kind, where it saves the driver's compilation at first use.
DEFAULT_TARGETS: dict[Arch, tuple[str, ...]] = {
    "x86_64": ("sm_80", "sm_90", "sm_100"),
    "aarch64": ("sm_80", "sm_87", "sm_110"),
}

_ONNX_ELEMENT = {1: "fp32", 10: "fp16", 16: "bf16"}  # onnx.TensorProto.DataType


def default_targets(arch: Arch) -> list[Target]:
    """Return the GPUs a library is built for when none is named."""
    return [TARGETS[name] for name in DEFAULT_TARGETS[arch]]


def needed_by(model: Path | OnnxFile) -> list[KernelSpec]:
    """Return the kernels that the attention nodes of an ONNX file need, each once.

    Raises:
        UsageError: the file cannot be read, a node's element type or head size cannot be found in it, or no kernel
            computes it.
    """
    import onnx

    file = OnnxFile.read(model)
    graph = file.parse()
    nodes = [node for node in graph.graph.node if node.domain == DOMAIN and node.op_type in SERVED_BY_OP_TYPE]
    types = _tensor_types(graph)
    if any(node.input[0] not in types for node in nodes):
        types = _tensor_types(onnx.shape_inference.infer_shapes(graph))
    specs: dict[KernelSpec, None] = {}
    for node in nodes:
        variant = SERVED_BY_OP_TYPE[node.op_type]
        element, shape = types.get(node.input[0], (0, []))
        if element not in _ONNX_ELEMENT or len(shape) != 4 or not isinstance(shape[3], int):
            raise UsageError(
                f"{file.name} does not tell the type and head size of {node.name or node.op_type}.",
                why=f"Its query {node.input[0]} has element type {element} and shape {shape}.",
                fix=f"Give {argument('dtype')} and {argument('head_dim')} instead of the model.",
            )
        base = next((a.f for a in node.attribute if a.name == "xpos_scale_base"), 0.0)
        if variant.has_xpos and base < SMALLEST_XPOS_BASE:
            raise UsageError(
                f"No kernel computes {node.name or node.op_type} of {file.name}.",
                why=f"The base of its xpos is {base:g}; kernels take {SMALLEST_XPOS_BASE:g} and above.",
                fix=f"Leave the node to its ONNX function: {argument('plugin', 'none')}.",
            )
        specs[spec_for(variant, _ONNX_ELEMENT[element], shape[3])] = None
    return list(specs)


def _tensor_types(model: onnx.ModelProto) -> dict[str, tuple[int, list[Any]]]:
    """Return element type and shape of every tensor that the graph declares; dynamic axes by name."""
    graph = model.graph
    types: dict[str, tuple[int, list[Any]]] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            shape = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim]
            types[value.name] = (tensor.elem_type, shape)
    return types
