"""Define a family of models: an abstract class that says how its models are described, exported and compared.

A family is a folder next to this file and a row of `registry.py`. Each folder has the same files: `arguments.py`,
`module.py`, `step_module.py`, `reference.py`, `infer.py` if it takes more than a few lines to read arguments off
weights, `adapter.py` if upstream's live layers can be replaced, and `family.py` with a subclass of `Family`. Nothing
outside a family's folder looks at its arguments' type.

What only some families have are subclasses in `forms.py`: models in a state dict (`StateDictFamily`), models in a
folder (`FolderFamily`), models that take a few tokens at a time (`StepFamily`). A family inherits from those it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...core.documents.window_view import WindowView, views
from ...core.dtypes import NUMPY_NAME
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.geometry import WindowGeometry
from ..options import ShapeRequest, Sizes
from .arguments import Arguments
from .inference import TensorShapes
from .parts.float64 import Float64State

Arrays = Mapping[str, NDArray[Any]]
State = Mapping[str, Tensor]
# Name → element type ("float", "int64", "bool") and shape; "float" is replaced by the file's element type.
Inputs = dict[str, tuple[str, tuple[int, ...]]]
# The arguments of a family's classes.
ArgsT = TypeVar("ArgsT", bound=Arguments)

# The element types that matrices are stored and multiplied in.
TORCH_DTYPE: Mapping[str, torch.dtype] = {short: getattr(torch, name) for short, name in NUMPY_NAME.items()}


@dataclass(frozen=True)
class ModelSpec(Generic[ArgsT]):
    """A model of a family at one choice of sizes, without its weights.

    Args:
        args: the family's arguments.
        sizes: sizes of the exported file.
        mixes_residuals: which hyper-connections the weights were trained with.
    """

    args: ArgsT
    sizes: Sizes
    mixes_residuals: bool


@dataclass(frozen=True)
class LayerCall:
    """One call of a live layer, with its arguments by name.

    Args:
        shapes: shapes of the tensors.
        given: every argument that is not None; masks with their values (equal rows of an expanded one once), other
            tensors without their data.
        dependent: names of the tensors that are computed from the inputs of the user's module, so that other inputs
            give them other values.
    """

    shapes: Mapping[str, tuple[int, ...]]
    given: Mapping[str, Any]
    dependent: frozenset[str] = frozenset()


# Live layer, its observed calls, whether the length is dynamic → its window, or None if it has none.
Adapter = Callable[[nn.Module, Sequence[LayerCall], bool], WindowGeometry | None]


@dataclass(frozen=True)
class UpstreamClass:
    """A supported class of a package.

    Args:
        name: `package.Class`, as written in a config.
        unsupported: arguments that cannot be given, each with the reason.
        why_not_run: why the package's own class is not compared with a file; "" if it is.
    """

    name: str
    unsupported: Mapping[str, str] = field(default_factory=dict)
    why_not_run: str = ""


class LiveCall(NamedTuple):
    """A call of upstream's live model, and the same inputs and output by the exported file's names.

    Args:
        arguments: arguments of its forward, by name.
        inputs: inputs of the exported file, by name.
        output: the file's name for the returned tensor.
    """

    arguments: dict[str, Tensor]
    inputs: dict[str, Tensor]
    output: str


def load_strictly(module: nn.Module, state: State) -> None:
    """Load the weights of a module on the meta device, each exactly once.

    Rotary frequencies that the state lacks are computed by their formula.
    """
    weights = {name: tensor.float() for name, tensor in state.items()}
    for name, buffer in module.named_buffers():
        if name.endswith("inv_freq") and name not in weights:  # old checkpoints lack it
            dim = 2 * buffer.shape[0]
            weights[name] = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
    module.load_state_dict(weights, strict=True, assign=True)


class Family(ABC, Generic[ArgsT]):
    """A family of models: upstream's classes that have the same arguments.

    It has no state. Its methods are given the arguments of one model, or these with sizes (`ModelSpec`).

    Attributes:
        name: short and unique.
        arguments: the model of its constructor arguments.
        classes: upstream's classes with these arguments.
        window_argument: what the class calls its window; an attribute of the arguments.
        parameters: names of inputs in the module's `forward`, if they differ from those in the file.
        tokens: inputs with one row per token; changing a row changes that token for the queries that see it.
        adapters: import path of a live layer's class → function that gives the layer an export-friendly forward.
        extra_inputs: options of `ShapeRequest` that only some families take.
        dynamic: axes that are dynamic in its files by default, of "batch" and "seq".
        why_static: why its sizes cannot be dynamic; "" if they can.
        batch_axis: which axis of data inputs and outputs is the batch.
        sequence_axis: which axis of outputs counts positions.
        samples: the reference can compute single positions, which long sequences need.
        loads_reference: the reference is loaded from the user's files, and needs none of the exporter's weights.
        casts_inputs: whether the inputs themselves take the file's element type, because no matrix is applied to them.
        sizes_are_arguments: heads and head size are arguments of the class, not shapes of its inputs.
        has_experts: some of its models have experts, which rounding may choose: see `undecided`.
        key_mask: the input that says which tokens of a sequence are no padding, if what is computed at padding is of
            no meaning and is not compared; "" if every position is.
        fuses: its traced graph is searched for what fused nodes compute, because its module is upstream's own.
    """

    name: str
    arguments: type[ArgsT]
    classes: tuple[UpstreamClass, ...]
    window_argument: str
    parameters: Mapping[str, str] = {}
    tokens: tuple[str, ...] = ("x",)
    adapters: Mapping[str, Adapter] = {}
    extra_inputs: frozenset[str] = frozenset()
    dynamic: tuple[str, ...] = ()
    why_static: str = ""
    batch_axis: int = 0
    sequence_axis: int = -2
    samples: bool = False
    loads_reference: bool = False
    casts_inputs: bool = False
    sizes_are_arguments: bool = True
    has_experts: bool = False
    key_mask: str = ""
    fuses: bool = False

    @abstractmethod
    def sizes(self, args: ArgsT, request: ShapeRequest) -> Sizes:
        """Decide the sizes that a request leaves open.

        Raises:
            UsageError: the model does not take the sizes or inputs that are asked for.
        """

    @abstractmethod
    def inputs(self, args: ArgsT, sizes: Sizes) -> Inputs:
        """Return the inputs of the exported file by name.

        Integers are tokens, except those named in `core.tensors.INTEGER_MASKS`.
        """

    @abstractmethod
    def module(self, spec: ModelSpec[ArgsT]) -> nn.Module:
        """Build the export-friendly module, on the meta device if that is PyTorch's default device.

        It takes its inputs by name, and returns a tensor, or a tuple with one for each output. In a `StateDictFamily`
        its tensors are those of the state dict, under the same names.
        """

    @abstractmethod
    def reference(
        self, spec: ModelSpec[ArgsT], state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute the outputs in float64.

        A family whose reference is upstream's own module gets it from `state.original`, or where it is built from
        arguments and a state dict from `state.module`.

        Args:
            spec: the model.
            state: its weights.
            inputs: float64 (or int64, bool) tensors by input name.
            positions: compute only these, if the family has `samples`; None for all.
        """

    def outputs(self, args: ArgsT) -> tuple[str, ...]:
        """Return the names of the outputs; the first is the one per token, with which the window is checked."""
        return ("out",)

    def load(self, module: nn.Module, state: State) -> None:
        """Load the weights of a module that `module` built."""
        load_strictly(module, state)

    def token_limit(self, args: ArgsT) -> int | None:
        """Return one more than the largest token; None if the inputs are embeddings."""
        return None

    def layers(self, args: ArgsT) -> list[WindowGeometry]:
        """Return the window of each attention layer in order; none if their sums go over the whole sequence."""
        window = args.geometry()
        return [] if window is None else [window] * getattr(args, "depth", 1)

    def window_views(self, class_name: str, args: ArgsT, sizes: Sizes | None) -> list[WindowView]:
        """Return the windows for pictures.

        Args:
            class_name: one of the family's classes.
            args: its arguments.
            sizes: of the file; None: at the longest sequence that the model takes.
        """
        layers = self.layers(args)
        names = [f"layer {index + 1}" for index in range(len(layers))] if len(layers) > 1 else [class_name]
        length = getattr(args, "max_seq_len", None) if sizes is None else sizes.seq_len
        return views(list(zip(names, layers, strict=True)), length)

    def live_call(self, given: Mapping[str, Tensor]) -> LiveCall:
        """Build the call of upstream's model from tensors by the file's or forward's names.

        Raises:
            UsageError: no file computes such a call.
        """
        return LiveCall(dict(given), dict(given), "out")

    def undecided(
        self, spec: ModelSpec[ArgsT], state: Float64State, inputs: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Tensor | None:
        """Return the tokens `[B, N]` whose experts rounding decides in a precision; they are not compared.

        It is None in a model without experts, and only asked of a family that `has_experts`.
        """
        return None

    def untouched(self, spec: ModelSpec[ArgsT], original: Callable[[], nn.Module]) -> Callable[..., Tensor] | None:
        """Return a function that calls upstream's own module in fp32, and returns its first output.

        It takes the file's inputs by name, and `positions`: an int64 tensor of those to compute, None for all. It is
        None where upstream's module is its class, built from its arguments.

        Args:
            spec: the model.
            original: returns upstream's module.
        """
        return None

    def head_positions(self, spec: ModelSpec[ArgsT]) -> NDArray[np.int64] | None:
        """Return the positions of a sequence at which the outputs are compared, where all would be too many."""
        return None

    def longest_compared(self, args: ArgsT) -> int | None:
        """Return the longest sequence that is compared where lengths are dynamic; None for all."""
        return None


def expected_shapes(family: Family[ArgsT], args: ArgsT) -> TensorShapes:
    """List every tensor of a state dict: the export-friendly module has upstream's names.

    Raises:
        UsageError: no tensor can be as large as the arguments say.
    """
    # The sizes, and which hyper-connections they are, change no weight.
    spec = ModelSpec(args, Sizes(1, 1, 1, 1, mask=False, attn_bias=False), mixes_residuals=True)
    try:
        with torch.device("meta"), _WithoutValues():
            module = family.module(spec)
    except (RuntimeError, TypeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise UsageError("The arguments are of a model that is too large.", why=why) from error
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


class _WithoutValues(TorchFunctionMode):
    """A torch mode in which new weights get no first values.

    On the meta device they would have none either, but PyTorch would load its compiler to draw them: a second more.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch, unless it is one of `torch.nn.init`."""
        given = kwargs or {}
        if getattr(func, "__module__", None) != nn.init.__name__:
            return func(*args, **given)
        return args[0] if args else given["tensor"]


def needs_argument(name: str, why: str) -> UsageError:
    """Make the error for a missing argument that this model needs."""
    return UsageError(f"{argument(name)} is needed.", why=why, fix=f"Add {argument(name)}.")


def sequence_length(request: ShapeRequest, default: int | None, limit: str = "", why: str = "") -> int:
    """Decide the sequence length, and check that no size asked for is below 1.

    Args:
        request: what is asked for.
        default: the model's own length, or None.
        limit: name of the model's argument that says `default`, if no sequence may be longer; "" if one may.
        why: why none may be longer.

    Raises:
        UsageError: a size below 1, a length beyond the limit, or no length anywhere.
    """
    length = request.seq_len if request.seq_len is not None else default
    if length is None:
        raise needs_argument("seq_len", "The file has static shapes and nothing in this model tells the length.")
    sizes = {"seq_len": length, "batch": request.batch, "heads": request.heads, "dim_head": request.dim_head}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise UsageError(f"{argument(name)} is {value}.", why="It must be at least 1.")
    if limit and default is not None and length > default:
        fix = f"Use {argument('seq_len', default)} or less."
        raise UsageError(f"{argument('seq_len', length)} is beyond the model's {limit} {default}.", why=why, fix=fix)
    return length


def optional_inputs(geometry: WindowGeometry, sizes: Sizes) -> Inputs:
    """List the optional inputs of windowed attention, in upstream's order."""
    extras: Inputs = {}
    if sizes.mask:
        extras["mask"] = ("bool", (sizes.batch, sizes.seq_len))
    if sizes.attn_bias:
        extras["attn_bias"] = ("float", (sizes.heads, geometry.window_size, geometry.keys_per_window))
    return extras
