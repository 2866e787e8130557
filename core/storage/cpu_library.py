"""List what the library of compiled kernels for onnxruntime on the CPU computes.

`plugins/cpu` builds it, and sessions open it (`core/storage/library_store.py`); both read this list.
"""

from __future__ import annotations

from ..nodes.aft import AFT_VARIANTS
from ..nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE
from ..nodes.fused import FUSED_DOMAIN, FUSED_NODES
from ..nodes.grouped import GROUPED_BY_OP_TYPE
from ..nodes.step import STEP_VARIANTS

# The attention nodes it has kernels for, with fp32 or fp16 inputs.
ATTENTION = (*VARIANT_BY_OP_TYPE, *GROUPED_BY_OP_TYPE)
ATTENTION_DTYPES = ("fp32", "fp16")
# All of its kernels: the element types by domain and op type.
KERNELS: dict[tuple[str, str], tuple[str, ...]] = {
    **{(DOMAIN, op_type): ATTENTION_DTYPES for op_type in ATTENTION},
    **{(DOMAIN, variant.op_type): ATTENTION_DTYPES for variant in STEP_VARIANTS},
    **{(DOMAIN, variant.op_type): ("fp32",) for variant in AFT_VARIANTS},
    **{(FUSED_DOMAIN, node.op_type): node.dtypes for node in FUSED_NODES},
}


def computes(domain: str, op_type: str) -> bool:
    """Check whether the library computes a node."""
    return (domain, op_type) in KERNELS
