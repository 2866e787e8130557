"""Choose the kernels of a library (the full set, or what given models need) and its default GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ...core.nodes.gpu import RINGS_BY_OP_TYPE, SERVED_BY_OP_TYPE
from ...onnx_graph.gpu_nodes import aft_nodes, gpu_nodes, ring_nodes
from ...onnx_graph.onnx_file import OnnxFile
from ...onnx_graph.precision import fp8_attention
from ..kernel.aft import AFT_SPECS, AftSpec
from ..kernel.compile import AnySpec
from ..kernel.ring import ring_set, ring_specs_for
from ..kernel.spec import Fp32Products, full_set, multiplied, spec_for
from ..kernel.targets import TARGETS, Target
from .sidecar import Arch

# Every library has PTX that runs on all of them. Machine code is added where that PTX cannot use the matrix units (9.0,
# 10.0, 11.0; servers with Arm processors have the first two) and for the most common device of a kind, where it saves
# the driver's compilation at first use.
DEFAULT_TARGETS: dict[Arch, tuple[str, ...]] = {
    "x86_64": ("sm_80", "sm_90", "sm_100"),
    "aarch64": ("sm_80", "sm_87", "sm_90", "sm_100", "sm_110"),
}


def default_targets(arch: Arch) -> list[Target]:
    """Return the GPUs a library is built for when none is named."""
    return [TARGETS[name] for name in DEFAULT_TARGETS[arch]]


def every_kernel(
    dtypes: Sequence[str] = (), head_dims: Sequence[int] = (), fp32_products: Fp32Products = "ieee"
) -> list[AnySpec]:
    """Return the kernels of a library for all models: `full_set`, `ring_set`, and AFT-local's for all head sizes."""
    aft = () if head_dims or (dtypes and "fp32" not in dtypes) else AFT_SPECS
    return [*full_set(dtypes, head_dims, fp32_products), *ring_set(dtypes, head_dims), *aft]


def needed_by(model: Path | OnnxFile, fp32_products: Fp32Products = "ieee") -> list[AnySpec]:
    """Return the kernels that the nodes of an ONNX file need, each once; nodes without a kernel need none.

    Raises:
        UsageError: the file cannot be read, a node's element type or head size cannot be found in it, or there is no
            such kernel.
    """
    file = OnnxFile.read(model)
    graph = fp8_attention.apply(file.parse())
    specs: dict[AnySpec, None] = {}
    for node in (*gpu_nodes(graph), *ring_nodes(graph)):
        if node.why_not:
            continue
        if node.dtype is None or node.head_dim is None:
            raise UsageError(
                f"{file.name} does not show the element type and head size of {node.name}.",
                why=f"Its query {node.proto.input[0]} has no known element type or width.",
                fix=f"Give {argument('dtype')} and {argument('head_dim')} instead of the model.",
            )
        if node.proto.op_type in RINGS_BY_OP_TYPE:
            specs |= dict.fromkeys(ring_specs_for(RINGS_BY_OP_TYPE[node.proto.op_type], node.dtype, node.head_dim))
            continue
        shared_qk = any(a.name == "shared_qk" and a.i for a in node.proto.attribute)
        spec = spec_for(SERVED_BY_OP_TYPE[node.proto.op_type], node.dtype, node.head_dim, shared_qk=shared_qk)
        specs[multiplied(spec, fp32_products)] = None
    for aft in aft_nodes(graph):
        variant = AFT_VARIANT_BY_OP_TYPE[aft.op_type]
        specs[AftSpec(variant.causal, variant.has_mask)] = None
    return list(specs)


def without_kernel(model: Path | OnnxFile) -> dict[str, str]:
    """Return the attention nodes of an ONNX file that no kernel computes, by name, and why."""
    graph = OnnxFile.read(model).model
    return {node.name: node.why_not for node in (*gpu_nodes(graph), *ring_nodes(graph)) if node.why_not}
