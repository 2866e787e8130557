"""The op types that the GPU kernels and plugins compute."""

from __future__ import annotations

from .attention import VARIANTS, NodeAttributes, NodeVariant
from .grouped import GROUPED_VARIANTS, GroupedAttributes, GroupedVariant

# One op type of the nodes that kernels compute, and the attributes of such a node.
KernelNode = NodeVariant | GroupedVariant
KernelAttributes = NodeAttributes | GroupedAttributes

# No known model has sinks and a softcap: those nodes keep their ONNX function.
SERVED: tuple[KernelNode, ...] = (
    *VARIANTS,
    *(node for node in GROUPED_VARIANTS if not (node.has_sinks and node.has_softcap)),
)
SERVED_BY_OP_TYPE = {node.op_type: node for node in SERVED}

# Narrower heads do not fill a product of the matrix units; wider ones do not fit a tile, which holds whole rows.
NARROWEST_HEAD, WIDEST_HEAD = 16, 256
# Below, the two halves of the xpos decay could leave the range of fp32 within one block of queries.
SMALLEST_XPOS_BASE = 1.0
