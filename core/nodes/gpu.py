"""The op types that the GPU kernels and plugins compute."""

from __future__ import annotations

from .aft import AFT_VARIANTS
from .attention import VARIANTS, NodeAttributes, NodeVariant
from .grouped import GROUPED_VARIANTS, GroupedAttributes, GroupedVariant
from .step import STEP_VARIANTS, StepVariant

# One op type of the nodes that kernels compute, and the attributes of such a node.
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

# Narrower heads do not fill a product of the matrix units; wider ones do not fit a tile, which holds whole rows.
NARROWEST_HEAD, WIDEST_HEAD = 16, 256
# Products in fp32 of wider heads do not fit the registers beside a ring that is written.
WIDEST_FP32_RING_HEAD = 128
# Below, the two halves of the xpos decay could leave the range of fp32 within one block of queries.
SMALLEST_XPOS_BASE = 1.0
