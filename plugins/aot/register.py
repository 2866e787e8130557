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
from ...core.geometry import WindowGeometry
from ...core.nodes.attention import PLUGIN_NAMESPACE, SEQUENCE_FIRST, VARIANTS, NodeAttributes, NodeVariant
from ..kernel.compile import CompiledKernel, compile_kernel
from ..kernel.spec import KernelSpec, pack_scalars, why_unsupported
from ..kernel.targets import Target
from .availability import why_not

# The types of the node's attributes as the ONNX parser passes them: numpy arrays. They are written out because
# `tensorrt.plugin` before TensorRT 11.3 does not know numpy 2.5's NDArray.
_INTEGERS, _FLOATS = np.ndarray[tuple[Any, ...], np.dtype[np.int32]], np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
ATTRIBUTES: dict[str, Any] = {
    "window_size": _INTEGERS,
    "look_backward": _INTEGERS,
    "look_forward": _INTEGERS,
    "causal": _INTEGERS,
    "exact_windowsize": _INTEGERS,
    "scale": _FLOATS,
    "shared_qk": _INTEGERS,
    "perm": _INTEGERS,
}
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
            why=f"This process has registered them for {_registered[0].name}, and TensorRT keeps one of a name.",
            fix="Build for one GPU a process.",
        )
    reason = why_not()
    if reason:
        raise MissingDependency(
            "Ahead-of-time plugins cannot be used here.",
            why=f"{reason}.",
            fix=f"Or take the library: {argument('plugin', 'library')}.",
        )
    trtp = importlib.import_module("tensorrt.plugin")
    for variant in VARIANTS:
        if not variant.has_xpos:
            _register(trtp, variant, target)
    _registered.append(target)


def _register(trtp: Any, variant: NodeVariant, target: Target) -> None:
    """Register one op type of the node."""
    name = f"{PLUGIN_NAMESPACE}::{variant.op_type}"
    inputs = len(variant.input_names)
    kernels: dict[KernelSpec, CompiledKernel] = {}

    def description(*tensors: Any, **attributes: Any) -> Any:
        return tensors[0].like()

    def implementation(*arguments: Any) -> Any:
        # Inputs, attributes, outputs and the tactic all come by position here; a description gets attributes by name.
        attributes = _attributes(arguments[inputs : inputs + len(ATTRIBUTES)])
        query = arguments[0]
        spec = KernelSpec(_DTYPES[query.dtype.name], _known(query.shape_expr[3]), variant.has_mask, variant.has_bias)
        if spec not in kernels:
            kernels[spec] = compile_kernel(spec, target)
        return launch_of(trtp, kernels[spec], attributes, query.shape_expr)

    tensors = dict.fromkeys(variant.input_names, trtp.TensorDesc)
    _sign(description, tensors | ATTRIBUTES, tuple[trtp.TensorDesc])
    outputs = {"outputs": tuple[trtp.TensorDesc], "tactic": int}
    returned = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
    _sign(implementation, tensors | ATTRIBUTES | outputs, returned)
    trtp.register(name)(description)
    trtp.aot_impl(name)(implementation)


def launch_of(trtp: Any, kernel: CompiledKernel, attributes: NodeAttributes, shape: Any) -> tuple[Any, ...]:
    """Return what TensorRT stores of a kernel: name, PTX, launch parameters and int32 arguments.

    Args:
        trtp: `tensorrt.plugin`.
        kernel: for the query's type and head size.
        attributes: of the node.
        shape: expressions of the query's four sizes.

    Raises:
        UsageError: the kernel cannot be launched for a node of this size.
    """
    length_axis = 1 if tuple(attributes.perm) == SEQUENCE_FIRST else 2
    batch, length, heads = shape[0], shape[length_axis], shape[3 - length_axis]
    _refuse_sizes(attributes, batch=batch, heads=heads, length=length)
    launch = trtp.KernelLaunchParams()
    launch.grid_x = trtp.cdiv(length, kernel.tile.block_queries)
    launch.grid_y = batch * heads
    launch.block_x = kernel.threads
    launch.shared_mem = kernel.shared_bytes
    constants = pack_scalars(attributes, 0, 0)[2:]
    scalars = trtp.SymIntExprs.from_tuple([trtp.SymInt32(value) for value in (length, heads, *constants)])
    return kernel.entry, kernel.ptx, launch, scalars


def _attributes(values: tuple[Any, ...]) -> NodeAttributes:
    """Return the node's attributes from the arrays TensorRT passes, in the order of `ATTRIBUTES`."""
    arrays = dict(zip(ATTRIBUTES, values, strict=True))
    number = {name: array.reshape(-1)[0].item() for name, array in arrays.items() if name != "perm"}
    geometry = WindowGeometry(
        number["window_size"],
        number["look_backward"],
        number["look_forward"],
        bool(number["causal"]),
        bool(number["exact_windowsize"]),
    )
    perm = tuple(int(axis) for axis in arrays["perm"])
    return NodeAttributes(geometry, number["scale"], bool(number["shared_qk"]), perm)


def _known(size: Any) -> int:
    """Return a size as a number; refuse one that depends on the inputs."""
    if not size.is_constant:
        raise UsageError("The head size of an attention node is open.", why="Its kernel is compiled for one size.")
    return int(size.constant_value())


def _refuse_sizes(attributes: NodeAttributes, **sizes: Any) -> None:
    """Refuse sizes that no kernel computes; a size known only at launch counts as 1."""
    known = {name: int(size.constant_value()) if size.is_constant else 1 for name, size in sizes.items()}
    reason = why_unsupported(attributes, **known)
    if reason:
        raise UsageError("The kernel does not compute an attention node of this size.", why=f"{reason}.")


def _sign(function: Callable[..., Any], parameters: dict[str, Any], returned: Any) -> None:
    """Give a function the signature that `tensorrt.plugin` reads inputs and attributes from."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signed = [inspect.Parameter(name, kind, annotation=type_) for name, type_ in parameters.items()]
    function.__signature__ = inspect.Signature(signed, return_annotation=returned)  # type: ignore[attr-defined]
