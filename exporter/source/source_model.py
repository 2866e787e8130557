"""The model to export: its resolved configuration, its weights, and the requested shapes.

The model's family defines its inputs and outputs, the module that computes it, and its reference. Export and parity use
a `SourceModel` and never look at the class themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.documents.sidecar import class_title
from ...core.documents.window_view import WindowView
from ...core.dtypes import IO_NAME, weights_beyond
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.geometry import WindowGeometry
from ...core.tensors import BATCH, SEQUENCE, TensorSpec
from ..models.arguments import Arguments
from ..models.family import TORCH_DTYPE, Arrays, ModelSpec
from ..models.forms import StateDictFamily
from ..models.inference import bounded
from ..models.parts.float64 import Float64State
from ..models.registry import CLASSES
from ..options import ShapeRequest, Sizes
from .upstream_class import fits, run


def signature(class_name: str, args: Arguments, **optional: bool) -> list[TensorSpec]:
    """List the inputs of a class in float32, with names in place of the sizes that a file chooses.

    Args:
        class_name: a key of `models.registry.CLASSES`.
        args: the class's arguments.
        optional: which inputs of `Sizes` the file has.
    """
    sizes: Any = {"seq_len": SEQUENCE, "batch": BATCH, "heads": "heads", "dim_head": "dim_head"}
    shapes = Sizes(**{**sizes, "mask": False, "attn_bias": False, **optional})
    inputs = CLASSES[class_name].family.inputs(args, shapes)
    return [TensorSpec(name, {"float": "float32"}.get(kind, kind), shape) for name, (kind, shape) in inputs.items()]


def as_tensors(arrays: Arrays, floats: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return arrays as tensors by name, floating point ones in the type `floats` if it is given."""
    # Not `ascontiguousarray`, which turns a scalar into a vector.
    tensors = {name: torch.from_numpy(np.asarray(x, order="C")) for name, x in arrays.items()}
    return {name: x.to(floats) if floats and x.is_floating_point() else x for name, x in tensors.items()}


class SourceModel:
    """A model at one choice of shapes.

    Args:
        class_name: a key of `models.registry.CLASSES`.
        args: the class's arguments.
        state: its state dict, upstream's names, fp32.
        mixes_residuals: which hyper-connections the weights were trained with.
        request: the requested shapes.
        not_in_weights: arguments that change the outputs and that no tensor shows.
        original: loads upstream's own module from the user's files, where the reference is that: see `FolderContents`,
            and `upstream_class` for models in a state dict.
    """

    def __init__(
        self,
        class_name: str,
        args: Arguments,
        state: Mapping[str, Tensor],
        mixes_residuals: bool,
        request: ShapeRequest,
        not_in_weights: Sequence[str] = (),
        original: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.class_name, self.args, self.state, self.not_in_weights = class_name, args, state, tuple(not_in_weights)
        self.mixes_residuals, self.original = mixes_residuals, original
        self.family = CLASSES[class_name].family
        self._float64 = Float64State(state, original)
        if (request.causal or request.full_mask) and not {"causal", "full_mask"} <= self.family.extra_inputs:
            raise UsageError(
                f"{argument('causal')} and {argument('full_mask')} do not apply to {self.title}.",
                why="Whether it is causal is an argument of the class; AFTLocal gets a mask instead.",
                fix="Say it in the config.",
            )
        if request.position_ids and "position_ids" not in self.family.extra_inputs:
            raise UsageError(
                f"{argument('position_ids', True)} does not apply to {self.title}.", why="It counts positions itself."
            )
        self.shapes = replace(self.family.sizes(args, request), dynamic_length=request.dynamic_length)

    def at(self, request: ShapeRequest, args: Arguments | None = None) -> SourceModel:
        """Return the same model at other shapes, and with other arguments if they are given."""
        given = (self.class_name, args or self.args, self.state, self.mixes_residuals)
        same = args is None or args == self.args
        other = SourceModel(*given, request, self.not_in_weights, self.original if same else None)
        if same:
            other._float64 = self._float64  # so that a reference that is a module is loaded only once
        return other

    def resized(self, **sizes: Any) -> SourceModel:
        """Return the same model with other values of some sizes.

        Raises:
            UsageError: the model does not accept them.
        """
        return self.at(replace(self.shapes, **sizes))

    def loaded_original(self) -> nn.Module:
        """Return upstream's own module, loaded from the user's files once for the reference and for its own error."""
        return self._float64.original()

    @property
    def work(self) -> int:
        """How many numbers a token is multiplied by; without tables whose logits are compared at few positions."""
        tensors = {id(x): x for x in self.state.values()}.values()
        tables = 0 if self.family.head_positions(self.spec) is None else self.token_limit
        return sum(x.numel() for x in tensors if not (x.ndim == 2 and tables and len(x) == tables))

    def forget_weights(self) -> None:
        """Free the weights where nothing needs them once the file is written; their shapes stay.

        That is where the reference is upstream's own module, which is loaded from the user's files.
        """
        if not self.family.loads_reference or not isinstance(self.state, dict):
            return
        bare: dict[int, Tensor] = {}
        for name, x in list(self.state.items()):
            self.state[name] = bare.setdefault(id(x), torch.empty_like(x, device="meta"))
            bare[id(self.state[name])] = self.state[name]

    @property
    def title(self) -> str:
        """The class in words, as a sidecar has it."""
        return class_title(self.class_name, self.args.model_dump(include={"architecture"}))

    @property
    def spec(self) -> ModelSpec[Any]:
        """The model without its weights, as the methods of its family take it."""
        return ModelSpec(self.args, self.shapes, self.mixes_residuals)

    @property
    def geometry(self) -> WindowGeometry | None:
        """The window of every attention layer, or the widest; None for a model that sums over the whole sequence."""
        return self.args.geometry()

    @property
    def layers(self) -> list[WindowGeometry]:
        """The windows of the attention layers, one after another; empty if they sum over the whole sequence."""
        return self.family.layers(self.args)

    @property
    def windows(self) -> list[WindowGeometry]:
        """The different windows of the attention layers."""
        return list(dict.fromkeys(self.layers))

    @property
    def window_size(self) -> int:
        """Tokens per window; for AFTLocal the reach of its learned biases."""
        size: int = getattr(self.args, self.family.window_argument)
        return size

    def receptive_intervals(self, query: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first positions that can change the outputs at some positions, and one past the last ones."""
        length = self.shapes.seq_len
        if self.geometry is None:
            return np.zeros_like(query), query + 1 if self.shapes.causal else np.full_like(query, length)
        first, last = query, query
        for window in reversed(self.layers):
            first, last = window.visible_interval(first, length)[0], window.visible_interval(last, length)[1] - 1
        return first, last + 1

    def describe_window(self) -> str:
        """Describe the window in words, for reports."""
        words = self.args.describe()
        if self.geometry is not None:
            return words
        return f"{'causal' if self.shapes.causal else 'non-causal'}, {words}"

    def window_views(self) -> list[WindowView]:
        """Return the windows of the attention layers, for pictures."""
        return self.family.window_views(self.class_name, self.args, self.shapes)

    @property
    def depth(self) -> int:
        """Number of attention layers one after another."""
        return getattr(self.args, "depth", 1)

    @property
    def token_limit(self) -> int | None:
        """Number of tokens in the vocabulary, or None if the inputs are embeddings."""
        return self.family.token_limit(self.args)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs; the first is the one per token."""
        return self.family.outputs(self.args)

    def inputs(self, dtype: str) -> list[TensorSpec]:
        """List the file's inputs if it is exported in `dtype`, a key of `IO_NAME`."""
        element = {"float": IO_NAME[dtype]}
        return [
            TensorSpec(name, element.get(kind, kind), shape)
            for name, (kind, shape) in self.family.inputs(self.args, self.shapes).items()
        ]

    def module(self, dtype: str, build: Callable[[], nn.Module] | None = None) -> nn.Module:
        """Build the export-friendly module with its weights and constants, in `dtype`.

        Args:
            dtype: the file's element type, a key of `IO_NAME`.
            build: builds another form of the module instead, for example the one that takes steps.

        Raises:
            UsageError: weights are beyond the largest number of `dtype`; the error names them.
        """
        with torch.device("meta"):
            module = build() if build is not None else self.family.module(self.spec)
        self.family.load(module, self.state)
        for part in module.modules():
            prepare = getattr(part, "prepare", None)
            if prepare is not None:
                prepare()
            # Matrices, embeddings, rotary tables and position biases take the file's dtype. Norms, residual streams and
            # their few weights stay fp32: in fp16 or bf16 they would cost most of the accuracy.
            if isinstance(part, (nn.Linear, nn.Embedding)) or getattr(part, "takes_file_dtype", False):
                part.to(TORCH_DTYPE[dtype])
        self._check_range(module, dtype)
        return module.requires_grad_(False).eval()

    def _check_range(self, module: nn.Module, dtype: str) -> None:
        """Refuse weights that became infinite in the file's dtype; those of the state are finite.

        Raises:
            UsageError: some weights became infinite.
        """
        beyond = [name for name, tensor in module.named_parameters() if not bool(tensor.isfinite().all())]
        if not beyond:
            return
        largest = max((float(self.state[name].abs().max()) for name in beyond if name in self.state), default=math.inf)
        raise weights_beyond(bounded(beyond, 3), largest, dtype)

    def undecided(self, inputs: Arrays, dtype: str) -> NDArray[np.bool_] | None:
        """Return the tokens `[B, N]` whose experts rounding decides in half precision; None if there are none.

        Args:
            inputs: the file's, without NaN or Inf.
            dtype: the file's element type.
        """
        if not self.family.has_experts or dtype == "fp32":
            return None
        found = self.family.undecided(self.spec, self._float64, as_tensors(inputs), TORCH_DTYPE[dtype])
        return None if found is None else found.numpy()

    def reference(self, inputs: Arrays, positions: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.float64]]:
        """Compute the float64 reference's outputs on the file's inputs, by name.

        If positions are given, only these are computed, provided the family can.
        """
        with torch.no_grad():
            rows = None if positions is None else torch.from_numpy(positions)
            tensors = as_tensors(inputs, torch.float64)
            formula = partial(self.family.reference, self.spec, self._float64, tensors, rows)
            is_formula = isinstance(self.family, StateDictFamily)  # of a folder it is upstream's own module
            if is_formula and self.original is not None and rows is None and fits(self.args, self.shapes):
                outputs = run(self._float64.original(), tensors, formula)
            else:
                outputs = formula()
        return {name: output.numpy() for name, output in zip(self.outputs, outputs, strict=True)}
