"""Choose the kernels of a library (the full set, or what given models need) and its default GPUs."""

from __future__ import annotations

from pathlib import Path

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.nodes.gpu import SERVED_BY_OP_TYPE
from ...onnx_graph.gpu_nodes import gpu_nodes
from ...onnx_graph.onnx_file import OnnxFile
from ..kernel.spec import KernelSpec, spec_for
from ..kernel.spec import full_set as full_set
from ..kernel.targets import TARGETS, Target
from .facts import Arch

# Every library has PTX that runs on all of them. Machine code is added where that PTX cannot use the matrix units (9.0,
# 10.0, 11.0) and for the most common device of a kind, where it saves the driver's compilation at first use.
DEFAULT_TARGETS: dict[Arch, tuple[str, ...]] = {
    "x86_64": ("sm_80", "sm_90", "sm_100"),
    "aarch64": ("sm_80", "sm_87", "sm_110"),
}


def default_targets(arch: Arch) -> list[Target]:
    """Return the GPUs a library is built for when none is named."""
    return [TARGETS[name] for name in DEFAULT_TARGETS[arch]]


def needed_by(model: Path | OnnxFile) -> list[KernelSpec]:
    """Return the kernels that the attention nodes of an ONNX file need, each once; nodes without a kernel need none.

    Raises:
        UsageError: the file cannot be read, a node's element type or head size cannot be found in it, or there is no
            such kernel.
    """
    file = OnnxFile.read(model)
    specs: dict[KernelSpec, None] = {}
    for node in gpu_nodes(file.parse()):
        if node.why_not:
            continue
        if node.dtype is None or node.head_dim is None:
            raise UsageError(
                f"{file.name} does not tell the type and head size of {node.name}.",
                why=f"Its query {node.proto.input[0]} has no known element type or width.",
                fix=f"Give {argument('dtype')} and {argument('head_dim')} instead of the model.",
            )
        specs[spec_for(SERVED_BY_OP_TYPE[node.proto.op_type], node.dtype, node.head_dim)] = None
    return list(specs)


def without_kernel(model: Path | OnnxFile) -> dict[str, str]:
    """Return the attention nodes of an ONNX file that no kernel computes, by name, and why."""
    return {node.name: node.why_not for node in gpu_nodes(OnnxFile.read(model).parse()) if node.why_not}
