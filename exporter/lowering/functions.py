"""Add the ONNX functions of this package's nodes to a model, by a table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from ...core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ...core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE
from ...core.nodes.fused import FUSED_BY_OP_TYPE, FUSED_DOMAIN
from ...core.nodes.grouped import GROUPED_BY_OP_TYPE
from ...core.nodes.step import STEP_VARIANT_BY_OP_TYPE
from .aft_function import build_aft
from .attention_function import build_attention
from .fused_functions import build_fused
from .grouped_function import build_grouped
from .step_function import build_step

_log = logging.getLogger(__name__)

# A callable that builds the ONNX function of an op type. Its arguments: the op type's name; the opset of the function,
# which must be the model's; the nodes of the model that use the function, at least one.
Builder = Callable[[str, int, Sequence[ir.Node]], ir.Function]
# Domain and op type → builder of the function.
BUILDERS: Mapping[tuple[str, str], Builder] = {
    **{(DOMAIN, op_type): build_attention for op_type in VARIANT_BY_OP_TYPE},
    **{(DOMAIN, op_type): build_grouped for op_type in GROUPED_BY_OP_TYPE},
    **{(DOMAIN, op_type): build_step for op_type in STEP_VARIANT_BY_OP_TYPE},
    **{(DOMAIN, op_type): build_aft for op_type in AFT_VARIANT_BY_OP_TYPE},
    **{(FUSED_DOMAIN, op_type): build_fused for op_type in sorted(FUSED_BY_OP_TYPE)},
}


def attach_functions(model: ir.Model) -> None:
    """Add the function of every node of the registry that the model uses, in place."""
    opset = model.graph.opset_imports[""]
    used: dict[tuple[str, str], list[ir.Node]] = {}
    for node in model.graph.all_nodes():
        if (node.domain, node.op_type) in BUILDERS:
            used.setdefault((node.domain, node.op_type), []).append(node)
    # Attention functions in node order, then fused ones by name, so that equal models give equal files.
    for domain, op_type in sorted(used, key=lambda key: (key[0], key[1] if key[0] == FUSED_DOMAIN else "")):
        function = BUILDERS[domain, op_type](op_type, opset, used[domain, op_type])
        model.functions[function.identifier()] = function
        _log.debug("function %s::%s for %d node(s)", domain, op_type, len(used[domain, op_type]))
