"""Build the parts of ONNX functions: attributes, constants, and the function itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import onnx_ir as ir
from onnxscript import build_function

from ...core.nodes.attention import DOMAIN

FIRST_INT64, LAST_INT64 = -(1 << 63), (1 << 63) - 1
# Every other attribute is an integer.
_TYPES: Mapping[str, ir.AttributeType] = {
    **dict.fromkeys(("scale", "softcap", "xpos_scale_base"), ir.AttributeType.FLOAT),
    **dict.fromkeys(("plugin_namespace", "plugin_version"), ir.AttributeType.STRING),
    "perm": ir.AttributeType.INTS,
}


def _type(name: str) -> ir.AttributeType:
    return _TYPES.get(name, ir.AttributeType.INT)


def attribute(op: Any, name: str) -> Any:
    """Read an attribute of the node that the function defines, a number."""
    field = "value_int" if _type(name) == ir.AttributeType.INT else "value_float"
    return op.Constant(**{field: ir.RefAttr(field, name, _type(name))})


def integers(op: Any, *values: int) -> Any:
    """Build an int64 vector."""
    return op.Constant(value_ints=list(values))


def real(op: Any, value: float) -> Any:
    """Build an fp32 scalar."""
    return op.Constant(value_float=value)


def define(
    body: Callable[..., Any],
    op_type: str,
    inputs: Iterable[str],
    attributes: Iterable[str],
    opset: int,
    *,
    domain: str = DOMAIN,
) -> ir.Function:
    """Build the model-local ONNX function of one op type.

    Args:
        body: computes its outputs, given the builder of operators and the inputs.
        op_type: name of the function.
        inputs: their names.
        attributes: their names.
        opset: opset of the function; it must be the model's.
        domain: of the op type.
    """
    return build_function(
        body,
        [ir.Value(name=name) for name in inputs],
        domain=domain,
        name=op_type,
        attributes=[ir.Attr(name, _type(name), None) for name in attributes],
        opset_imports={"": opset},
    )
