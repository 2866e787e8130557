"""The model to export: its resolved configuration, its weights, and the shapes asked for.

One entry of `KINDS` per sort of model says what goes in, what comes out, which module computes it and which
reference judges it. Export and parity ask a `SourceModel` and never look at the class themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.errors import UsageError
from ..core.geometry import WindowGeometry
from ..core.tensors import TensorSpec
from .checkpoint.config import CLASSES, AnyArgs
from .models.aft_local.arguments import AFTLocalArgs
from .models.aft_local.module import AFTLocal
from .models.aft_local.reference import aft_local
from .models.arguments import LocalAttentionArgs, LocalMHAArgs, LocalTransformerArgs
from .models.local_attention.module import LocalAttention
from .models.local_mha.module import LocalMHA
from .models.local_transformer.module import DynamicPositionBias, LocalTransformer
from .models.parts import float64
from .models.parts.rotary import RotaryTable

Arrays = Mapping[str, NDArray[Any]]

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
        open_length: the sequence length is open, up to `seq_len`.
    """

    seq_len: int | None = None
    batch: int = 1
    heads: int | None = None
    dim_head: int | None = None
    mask: bool = False
    attn_bias: bool = False
    causal: bool = False
    full_mask: bool = False
    open_length: bool = False


@dataclass(frozen=True)
class Shapes:
    """The same, decided."""

    seq_len: int
    batch: int
    heads: int
    dim_head: int
    mask: bool
    attn_bias: bool
    causal: bool = False
    full_mask: bool = False
    open_length: bool = False


@dataclass(frozen=True)
class ModelKind:
    """How one sort of model is exported and judged.

    Args:
        shapes: decides what the request left open.
        inputs: names, shapes and element types ("float", "int64", "bool") of the data inputs.
        output: name of the output.
        module: the export-friendly module, weights not yet loaded.
        reference: the fp64 oracle, on fp64 (or int64, bool) tensors by input name; with positions, only there.
        batch_axis: which axis of data inputs and output is the batch.
        samples: the reference can compute single positions, which long sequences need.
        casts_inputs: no matrix meets the inputs, so they themselves take the file's element type.
    """

    shapes: Callable[[Any, ShapeRequest], Shapes]
    inputs: Callable[[Any, Shapes], dict[str, tuple[str, tuple[int, ...]]]]
    output: Callable[[Any], str]
    module: Callable[[Any, Shapes, bool], nn.Module]
    reference: Callable[[Any, SourceModel, Mapping[str, Tensor], Mapping[str, Tensor], Tensor | None], Tensor]
    batch_axis: int = 0
    samples: bool = False
    casts_inputs: bool = False


def _needs(option: str, why: str) -> UsageError:
    return UsageError(f"{option} is needed.", why=why, fix=f"Add {option}.")


def _attention_shapes(args: LocalAttentionArgs, request: ShapeRequest) -> Shapes:
    dim_head = request.dim_head or args.rotary_dim
    if args.rotary_dim is not None and dim_head != args.rotary_dim:
        raise UsageError(
            f"--dim-head is {dim_head}, but the rotary embedding is {args.rotary_dim} wide.",
            why="Rotary turns the whole head.",
            fix=f"Use --dim-head {args.rotary_dim}.",
        )
    if dim_head is None:
        raise _needs("--dim-head", "LocalAttention without rotary has no weights that tell the head size.")
    if request.heads is None:
        raise _needs("--heads", "LocalAttention has no weights that tell the number of heads.")
    length = _length(request, None)
    if not args.autopad and length % args.window_size:
        raise UsageError(
            f"--seq-len {length} is no multiple of the window size {args.window_size}.",
            why="This LocalAttention has autopad=False and refuses such a length.",
            fix="Use a multiple, or autopad=true in the config.",
        )
    return Shapes(length, request.batch, request.heads, dim_head, request.mask, request.attn_bias)


def _mha_shapes(args: LocalMHAArgs, request: ShapeRequest) -> Shapes:
    length = _length(request, None)
    return Shapes(length, request.batch, args.heads, args.dim_head, request.mask, request.attn_bias)


def _transformer_shapes(args: LocalTransformerArgs, request: ShapeRequest) -> Shapes:
    if request.attn_bias:
        raise UsageError(
            "--attn-bias does not apply to LocalTransformer.",
            why="Its forward takes no attention bias; a dynamic position bias is part of its weights.",
        )
    length = _length(request, args.max_seq_len)
    if args.num_tokens is not None and args.max_seq_len is not None and length > args.max_seq_len:
        raise UsageError(
            f"--seq-len {length} is beyond the model's max_seq_len {args.max_seq_len}.",
            why="There is no learned position embedding past it.",
            fix=f"Use --seq-len {args.max_seq_len} or less.",
        )
    return Shapes(length, request.batch, args.heads, args.dim_head, request.mask, False)


def _aft_shapes(args: AFTLocalArgs, request: ShapeRequest) -> Shapes:
    if request.attn_bias:
        raise UsageError("--attn-bias does not apply to AFTLocal.", why="Its biases are part of its weights.")
    length = _length(request, args.seq_len)
    if length > args.seq_len:
        raise UsageError(
            f"--seq-len {length} is beyond the model's seq_len {args.seq_len}.",
            why="There are no learned biases past it.",
            fix=f"Use --seq-len {args.seq_len} or less.",
        )
    return Shapes(length, request.batch, 1, args.d_model, request.mask, False, request.causal, request.full_mask)


def _aft_inputs(args: AFTLocalArgs, shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    data = (shapes.seq_len, shapes.batch, args.d_model)
    inputs: dict[str, tuple[str, tuple[int, ...]]] = dict.fromkeys(("query", "key", "value"), ("float", data))
    if shapes.mask:
        inputs["mask"] = ("bool", (shapes.batch, shapes.seq_len))
    if shapes.full_mask:
        inputs["full_mask"] = ("bool", (shapes.seq_len, shapes.seq_len))
    return inputs


def _length(request: ShapeRequest, default: int | None) -> int:
    length = request.seq_len if request.seq_len is not None else default
    if length is None:
        raise _needs("--seq-len", "The file has static shapes and nothing in this model tells the length.")
    for name, value in (("--seq-len", length), ("--batch", request.batch), ("--heads", request.heads)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}.", why="It must be at least 1.")
    if request.dim_head is not None and request.dim_head < 1:
        raise UsageError(f"--dim-head is {request.dim_head}.", why="It must be at least 1.")
    return length


def _extras(geometry: WindowGeometry, shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The optional inputs, in upstream's order."""
    extras: dict[str, tuple[str, tuple[int, ...]]] = {}
    if shapes.mask:
        extras["mask"] = ("bool", (shapes.batch, shapes.seq_len))
    if shapes.attn_bias:
        extras["attn_bias"] = ("float", (shapes.heads, geometry.window_size, geometry.keys_per_window))
    return extras


def _attention_inputs(args: LocalAttentionArgs, shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    shape = (shapes.batch, shapes.heads, shapes.seq_len, shapes.dim_head)
    return dict.fromkeys(("q", "k", "v"), ("float", shape)) | _extras(args.geometry(), shapes)


def _mha_inputs(args: LocalMHAArgs, shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {"x": ("float", (shapes.batch, shapes.seq_len, args.dim))} | _extras(args.geometry(), shapes)


def _transformer_inputs(args: LocalTransformerArgs, shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    rows = (shapes.batch, shapes.seq_len)
    data = {"x": ("float", (*rows, args.dim))} if args.num_tokens is None else {"tokens": ("int64", rows)}
    return data | _extras(args.geometry(), shapes)


KINDS: Mapping[str, ModelKind] = {
    "attention": ModelKind(
        shapes=_attention_shapes,
        inputs=_attention_inputs,
        output=lambda args: "out",
        module=lambda args, shapes, _: LocalAttention(
            args, shapes.seq_len, shapes.dim_head, open_length=shapes.open_length
        ),
        reference=lambda args, _, state, x, __: float64.local_attention(
            args, state, x["q"], x["k"], x["v"], x.get("mask"), x.get("attn_bias")
        ),
        casts_inputs=True,
    ),
    "mha": ModelKind(
        shapes=_mha_shapes,
        inputs=_mha_inputs,
        output=lambda args: "out",
        module=lambda args, shapes, _: LocalMHA(args, shapes.seq_len, open_length=shapes.open_length),
        reference=lambda args, _, state, x, __: float64.local_mha(
            args, state, x["x"], x.get("mask"), x.get("attn_bias")
        ),
    ),
    "transformer": ModelKind(
        shapes=_transformer_shapes,
        inputs=_transformer_inputs,
        output=lambda args: "out" if args.num_tokens is None else "logits",
        module=lambda args, shapes, mixes: LocalTransformer(
            args, shapes.seq_len, mixes_residuals=mixes, open_length=shapes.open_length
        ),
        reference=lambda args, source, state, x, rows: float64.local_transformer(
            args, source.mixes_residuals, state, next(iter(x.values())), x.get("mask"), rows
        ),
        samples=True,
    ),
    "aft": ModelKind(
        shapes=_aft_shapes,
        inputs=_aft_inputs,
        output=lambda args: "out",
        module=lambda args, shapes, _: AFTLocal(args, shapes.seq_len, causal=shapes.causal, full_mask=shapes.full_mask),
        reference=lambda args, source, state, x, rows: aft_local(
            args,
            state,
            x["query"],
            x["key"],
            x["value"],
            x.get("mask"),
            x.get("full_mask"),
            causal=source.shapes.causal,
            rows=rows,
        ),
        batch_axis=1,
        samples=True,
    ),
}


class SourceModel:
    """A model at one choice of shapes.

    Args:
        class_name: a key of `core.config.CLASSES`.
        args: the class's arguments.
        state: its state dict, upstream's names, fp32.
        mixes_residuals: which hyper-connections the weights were trained with.
        request: the shapes asked for.
    """

    class_name: str
    args: AnyArgs
    state: Mapping[str, Tensor]
    mixes_residuals: bool
    kind: ModelKind
    shapes: Shapes

    def __init__(
        self,
        class_name: str,
        args: AnyArgs,
        state: Mapping[str, Tensor],
        mixes_residuals: bool,
        request: ShapeRequest,
    ) -> None:
        self.class_name, self.args, self.state = class_name, args, state
        self.mixes_residuals = mixes_residuals
        self.kind = KINDS[CLASSES[class_name].kind]
        if (request.causal or request.full_mask) and not isinstance(args, AFTLocalArgs):
            raise UsageError(
                f"--causal and --full-mask do not apply to {class_name}.",
                why="Whether it is causal is an argument of the class; AFTLocal gets a mask instead.",
                fix="Say it in the config.",
            )
        self.shapes = replace(self.kind.shapes(args, request), open_length=request.open_length)

    def at(self, request: ShapeRequest) -> SourceModel:
        """The same model at other shapes."""
        return SourceModel(self.class_name, self.args, self.state, self.mixes_residuals, request)

    @property
    def geometry(self) -> WindowGeometry | None:
        """The window of every attention layer; None for AFTLocal, which sums over the whole sequence."""
        return None if isinstance(self.args, AFTLocalArgs) else self.args.geometry()

    @property
    def window_size(self) -> int:
        """Tokens a window; for AFTLocal the reach of its learned biases."""
        return self.args.local_window_size if isinstance(self.args, AFTLocalArgs) else self.args.geometry().window_size

    def receptive_interval(self, query: int) -> tuple[int, int]:
        """The positions that can change the output at `query`: `[first, end)`."""
        length = self.shapes.seq_len
        if self.geometry is not None:
            return self.geometry.receptive_interval(query, length, self.depth)
        return 0, query + 1 if self.shapes.causal else length

    def describe_window(self) -> str:
        """The window in words, for reports."""
        if self.geometry is not None:
            return self.geometry.describe()
        reach = f"learned biases up to {self.window_size - 1} positions away, 0 beyond"
        return f"{'causal' if self.shapes.causal else 'non-causal'}, {reach}"

    @property
    def depth(self) -> int:
        """How many attention layers stand one after another."""
        return getattr(self.args, "depth", 1)

    @property
    def token_limit(self) -> int | None:
        """Number of tokens in the vocabulary, or None where embeddings go in."""
        return getattr(self.args, "num_tokens", None)

    @property
    def output_name(self) -> str:
        """Name of the output."""
        return self.kind.output(self.args)

    def inputs(self, dtype: str) -> list[TensorSpec]:
        """The file's inputs when it is exported in `dtype`, a key of `NUMPY_DTYPE`."""
        element = {"float": NUMPY_DTYPE[dtype]}
        return [
            TensorSpec(name, element.get(kind, kind), shape)
            for name, (kind, shape) in self.kind.inputs(self.args, self.shapes).items()
        ]

    def module(self, dtype: str, build: Callable[[], nn.Module] | None = None) -> nn.Module:
        """The export-friendly module with its weights and constants, in `dtype`; `build` makes another form of it."""
        with torch.device("meta"):
            module = build() if build is not None else self.kind.module(self.args, self.shapes, self.mixes_residuals)
        state = {name: tensor.float() for name, tensor in self.state.items()}
        for name, buffer in module.named_buffers():
            if name.endswith("inv_freq") and name not in state:  # old checkpoints lack it; the formula is fixed
                dim = 2 * buffer.shape[0]
                state[name] = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        module.load_state_dict(state, strict=True, assign=True)
        for part in module.modules():
            prepare = getattr(part, "prepare", None)
            if prepare is not None:
                prepare()
            # Matrices, embeddings, rotary tables and position biases take the file's dtype. Norms, residual streams and
            # the few numbers that steer them stay fp32: in fp16 or bf16 they cost most of the accuracy.
            if isinstance(part, (nn.Linear, nn.Embedding, RotaryTable, DynamicPositionBias)):
                part.to(TORCH_DTYPE[dtype])
        return module.requires_grad_(False).eval()

    def reference(self, inputs: Arrays, positions: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.float64]]:
        """The fp64 oracle's outputs on the file's inputs, by name; at some positions only, if the kind can."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()}
        tensors = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        state = float64.InDouble(self.state)
        with torch.no_grad():
            rows = None if positions is None else torch.from_numpy(positions)
            output = self.kind.reference(self.args, self, state, tensors, rows)
        return {self.output_name: output.numpy()}
