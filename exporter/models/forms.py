"""Define what only some families have: models in a state dict, models in a folder, models that run step by step.

A family inherits from each form that its models have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...core.nodes.step import ring_slots
from ..options import ShapeRequest
from .family import ArgsT, Family, ModelSpec, State
from .inference import Findings, TensorShapes

# Name, shape and element type ("float", or numpy's name) of a tensor passed from call to call.
StepCache = tuple[str, tuple[int, ...], str]


class StateDictFamily(Family[ArgsT]):
    """A family whose models are recognised in a state dict, whose shapes show most of their arguments.

    Attributes:
        state_dict_of: what it is recognised by, in words, for an error that lists the families.
    """

    state_dict_of: str

    @abstractmethod
    def recognises_state(self, shapes: TensorShapes) -> bool:
        """Return whether the names in a state dict are this family's."""

    @abstractmethod
    def infer_arguments(self, shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
        """Infer arguments from shapes; given ones only decide where several fit equally.

        Raises:
            UsageError: a tensor is missing or has another number of axes.
        """

    def infer_values(self, state: State) -> Findings:
        """Infer arguments from values, where shapes do not show them."""
        return {}

    def follow(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arguments that follow from others and that no tensor shows."""
        return {}


@dataclass(frozen=True)
class FolderRequest:
    """What a user asks of a model in a folder.

    Args:
        task: what the model is for, where it is saved for something else; None for what it is.
        known: arguments in the sidecar of the file that the folder is compared with.
        shapes: sizes of an export, so that those which the model does not have are refused before weights are read;
            None where nothing is exported.
        steps: whether that export writes step files.
    """

    task: str | None = None
    known: Mapping[str, Any] = field(default_factory=dict)
    shapes: ShapeRequest | None = None
    steps: bool = False


@dataclass(frozen=True)
class FolderContents:
    """The contents of a folder with one model.

    Args:
        class_name: one of the family's classes.
        arguments: arguments of its constructor.
        state: its tensors, floating point ones in float32.
        notes: what was chosen or assumed, one line each.
        warnings: what may be wrong and no check of the file can see, one line each.
        original: loads upstream's own module from the user's files in fp32, apart from `state`: the reference. None in
            a family whose reference is a formula.
    """

    class_name: str
    arguments: Mapping[str, Any]
    state: State
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    original: Callable[[], nn.Module] | None = None


class FolderFamily(Family[ArgsT]):
    """A family whose models are read from a folder: a configuration, and weights in one file or several.

    Attributes:
        folder_of: what a folder is recognised by, in words, for an error that lists the families.
        accompanying_files: names of files in the folder that users of the exported file need, for example a
            tokenizer.
    """

    folder_of: str
    accompanying_files: tuple[str, ...] = ()

    @abstractmethod
    def recognises_folder(self, folder: Path) -> bool:
        """Return whether a folder is this family's."""

    @abstractmethod
    def files(self, folder: Path) -> list[Path]:
        """List the files that `read` reads, in a fixed order.

        Each must be a plain file, and the model's SHA-256 is computed from theirs.
        """

    @abstractmethod
    def read(self, folder: Path, request: FolderRequest) -> FolderContents:
        """Read these files: only tensors and plain data, and no code from the folder is run.

        Raises:
            UsageError: the model cannot be read, or not as it is asked for.
        """

    def read_live(self, module: nn.Module) -> FolderContents | None:
        """Read a live module of this family as the folder that it would be saved to; None for any other.

        Raises:
            UsageError: it is of this family, and cannot be exported.
        """
        return None


class StepFamily(Family[ArgsT]):
    """A family whose models take a few tokens at a time.

    Attributes:
        length_axis: the axis of data inputs and output that counts tokens.
        early_start: a call may begin before position 0, as `StepRecord.early_start` says.
    """

    length_axis: int = 1
    early_start: bool = False

    @abstractmethod
    def step_module(self, spec: ModelSpec[ArgsT], chunk: int) -> nn.Module:
        """Build the module for calls of `chunk` tokens, with weights not yet loaded."""

    @abstractmethod
    def step_call(
        self, module: Any, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call a module that `step_module` built.

        Args:
            module: the module.
            data: the data inputs of the call.
            position: of its first token, `[1]`.
            caches: as `step_caches` lists them.

        Returns:
            The output, and the next caches.
        """

    def step_caches(self, spec: ModelSpec[ArgsT]) -> list[StepCache]:
        """List the tensors passed from call to call: the rings of keys and values of every layer."""
        sizes, layers = spec.sizes, self.layers(spec.args)
        shape = (sizes.batch, sizes.heads, self.slots(spec.args), sizes.dim_head)
        return [(f"{part}_cache.{layer}", shape, "float") for layer in range(len(layers)) for part in ("key", "value")]

    def slots(self, args: ArgsT) -> int:
        """Return the number of keys that a layer's ring holds."""
        window = args.geometry()
        assert window is not None, "a family without windows says how many keys it keeps"
        return ring_slots(window)

    def max_positions(self, args: ArgsT) -> int | None:
        """Return the number of positions, if positions have learned weights; None if there is no limit."""
        return None

    def step_arguments(self, args: ArgsT, batch: int, max_length: int | None) -> ArgsT | None:
        """Return the arguments of a step file; None in a family whose arguments are the same in every file.

        Args:
            args: the model's.
            batch: number of sequences.
            max_length: the largest number of positions; None if the user gave none.

        Raises:
            UsageError: the model cannot run step by step, or not so far.
        """
        return None


def cache_pairs(caches: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Group caches by layer: key and value."""
    return list(zip(caches[::2], caches[1::2], strict=True))
