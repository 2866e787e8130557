"""Define what a family of models is: one row that says how its models are recognised, exported and compared.

A family lives in a folder of its own beside this file, with the same files in each: `arguments.py`, `infer.py`,
`module.py`, `step_module.py`, `reference.py`, where upstream's live layers are replaced `adapter.py`, and `family.py`,
which ends in the row. `registry.py` lists the rows; nothing outside a family's folder looks at its arguments' type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.documents.window_view import WindowView, views
from ...core.errors import UsageError
from ...core.geometry import WindowGeometry
from ...core.nodes.step import ring_slots
from .arguments import Arguments
from .inference import Findings, TensorShapes

Arrays = Mapping[str, NDArray[Any]]
State = Mapping[str, Tensor]
# Name → element type ("float", "int64", "bool") and shape; "float" is whatever the file's dtype makes of it.
Inputs = dict[str, tuple[str, tuple[int, ...]]]

# What matrices are stored and multiplied in.
TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Inputs and outputs. numpy has no bf16, and neither onnxruntime nor TensorRT passes it to or from Python.
NUMPY_DTYPE = {"fp32": "float32", "fp16": "float16", "bf16": "float32"}


@dataclass(frozen=True)
class ShapeRequest:
    """What the user asked the exported file's static shapes to be; None means: as the model says.

    Args:
        seq_len: sequence length `N`.
        batch: batch size `B`.
        heads: heads `H`, for the bare LocalAttention only.
        dim_head: head size `D`, for the bare LocalAttention only.
        mask: add the input `mask`, bool `[B, N]`, True = keep.
        attn_bias: add the input `attn_bias`, `[H, w, K]`.
        causal: AFTLocal only: the model was run with a causal mask.
        full_mask: AFTLocal only: add the input `full_mask`, bool `[T, T]`; costs O(T²) time.
        open_length: the sequence length is dynamic, up to `seq_len`.
    """

    seq_len: int | None = None
    batch: int = 1
    heads: int | None = None
    dim_head: int | None = None
    mask: bool = False
    attn_bias: bool = False
    causal: bool = False
    full_mask: bool = False
    dynamic_length: bool = False


@dataclass(frozen=True)
class Sizes:
    """The same, decided."""

    seq_len: int
    batch: int
    heads: int
    dim_head: int
    mask: bool
    attn_bias: bool
    causal: bool = False
    full_mask: bool = False
    dynamic_length: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model of a family at one choice of sizes, without its weights.

    Args:
        args: the family's arguments.
        sizes: of the exported file.
        mixes_residuals: which hyper-connections the weights were trained with.
    """

    args: Any
    sizes: Sizes
    mixes_residuals: bool


@dataclass(frozen=True)
class LayerCall:
    """One call of a live layer, arguments by their names.

    Args:
        shapes: of the tensors.
        given: every argument that is not None; masks as they were, other tensors without their data.
    """

    shapes: Mapping[str, tuple[int, ...]]
    given: Mapping[str, Any]


# Live layer, the calls seen of it, whether the length is dynamic → its window, or None where there is none.
Adapter = Callable[[nn.Module, Sequence[LayerCall], bool], WindowGeometry | None]
# Name, shape and element type ("float", or numpy's name) of a tensor handed from call to call.
StepCache = tuple[str, tuple[int, ...], str]
# Module, data inputs, position `[1]` and caches → output and next caches.
StepCall = Callable[[Any, Sequence[Tensor], Tensor, Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class UpstreamClass:
    """A supported class of a package.

    Args:
        name: `package.Class`, as written in a config.
        unsupported: arguments that cannot be given, each with the reason.
    """

    name: str
    unsupported: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepForm:
    """How a family's models take a few tokens at a time.

    Args:
        module: the module for chunks of a size, weights not yet loaded.
        call: how the module is called.
        caches: what is handed from call to call.
        length_axis: the axis of data inputs and output that counts tokens.
        max_positions: positions with learned numbers, or None where there is no end.
    """

    module: Callable[[ModelSpec, int], nn.Module]
    call: StepCall
    caches: Callable[[ModelSpec], list[StepCache]]
    length_axis: int = 1
    max_positions: Callable[[Any], int | None] = lambda args: None


def _no_values(state: State) -> Findings:
    return {}


def _nothing_follows(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def _window_views(class_name: str, args: Any) -> list[WindowView]:
    depth = getattr(args, "depth", 1)
    names = [f"layer {index + 1}" for index in range(depth)] if depth > 1 else [class_name]
    return views([(name, args.geometry()) for name in names], getattr(args, "max_seq_len", None))


@dataclass(frozen=True)
class Family:
    """One row of the registry.

    Args:
        name: short and unique.
        arguments: the model of its constructor arguments.
        classes: upstream's classes with these arguments.
        recognises: whether the names in a state dict are this family's.
        recognised_by: the same in words, for an error that lists them.
        infer_arguments: the arguments that shapes show; given ones only help where two would fit equally.
        expected_shapes: every tensor of the state dict.
        window_argument: what the class calls its window.
        sizes: decides what a request left open.
        inputs: of the exported file.
        output: its name.
        module: the export-friendly module, weights not yet loaded.
        reference: the output in float64, from float64 (or int64, bool) tensors by input name; with positions, only
            there.
        step: how it takes a few tokens at a time.
        geometry: the window of every attention layer; None where the sums go over the whole sequence.
        describe_window: the window in words.
        window_views: the same for a picture, at the longest sequence the model takes, by class name and arguments.
        infer_values: arguments that only values show, not shapes.
        follow: arguments that follow from others and stand in no tensor.
        adapters: import path of a live layer's class → how it is given an export-friendly forward.
        extra_inputs: options of `ShapeRequest` that only some families take.
        why_static: why its sizes cannot be dynamic; "" if they can.
        batch_axis: which axis of data inputs and output is the batch.
        samples: the reference can compute single positions, which long sequences need.
        casts_inputs: no matrix meets the inputs, so they themselves take the file's element type.
        sizes_are_arguments: heads and head size are arguments of the class, not shapes of its inputs.
    """

    name: str
    arguments: type[Arguments]
    classes: tuple[UpstreamClass, ...]
    recognises: Callable[[TensorShapes], bool]
    recognised_by: str
    infer_arguments: Callable[[TensorShapes, Mapping[str, Any]], Findings]
    expected_shapes: Callable[[Any], TensorShapes]
    window_argument: str
    sizes: Callable[[Any, ShapeRequest], Sizes]
    inputs: Callable[[Any, Sizes], Inputs]
    module: Callable[[ModelSpec], nn.Module]
    reference: Callable[[ModelSpec, State, Mapping[str, Tensor], Tensor | None], Tensor]
    step: StepForm
    output: Callable[[Any], str] = lambda args: "out"
    geometry: Callable[[Any], WindowGeometry | None] = lambda args: args.geometry()
    describe_window: Callable[[Any], str] = lambda args: str(args.geometry().describe())
    window_views: Callable[[str, Any], list[WindowView]] = _window_views
    infer_values: Callable[[State], Findings] = _no_values
    follow: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing_follows
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    extra_inputs: frozenset[str] = frozenset()
    why_static: str = ""
    batch_axis: int = 0
    samples: bool = False
    casts_inputs: bool = False
    sizes_are_arguments: bool = True


def needs_option(option: str, why: str) -> UsageError:
    """Make the error for an option that this model cannot do without."""
    return UsageError(f"{option} is needed.", why=why, fix=f"Add {option}.")


def sequence_length(request: ShapeRequest, default: int | None) -> int:
    """Decide the sequence length, and check that no size asked for is below 1.

    Raises:
        UsageError: a size below 1, or no length anywhere.
    """
    length = request.seq_len if request.seq_len is not None else default
    if length is None:
        raise needs_option("--seq-len", "The file has static shapes and nothing in this model tells the length.")
    for name, value in (("--seq-len", length), ("--batch", request.batch), ("--heads", request.heads)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}.", why="It must be at least 1.")
    if request.dim_head is not None and request.dim_head < 1:
        raise UsageError(f"--dim-head is {request.dim_head}.", why="It must be at least 1.")
    return length


def optional_inputs(geometry: WindowGeometry, sizes: Sizes) -> Inputs:
    """List the optional inputs of windowed attention, in upstream's order."""
    extras: Inputs = {}
    if sizes.mask:
        extras["mask"] = ("bool", (sizes.batch, sizes.seq_len))
    if sizes.attn_bias:
        extras["attn_bias"] = ("float", (sizes.heads, geometry.window_size, geometry.keys_per_window))
    return extras


def cache_pairs(caches: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Group caches by layer: key and value."""
    return list(zip(caches[::2], caches[1::2], strict=True))


def ring_caches(spec: ModelSpec) -> list[StepCache]:
    """List the rings of keys and values of every layer."""
    sizes = spec.sizes
    shape = (sizes.batch, sizes.heads, ring_slots(spec.args.geometry()), sizes.dim_head)
    layers = range(getattr(spec.args, "depth", 1))
    return [(f"{part}_cache.{layer}", shape, "float") for layer in layers for part in ("key", "value")]
