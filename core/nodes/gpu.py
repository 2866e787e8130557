"""List the op types that the GPU kernels and plugins compute."""

from __future__ import annotations

from .aft import AFT_VARIANTS
from .attention import VARIANTS, NodeAttributes, NodeVariant
from .grouped import GROUPED_VARIANTS, GroupedAttributes, GroupedVariant
from .step import STEP_VARIANTS, StepVariant

# A node that kernels compute: its op type and its attributes.
KernelNode = NodeVariant | GroupedVariant
KernelAttributes = NodeAttributes | GroupedAttributes

# No known model has sinks and a softcap: those nodes keep their ONNX function.
SERVED: tuple[KernelNode, ...] = (
    *VARIANTS,
    *(node for node in GROUPED_VARIANTS if not (node.has_sinks and node.has_softcap)),
)
# Steps and chunks, and AFT-local: they have kernels and argument lists of their own.
RINGS: tuple[StepVariant, ...] = tuple(node for node in STEP_VARIANTS if not (node.has_sinks and node.has_softcap))
RINGS_BY_OP_TYPE = {node.op_type: node for node in RINGS}
SERVED_OP_TYPES = tuple(node.op_type for node in (*SERVED, *AFT_VARIANTS, *RINGS))
SERVED_BY_OP_TYPE = {node.op_type: node for node in SERVED}

# Narrower heads do not fill the matrix units; wider heads do not fit in a tile, which holds whole rows.
NARROWEST_HEAD, WIDEST_HEAD = 16, 256
# With wider heads, fp32 products and the ring that is written do not fit in registers together.
WIDEST_FP32_RING_HEAD = 128
# The first compute capability with matrix products of fp8 (NVIDIA's table of precisions), and what its kernels take:
# wider heads do not fit the registers.
OLDEST_WITH_FP8, WIDEST_FP8_HEAD = 89, 128
# Inputs and options of nodes that the fp8 kernels do not support.
_NOT_IN_FP8 = ("has_bias", "has_xpos", "has_softcap", "has_sinks")
# With a smaller base, the halves of the xpos decay could leave the range of fp32 within one block of queries.
SMALLEST_XPOS_BASE = 1.0


def computes_in_fp8(op_type: str, head_dim: int, *, shared_qk: bool) -> bool:
    """Return whether a kernel computes nodes of this op type in fp8, with heads this wide."""
    node = SERVED_BY_OP_TYPE.get(op_type)
    if node is None or shared_qk or any(getattr(node, option, False) for option in _NOT_IN_FP8):
        return False
    return NARROWEST_HEAD <= head_dim <= WIDEST_FP8_HEAD
