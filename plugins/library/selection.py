"""Choose the kernels of a library (the full set, or what given models need) and its default GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ...core.nodes.attention import DOMAIN
from ...core.nodes.gpu import SERVED_BY_OP_TYPE, SMALLEST_XPOS_BASE
from ...onnx_graph.onnx_file import OnnxFile
from ..kernel.aft import AFT_SPECS, AftSpec
from ..kernel.compile import AnySpec
from ..kernel.spec import Fp32Products, full_set, multiplied, spec_for
from ..kernel.targets import TARGETS, Target
from .facts import Arch

if TYPE_CHECKING:
    import onnx

# Every library has PTX that runs on all of them. Machine code is added where that PTX cannot use the matrix units (9.0,
# 10.0, 11.0; servers with Arm processors have the first two) and for the most common device of a kind, where it saves
# the driver's compilation at first use.
DEFAULT_TARGETS: dict[Arch, tuple[str, ...]] = {
    "x86_64": ("sm_80", "sm_90", "sm_100"),
    "aarch64": ("sm_80", "sm_87", "sm_90", "sm_100", "sm_110"),
}

_ONNX_ELEMENT = {1: "fp32", 10: "fp16", 16: "bf16"}  # onnx.TensorProto.DataType


def default_targets(arch: Arch) -> list[Target]:
    """Return the GPUs a library is built for when none is named."""
    return [TARGETS[name] for name in DEFAULT_TARGETS[arch]]


def every_kernel(
    dtypes: Sequence[str] = (), head_dims: Sequence[int] = (), fp32_products: Fp32Products = "ieee"
) -> list[AnySpec]:
    """Return the kernels of a library for all models: `full_set`, and AFT-local's unless head sizes were asked for."""
    aft = () if head_dims or (dtypes and "fp32" not in dtypes) else AFT_SPECS
    return [*full_set(dtypes, head_dims, fp32_products), *aft]


def needed_by(model: Path | OnnxFile, fp32_products: Fp32Products = "ieee") -> list[AnySpec]:
    """Return the kernels that the nodes of an ONNX file need, each once.

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
    specs: dict[AnySpec, None] = {}
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
        shared_qk = any(a.name == "shared_qk" and a.i for a in node.attribute)
        spec = spec_for(variant, _ONNX_ELEMENT[element], shape[3], shared_qk=shared_qk)
        specs[multiplied(spec, fp32_products)] = None
    for node in graph.graph.node:
        if node.domain == DOMAIN and node.op_type in AFT_VARIANT_BY_OP_TYPE:
            variant_here = AFT_VARIANT_BY_OP_TYPE[node.op_type]
            # Without these attributes TensorRT takes the function.
            if any(attribute.name == "plugin_namespace" for attribute in node.attribute):
                specs[AftSpec(variant_here.causal, variant_here.has_mask)] = None
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
