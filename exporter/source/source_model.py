"""The model to export: its resolved configuration, its weights, and the shapes asked for.

The model's family says what goes in, what comes out, which module computes it and what its reference is. Export and
parity ask a `SourceModel` and never look at the class themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.errors import UsageError
from ...core.geometry import WindowGeometry
from ...core.tensors import TensorSpec
from ..models.arguments import Arguments
from ..models.family import NUMPY_DTYPE, TORCH_DTYPE, Arrays, Family, ModelSpec, ShapeRequest, Sizes
from ..models.parts.float64 import Float64State
from ..models.registry import CLASSES


def signature(
    class_name: str, args: Arguments, mask: bool = False, attn_bias: bool = False, full_mask: bool = False
) -> list[TensorSpec]:
    """The inputs of a class in float32, with names in place of the sizes that a file chooses."""
    sizes: Any = {"seq_len": "seq", "batch": "batch", "heads": "heads", "dim_head": "dim_head"}
    shapes = Sizes(**sizes, mask=mask, attn_bias=attn_bias, full_mask=full_mask)
    inputs = CLASSES[class_name].family.inputs(args, shapes)
    return [TensorSpec(name, {"float": "float32"}.get(kind, kind), shape) for name, (kind, shape) in inputs.items()]


class SourceModel:
    """A model at one choice of shapes.

    Args:
        class_name: a key of `models.registry.CLASSES`.
        args: the class's arguments.
        state: its state dict, upstream's names, fp32.
        mixes_residuals: which hyper-connections the weights were trained with.
        request: the shapes asked for.
    """

    class_name: str
    args: Arguments
    state: Mapping[str, Tensor]
    mixes_residuals: bool
    kind: Family
    shapes: Sizes

    def __init__(
        self,
        class_name: str,
        args: Arguments,
        state: Mapping[str, Tensor],
        mixes_residuals: bool,
        request: ShapeRequest,
    ) -> None:
        self.class_name, self.args, self.state = class_name, args, state
        self.mixes_residuals = mixes_residuals
        self.kind = CLASSES[class_name].family
        if (request.causal or request.full_mask) and not {"causal", "full_mask"} <= self.kind.extra_inputs:
            raise UsageError(
                f"--causal and --full-mask do not apply to {class_name}.",
                why="Whether it is causal is an argument of the class; AFTLocal gets a mask instead.",
                fix="Say it in the config.",
            )
        self.shapes = replace(self.kind.sizes(args, request), dynamic_length=request.dynamic_length)

    def at(self, request: ShapeRequest) -> SourceModel:
        """The same model at other shapes."""
        return SourceModel(self.class_name, self.args, self.state, self.mixes_residuals, request)

    @property
    def spec(self) -> ModelSpec:
        """The same without the weights, as its family takes it."""
        return ModelSpec(self.args, self.shapes, self.mixes_residuals)

    @property
    def geometry(self) -> WindowGeometry | None:
        """The window of every attention layer; None for a model that sums over the whole sequence."""
        return self.kind.geometry(self.args)

    @property
    def window_size(self) -> int:
        """Tokens a window; for AFTLocal the reach of its learned biases."""
        size: int = getattr(self.args, self.kind.window_argument)
        return size

    def receptive_interval(self, query: int) -> tuple[int, int]:
        """The positions that can change the output at `query`: `[first, end)`."""
        length = self.shapes.seq_len
        if self.geometry is not None:
            return self.geometry.receptive_interval(query, length, self.depth)
        return 0, query + 1 if self.shapes.causal else length

    def describe_window(self) -> str:
        """The window in words, for reports."""
        words = self.kind.describe_window(self.args)
        if self.geometry is not None:
            return words
        return f"{'causal' if self.shapes.causal else 'non-causal'}, {words}"

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
            module = build() if build is not None else self.kind.module(self.spec)
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
            if isinstance(part, (nn.Linear, nn.Embedding)) or getattr(part, "takes_file_dtype", False):
                part.to(TORCH_DTYPE[dtype])
        return module.requires_grad_(False).eval()

    def reference(self, inputs: Arrays, positions: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.float64]]:
        """The float64 reference's outputs on the file's inputs, by name; at some positions only, if the kind can."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()}
        tensors = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        state = Float64State(self.state)
        with torch.no_grad():
            rows = None if positions is None else torch.from_numpy(positions)
            output = self.kind.reference(self.spec, state, tensors, rows)
        return {self.output_name: output.numpy()}
