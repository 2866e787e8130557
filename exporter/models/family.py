"""Define a family of models: one row that describes how its models are read, exported and compared.

A family has a folder of its own beside this file, with the same files in each: `arguments.py`, `module.py`,
`step_module.py`, `reference.py`, `infer.py` if it takes more than a few lines to read arguments off weights,
`adapter.py` if upstream's live layers can be replaced, and `family.py`, which ends in the row. `registry.py` lists the
rows; nothing outside a family's folder looks at its arguments' type.

A row has forms for what only some families have: models in a state dict (`StateDictForm`), models in a folder
(`FolderForm`), models that take a few tokens at a time (`StepForm`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...core.documents.window_view import WindowView, views
from ...core.dtypes import NUMPY_NAME
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.geometry import WindowGeometry
from ...core.nodes.step import ring_slots
from ..options import ShapeRequest as ShapeRequest
from ..options import Sizes as Sizes
from .arguments import Arguments
from .inference import Findings, TensorShapes
from .parts.float64 import Float64State

Arrays = Mapping[str, NDArray[Any]]
State = Mapping[str, Tensor]
# Name → element type ("float", "int64", "bool") and shape; "float" is replaced by the file's element type.
Inputs = dict[str, tuple[str, tuple[int, ...]]]

# The element types that matrices are stored and multiplied in.
TORCH_DTYPE: Mapping[str, torch.dtype] = {short: getattr(torch, name) for short, name in NUMPY_NAME.items()}


@dataclass(frozen=True)
class ModelSpec:
    """A model of a family at one choice of sizes, without its weights.

    Args:
        args: the family's arguments.
        sizes: sizes of the exported file.
        mixes_residuals: which hyper-connections the weights were trained with.
    """

    args: Any
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
# Name, shape and element type ("float", or numpy's name) of a tensor passed from call to call.
StepCache = tuple[str, tuple[int, ...], str]
# Module, data inputs, position `[1]` and caches → output and next caches.
StepCall = Callable[[Any, Sequence[Tensor], Tensor, Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class UpstreamClass:
    """A supported class of a package.

    Args:
        name: `package.Class`, as written in a config.
        unsupported: arguments that cannot be given, each with the reason.
        why_not_run: why the package's own class is not run beside a file; "" if it is.
    """

    name: str
    unsupported: Mapping[str, str] = field(default_factory=dict)
    why_not_run: str = ""


@dataclass(frozen=True)
class StepForm:
    """How a family's models take a few tokens at a time.

    Args:
        module: builds the module for chunks of a size, with weights not yet loaded.
        call: how the module is called.
        caches: the tensors passed from call to call.
        slots: number of keys that a layer's ring holds.
        length_axis: the axis of data inputs and output that counts tokens.
        max_positions: number of positions, if positions have learned weights; None if there is no limit.
        arguments: returns the arguments of a step file for a batch size and a largest number of positions, which is
            None if the user gave none. The field is None in a family whose arguments are the same in every file.
        early_start: a call may begin before position 0, as `StepFacts.early_start` says.
    """

    module: Callable[[ModelSpec, int], nn.Module]
    call: StepCall
    caches: Callable[[ModelSpec], list[StepCache]]
    slots: Callable[[Any], int] = lambda args: ring_slots(args.geometry())
    length_axis: int = 1
    max_positions: Callable[[Any], int | None] = lambda args: None
    arguments: Callable[[Any, int, int | None], Any] | None = None
    early_start: bool = False


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


def _window_views(class_name: str, args: Any, sizes: Sizes | None) -> list[WindowView]:
    depth = getattr(args, "depth", 1)
    names = [f"layer {index + 1}" for index in range(depth)] if depth > 1 else [class_name]
    length = getattr(args, "max_seq_len", None) if sizes is None else sizes.seq_len
    return views([(name, args.geometry()) for name in names], length)


@dataclass(frozen=True)
class StateDictForm:
    """How a family's models are recognised in a state dict, whose shapes show most of their arguments.

    Args:
        recognises: returns whether the names in a state dict are this family's.
        recognised_by: what it is recognised by, in words, for an error that lists the families.
        infer_arguments: infers arguments from shapes; given ones only decide where several fit equally.
        infer_values: infers arguments from values, where shapes do not show them.
        follow: returns arguments that follow from others and that no tensor shows.
    """

    recognises: Callable[[TensorShapes], bool]
    recognised_by: str
    infer_arguments: Callable[[TensorShapes, Mapping[str, Any]], Findings]
    infer_values: Callable[[State], Findings] = lambda state: {}
    follow: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}


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


@dataclass(frozen=True)
class FolderForm:
    """How a family's models are read from a folder: a configuration, and weights in one file or several.

    Args:
        recognises: returns whether a folder is this family's.
        recognised_by: what it is recognised by, in words, for an error that lists the families.
        files: lists the files that `read` reads, in a fixed order; each must be a plain file, and the model's SHA-256
            is computed from theirs.
        read: reads these files: only tensors and plain data, and no code from the folder is run. Its second argument
            holds what the user chose: `task`, or None. For a comparison it also has `known`, the arguments in the facts
            of the file that the folder is compared with. For an export it also has `shapes` and `steps` (whether step
            files are written), so that sizes are refused before weights are read.
        live: reads a live module of this family; returns None for any other.
        companions: names of files in the folder that those who run the exported file need, a tokenizer for example.
    """

    recognises: Callable[[Path], bool]
    recognised_by: str
    files: Callable[[Path], list[Path]]
    read: Callable[[Path, Mapping[str, Any]], FolderContents]
    companions: tuple[str, ...] = ()
    live: Callable[[nn.Module], FolderContents | None] = lambda module: None


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


@dataclass(frozen=True)
class Family:
    """One row of the registry.

    Args:
        name: short and unique.
        arguments: the model of its constructor arguments.
        classes: upstream's classes with these arguments.
        window_argument: what the class calls its window.
        sizes: decides the sizes that a request leaves open.
        inputs: returns the inputs of the exported file by name. Integers are tokens, except those named in
            `core.tensors.INTEGER_MASKS`.
        module: builds the export-friendly module on the meta device; it takes its inputs by name, and returns a tensor,
            or a tuple with one for each output. If the family has a `state_dict`, the module's tensors are those of the
            state dict, under the same names.
        reference: computes the outputs in float64 from float64 (or int64, bool) tensors by input name; with positions,
            only there. A family whose reference is upstream's own module gets it from `state.original`, or where
            it is built from arguments and a state dict from `state.module`.
        outputs: returns the names of the outputs; the first is the one per token, with which the window is checked.
        state_dict: how its models are recognised in a state dict; None if they are not.
        folder: how its models are read from a folder; None if they are not.
        step: how its models take a few tokens at a time; None if they cannot.
        load: loads the module's weights.
        parameters: names of inputs in the module's `forward`, if they differ from those in the file.
        tokens: inputs with one row per token; changing a row changes that token for the queries that see it.
        token_limit: returns one more than the largest token; None if the inputs are embeddings.
        geometry: returns the window of every attention layer, or the widest; None if the sums go over the whole
            sequence.
        layers: returns the window of each attention layer in order, where they differ; None: all have `geometry`.
        describe_window: describes the window in words.
        window_views: returns the windows for pictures, by class name and arguments; at the given sizes, or if these are
            None at the longest sequence that the model takes.
        adapters: import path of a live layer's class → function that gives the layer an export-friendly forward.
        extra_inputs: options of `ShapeRequest` that only some families take.
        dynamic: axes that are dynamic in its files by default, of "batch" and "seq".
        why_static: why its sizes cannot be dynamic; "" if they can.
        live_call: builds the call of upstream's model from tensors by the file's or forward's names.
        batch_axis: which axis of data inputs and outputs is the batch.
        sequence_axis: which axis of outputs counts positions.
        samples: the reference can compute single positions, which long sequences need.
        casts_inputs: whether the inputs themselves take the file's element type, because no matrix is applied to them.
        sizes_are_arguments: heads and head size are arguments of the class, not shapes of its inputs.
        undecided: returns, for inputs and the precision of a file, the tokens `[B, N]` whose experts rounding decides;
            they are not compared. None if there are no experts.
        key_mask: the input that says which tokens of a sequence are no padding, if what is computed at padding is of
            no meaning and is not compared; "" if every position is.
        untouched: returns upstream's own module in fp32, loaded by `FolderContents.original`, called with the file's
            inputs by name and returning its first output; None where it is the class, built from its arguments.
        fuses: its traced graph is searched for what fused nodes compute, because its module is upstream's own.
        longest_compared: returns the longest sequence that is compared where lengths are dynamic; None for all.
    """

    name: str
    arguments: type[Arguments]
    classes: tuple[UpstreamClass, ...]
    window_argument: str
    sizes: Callable[[Any, ShapeRequest], Sizes]
    inputs: Callable[[Any, Sizes], Inputs]
    module: Callable[[ModelSpec], nn.Module]
    reference: Callable[[ModelSpec, Float64State, Mapping[str, Tensor], Tensor | None], tuple[Tensor, ...]]
    outputs: Callable[[Any], tuple[str, ...]] = lambda args: ("out",)
    state_dict: StateDictForm | None = None
    folder: FolderForm | None = None
    step: StepForm | None = None
    load: Callable[[nn.Module, State], None] = load_strictly
    parameters: Mapping[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ("x",)
    token_limit: Callable[[Any], int | None] = lambda args: None
    geometry: Callable[[Any], WindowGeometry | None] = lambda args: args.geometry()
    layers: Callable[[Any], list[WindowGeometry]] | None = None
    describe_window: Callable[[Any], str] = lambda args: str(args.geometry().describe())
    window_views: Callable[[str, Any, Sizes | None], list[WindowView]] = _window_views
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    extra_inputs: frozenset[str] = frozenset()
    dynamic: tuple[str, ...] = ()
    why_static: str = ""
    live_call: Callable[[Mapping[str, Tensor]], LiveCall] = lambda given: LiveCall(dict(given), dict(given), "out")
    batch_axis: int = 0
    sequence_axis: int = -2
    samples: bool = False
    casts_inputs: bool = False
    sizes_are_arguments: bool = True
    undecided: Callable[[ModelSpec, Float64State, Mapping[str, Tensor], torch.dtype], Tensor | None] | None = None
    key_mask: str = ""
    fuses: bool = False
    untouched: Callable[[ModelSpec, Callable[[], nn.Module]], nn.Module] | None = None
    longest_compared: Callable[[Any], int | None] = lambda args: None


def expected_shapes(family: Family, args: Arguments) -> TensorShapes:
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


def cache_pairs(caches: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Group caches by layer: key and value."""
    return list(zip(caches[::2], caches[1::2], strict=True))


def ring_caches(spec: ModelSpec) -> list[StepCache]:
    """List the rings of keys and values of every layer."""
    sizes = spec.sizes
    shape = (sizes.batch, sizes.heads, ring_slots(spec.args.geometry()), sizes.dim_head)
    layers = range(getattr(spec.args, "depth", 1))
    return [(f"{part}_cache.{layer}", shape, "float") for layer in layers for part in ("key", "value")]
