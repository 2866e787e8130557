"""Hugging Face models as a family: their file's inputs and outputs, and what computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....core.documents.window_view import WindowView, views
from ....core.geometry import WindowGeometry
from ....core.storage.accompanying_files import ACCOMPANYING_FILES
from ....core.tensors import POSITION_IDS
from ...options import ShapeRequest, Sizes
from ..family import Inputs, ModelSpec, State, UpstreamClass
from ..forms import FolderContents, FolderFamily, FolderRequest, StepCache, StepFamily
from ..parts.float64 import Float64State
from .arguments import HuggingFaceArgs
from .config import is_hugging_face, rotation_changes
from .folder import files
from .module import MASK, load, of_whole_sequences
from .reading import CLASS, decided_sizes, read_folder, read_live
from .reference import head_positions, reference, undecided, untouched
from .step_module import step_arguments, step_caches, step_module

# Sequences up to this are compared in any case.
_SHORT = 256


class HuggingFaceFamily(FolderFamily[HuggingFaceArgs], StepFamily[HuggingFaceArgs]):
    """Every `PreTrainedModel` of transformers whose layers have windows."""

    name = "hugging-face"
    arguments = HuggingFaceArgs
    classes = (UpstreamClass(CLASS),)
    window_argument = "window"
    tokens = ("input_ids",)
    dynamic = ("batch", "seq")
    extra_inputs = frozenset({POSITION_IDS})
    sizes_are_arguments = False
    has_experts = True
    key_mask = MASK
    fuses = True
    folder_of = "a Hugging Face model has architectures in config.json"
    accompanying_files = ACCOMPANYING_FILES
    early_start = True
    loads_reference = True

    def sizes(self, args: HuggingFaceArgs, request: ShapeRequest) -> Sizes:
        """Take as many positions as the configuration states, if no length is given."""
        return decided_sizes(args, request)

    def inputs(self, args: HuggingFaceArgs, sizes: Sizes) -> Inputs:
        """List token ids, mask of padding and positions, each `[B, N]`, as far as the file has them."""
        names = (*args.inputs, *((POSITION_IDS,) if sizes.position_ids else ()))
        return dict.fromkeys(names, ("int64", (sizes.batch, sizes.seq_len)))

    def outputs(self, args: HuggingFaceArgs) -> tuple[str, ...]:
        """Return those that the model returned when it was read."""
        return args.outputs

    def module(self, spec: ModelSpec[HuggingFaceArgs]) -> nn.Module:
        """Build upstream's own module, with its attention as nodes."""
        return of_whole_sequences(spec)

    def reference(
        self,
        spec: ModelSpec[HuggingFaceArgs],
        state: Float64State,
        inputs: Mapping[str, Tensor],
        positions: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Compute upstream's own module, loaded from the user's folder."""
        return reference(spec, state, inputs, positions)

    def load(self, module: nn.Module, state: State) -> None:
        """Load weights and buffers; what is tied in the state is tied in the module."""
        load(module, state)

    def token_limit(self, args: HuggingFaceArgs) -> int:
        """Return the size of the vocabulary."""
        return args.vocab_size

    def layers(self, args: HuggingFaceArgs) -> list[WindowGeometry]:
        """Return the windows that were read off the model's masks."""
        return [layer.geometry for layer in args.layers]

    def window_views(self, class_name: str, args: HuggingFaceArgs, sizes: Sizes | None) -> list[WindowView]:
        """Return the windows of the layers that do not see all keys, by their paths in the model."""
        length = args.longest if sizes is None else sizes.seq_len
        return views([(layer.path, layer.geometry) for layer in args.layers if not layer.geometry.sees_all], length)

    def undecided(
        self, spec: ModelSpec[HuggingFaceArgs], state: Float64State, inputs: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Tensor | None:
        """Return the tokens whose experts rounding decides."""
        return undecided(spec, state, inputs, dtype)

    def untouched(self, spec: ModelSpec[HuggingFaceArgs], original: Callable[[], nn.Module]) -> Callable[..., Tensor]:
        """Call upstream's own module in fp32."""
        return untouched(spec.args, original)

    def head_positions(self, spec: ModelSpec[HuggingFaceArgs]) -> NDArray[np.int64] | None:
        """Return the positions whose logits are compared, of a vocabulary so large that all would not fit."""
        return head_positions(spec)

    def longest_compared(self, args: HuggingFaceArgs) -> int:
        """Return a length over every window and change of rotary embedding: the cost grows with its square."""
        return max(2 * args.window + 2, _SHORT, *(length + 1 for length in rotation_changes(args.config)))

    def recognises_folder(self, folder: Path) -> bool:
        """Look for a configuration of transformers."""
        return is_hugging_face(folder)

    def files(self, folder: Path) -> list[Path]:
        """List config.json, then the files of weights."""
        return files(folder)

    def read(self, folder: Path, request: FolderRequest) -> FolderContents:
        """Read a folder with transformers."""
        return read_folder(folder, request)

    def read_live(self, module: nn.Module) -> FolderContents | None:
        """Read a live model of transformers."""
        return read_live(module)

    def step_module(self, spec: ModelSpec[HuggingFaceArgs], chunk: int) -> nn.Module:
        """Build upstream's own module, with its attention as step nodes."""
        return step_module(spec, chunk)

    def step_call(
        self, module: nn.Module, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call it with all data inputs."""
        outputs: tuple[Tensor, ...] = module(data, position, caches)
        return outputs

    def step_caches(self, spec: ModelSpec[HuggingFaceArgs]) -> list[StepCache]:
        """List the rings of every layer that has its own, then what hides padding."""
        return step_caches(spec)

    def max_positions(self, args: HuggingFaceArgs) -> int | None:
        """Return the positions that the step file was exported for."""
        return args.max_length

    def step_arguments(self, args: HuggingFaceArgs, batch: int, max_length: int | None) -> HuggingFaceArgs:
        """Return them with the number of positions, and with the inputs of a step file."""
        return step_arguments(args, batch, max_length)


HUGGING_FACE = HuggingFaceFamily()
