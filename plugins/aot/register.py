"""Register the attention node with `tensorrt.plugin`: its output shape, and the kernel for the target.

TensorRT calls `implementation` while it builds an engine. It keeps the PTX, the launch grid and the int32 arguments,
the last two as expressions of the input shapes. Attributes are read at that time only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.error_texts import argument
from ...core.errors import MissingDependency, UsageError
from ...core.nodes.attention import PLUGIN_NAMESPACE, SEQUENCE_FIRST, NodeAttributes, geometry_of
from ...core.nodes.gpu import SERVED, KernelAttributes, KernelNode
from ...core.nodes.grouped import GroupedAttributes, GroupedVariant
from ..kernel.compile import CompiledKernel, compile_kernel
from ..kernel.spec import KernelSpec, name_scalars, spec_for, why_unsupported
from ..kernel.targets import Target
from ..kernel.tiles import tile_for
from .availability import why_not

# The types of the node's attributes as the ONNX parser passes them: numpy arrays. They are written out because
# `tensorrt.plugin` before TensorRT 11.3 does not know numpy 2.5's NDArray.
_INTEGERS, _FLOATS = np.ndarray[tuple[Any, ...], np.dtype[np.int32]], np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
_DTYPES = {"HALF": "fp16", "BF16": "bf16", "FLOAT": "fp32"}  # names of tensorrt.DataType

_registered: list[Target] = []


def register_plugins(target: Target) -> None:
    """Register the attention node as an ahead-of-time plugin for the rest of the process.

    Args:
        target: the GPU that engines will be built for; it cannot be changed afterwards.

    Raises:
        MissingDependency: TensorRT or Triton cannot do it here; the error gives the reason.
        UsageError: this process registered them for another GPU.
    """
    if _registered == [target]:
        return
    if _registered:
        raise UsageError(
            f"Ahead-of-time plugins for {target.name} cannot be registered.",
            why=f"This process already registered plugins of this name for {_registered[0].name}; TensorRT keeps "
            "only one.",
            fix="Build for one GPU per process.",
        )
    reason = why_not()
    if reason:
        raise MissingDependency(
            "Ahead-of-time plugins cannot be used here.",
            why=f"{reason}.",
            fix=f"Or use the plugin library: {argument('plugin', 'library')}.",
        )
    trtp = importlib.import_module("tensorrt.plugin")
    for variant in SERVED:
        _register(trtp, variant, target)
    _registered.append(target)


def attributes_of(variant: KernelNode) -> dict[str, Any]:
    """Return the attributes that an op type's kernel needs, by name, with the types TensorRT passes."""
    windowed = not (isinstance(variant, GroupedVariant) and variant.sees_all)
    present = {
        "window_size": windowed,
        "look_backward": windowed,
        "look_forward": windowed,
        "causal": True,
        "exact_windowsize": windowed,
        "scale": True,
        "shared_qk": not isinstance(variant, GroupedVariant),
        "perm": True,
        "softcap": isinstance(variant, GroupedVariant) and variant.has_softcap,
        "xpos_scale_base": variant.has_xpos,
    }
    floats = ("scale", "softcap", "xpos_scale_base")
    return {name: _FLOATS if name in floats else _INTEGERS for name, there in present.items() if there}


def _register(trtp: Any, variant: KernelNode, target: Target) -> None:
    """Register one op type of the node."""
    name = f"{PLUGIN_NAMESPACE}::{variant.op_type}"
    declared = attributes_of(variant)
    inputs = len(variant.input_names)
    kernels: dict[KernelSpec, CompiledKernel] = {}

    def description(*tensors: Any, **attributes: Any) -> Any:
        """Describe the output."""
        return tensors[0].like()

    def implementation(*arguments: Any) -> Any:
        """Compile the kernel for a node and describe its launch."""
        # TensorRT passes inputs, attributes, outputs and the tactic by position here, but attributes by name to a
        # description.
        given = dict(zip(declared, arguments[inputs : inputs + len(declared)], strict=True))
        query, key = arguments[:2]
        attributes = _attributes(variant, given)
        shared_qk = getattr(attributes, "shared_qk", False)
        spec = spec_for(variant, _DTYPES[query.dtype.name], _known(query.shape_expr[3]), shared_qk=shared_qk)
        if spec not in kernels:
            kernels[spec] = compile_kernel(spec, target, tile_for(spec, target, opt_in=False))
        return launch_of(trtp, kernels[spec], attributes, query.shape_expr, key.shape_expr)

    tensors = dict.fromkeys(variant.input_names, trtp.TensorDesc)
    _sign(description, tensors | declared, tuple[trtp.TensorDesc])
    outputs = {"outputs": tuple[trtp.TensorDesc], "tactic": int}
    returned = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
    _sign(implementation, tensors | declared | outputs, returned)
    trtp.register(name)(description)
    trtp.aot_impl(name)(implementation)


def launch_of(
    trtp: Any, kernel: CompiledKernel, attributes: KernelAttributes, shape: Any, key_shape: Any
) -> tuple[Any, ...]:
    """Return what TensorRT stores for a kernel: name, PTX, launch parameters and int32 arguments.

    Args:
        trtp: `tensorrt.plugin`.
        kernel: for the query's type and head size.
        attributes: of the node.
        shape: expressions of the query's four sizes.
        key_shape: those of the key.

    Raises:
        UsageError: the kernel cannot be launched for a node of this size.
    """
    length_axis = 1 if tuple(attributes.perm) == SEQUENCE_FIRST else 2
    batch, length, heads = shape[0], shape[length_axis], shape[3 - length_axis]
    kv_heads = key_shape[3 - length_axis]
    _refuse_sizes(attributes, batch=batch, heads=heads, length=length)
    launch = trtp.KernelLaunchParams()
    launch.grid_x = trtp.cdiv(length, kernel.tile.block_queries)
    launch.grid_y = batch * heads
    launch.block_x = kernel.threads
    launch.shared_mem = kernel.shared_bytes
    values = name_scalars(attributes, length, heads, kv_heads).values()
    scalars = trtp.SymIntExprs.from_tuple([trtp.SymInt32(value) for value in values])
    return kernel.entry, kernel.ptx, launch, scalars


def _attributes(variant: KernelNode, arrays: dict[str, Any]) -> KernelAttributes:
    """Return the node's attributes from the arrays TensorRT passes, by name."""
    number = {name: array.reshape(-1)[0].item() for name, array in arrays.items() if name != "perm"}
    geometry = geometry_of(number)
    perm = tuple(int(axis) for axis in arrays["perm"])
    if isinstance(variant, GroupedVariant):
        return GroupedAttributes(geometry, number["scale"], number.get("softcap", 0.0), perm)
    base = number.get("xpos_scale_base", 0.0)
    return NodeAttributes(geometry, number["scale"], bool(number["shared_qk"]), perm, xpos_scale_base=base)


def _known(size: Any) -> int:
    """Return a size as a number; refuse one that depends on the inputs."""
    if not size.is_constant:
        raise UsageError(
            "The head size of an attention node is dynamic.", why="A kernel is compiled for one head size."
        )
    return int(size.constant_value())


def _refuse_sizes(attributes: KernelAttributes, **sizes: Any) -> None:
    """Refuse sizes that no kernel supports; a size known only at launch counts as 1."""
    known = {name: int(size.constant_value()) if size.is_constant else 1 for name, size in sizes.items()}
    reason = why_unsupported(attributes, **known)
    if reason:
        raise UsageError("The kernel does not compute an attention node of this size.", why=f"{reason}.")


def _sign(function: Callable[..., Any], parameters: dict[str, Any], returned: Any) -> None:
    """Give a function the signature that `tensorrt.plugin` reads inputs and attributes from."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signed = [inspect.Parameter(name, kind, annotation=type_) for name, type_ in parameters.items()]
    function.__signature__ = inspect.Signature(signed, return_annotation=returned)  # type: ignore[attr-defined]
