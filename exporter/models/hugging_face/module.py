"""Build a Hugging Face model for export: upstream's own module, with its attention as nodes and its masks left out.

Nothing of the model is written again. Its attention functions are replaced through `AttentionInterface`, its mask
functions through `AttentionMaskInterface`: the mask that reaches a layer is the 2-D mask of padding, or none, and the
window is the layer's own (`arguments.Layer`). Norms, activations and sums between layers stay fp32 in a file of half
precision; linear layers, embeddings and attention take its element type.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....core.errors import UsageError
from ..family import ModelSpec, State
from ..inference import bounded
from ..parts.attention_op import grouped_attention_op
from .arguments import HuggingFaceArgs
from .complex_pairs import ComplexAsPairs
from .config import made_config
from .model_class import named_class
from .observe import install, scale_nothing, without_cache
from .types import quirks_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NAME = "localattn"
# How transformers computes experts: one after another, or all by products of batches.
EAGER, BATCHED = "eager", "batched_mm"
# Where an attention module keeps its window, and in a step file the function that computes its attention from rings of
# keys: it takes query, key, value, scale, softcap and sinks.
_WINDOW, STEP = "localattn_window", "localattn_step"
# The input that says which tokens are no padding.
MASK = "attention_mask"


def build(args: HuggingFaceArgs, experts: str = EAGER) -> PreTrainedModel:
    """Build the untouched model on the CPU, with weights of any value.

    Its non-persistent buffers, rotary frequencies for example, have their values.

    Args:
        args: what makes it.
        experts: how experts are computed; `BATCHED` is the way that can be traced.
    """
    kind = named_class(args.architecture, args.config)
    return made_model(kind, made_config(args.config, "The model"), "cpu", experts)


def made_model(kind: Any, config: PreTrainedConfig, device: str, experts: str) -> PreTrainedModel:
    """Build a model of a class, with weights of any value, or on the meta device with none."""
    from transformers import initialization

    with torch.device(device), initialization.no_init_weights():
        model: PreTrainedModel = kind._from_config(config, dtype=torch.float32, experts_implementation=experts)
    return model.eval()


def load(model: nn.Module, state: State) -> None:
    """Load the weights and buffers of `weights.whole_state` into a model; what is one tensor there is one here.

    Nothing is tied that the state does not tie.

    Raises:
        UsageError: the model has other tensors.
    """
    rest = dict(state)
    persistent = model.state_dict()
    _check_names(model, rest)
    for name, _ in list(model.named_buffers()):
        if name in rest and name not in persistent:
            path, _, own = name.rpartition(".")
            model.get_submodule(path).register_buffer(own, rest.pop(name), persistent=False)
    model.load_state_dict(rest, strict=True, assign=True)
    shared: dict[tuple[Any, ...], nn.Parameter] = {}
    for path, part in model.named_modules():
        for own, x in list(part.named_parameters(recurse=False)):
            where = (x.data_ptr(), x.shape, x.stride()) if x.numel() else (path, own)
            setattr(part, own, shared.setdefault(where, x))


def _check_names(model: nn.Module, state: State) -> None:
    """Refuse a state whose tensors are not those of the model that its configuration makes.

    Raises:
        UsageError: names or shapes differ.
    """
    wanted = {**dict(model.named_buffers()), **model.state_dict()}
    names = sorted(wanted.keys() ^ state.keys()) or [name for name, x in wanted.items() if x.shape != state[name].shape]
    if names:
        raise UsageError(
            f"This {type(model).__name__} is not the one that its configuration makes.",
            why=f"{len(names)} tensors are missing, added or of another shape: {bounded(names, 3)}.",
            fix="Change its configuration together with its modules, save it, and load it again.",
        )


def of_whole_sequences(spec: ModelSpec[HuggingFaceArgs]) -> nn.Module:
    """Build the same as `exportable`, for sequences of any length that the model has positions for.

    A rotary embedding that changes beyond them keeps the frequencies that it begins with, and the file takes no
    position beyond.
    """
    args = spec.args
    model: Any = exportable(spec)
    if scale_nothing(model):
        known = KnownPositions(args.longest)
        for part in rotary_modules(model):
            part.register_forward_pre_hook(known, with_kwargs=True)
        model.localattn_known = known
    module: nn.Module = model
    return module


class KnownPositions(nn.Module):
    """Divide positions by one, which a table has for every position of the model.

    Beyond the table onnxruntime on the CPU refuses the sequence. Runtimes that read zeros there divide by zero, and all
    that sees such a position is NaN.

    Args:
        count: number of positions.
    """

    ones: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def prepare(self) -> None:
        """Make the table."""
        self.register_buffer("ones", torch.ones(self.count, 1), persistent=False)

    def forward(self, owner: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Replace the positions that a rotary module is given, its second argument."""
        if "position_ids" in named:
            return given, {**named, "position_ids": self._checked(named["position_ids"])}
        x, positions, *rest = given
        return (x, self._checked(positions), *rest), named

    def _checked(self, positions: Tensor) -> Tensor:
        return positions.to(torch.float32) / nn.functional.embedding(positions, self.ones).squeeze(-1)


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """List the modules that compute cosines and sines of positions."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("RotaryEmbedding")
        and "position_ids" in inspect.signature(type(module).forward).parameters
    ]


def exportable(spec: ModelSpec[HuggingFaceArgs]) -> nn.Module:
    """Build the model with its attention as nodes; it takes the file's inputs by name, and returns its outputs."""
    args = spec.args
    model = build(args, BATCHED)
    for layer in args.layers:
        setattr(model.get_submodule(layer.path), _WINDOW, layer.geometry)
    install(model, _NAME, _attention, _padding_mask)
    quirks = quirks_of(model.config.model_type)
    quirks.replace_attention(model, _attention)
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.register_forward_pre_hook(_take_weights_dtype)
            part.register_forward_hook(_give_fp32)
    own, given = quirks.forward_of(model), without_cache(model)

    def forward(self: Any, **inputs: Tensor) -> tuple[Tensor, ...]:
        with ComplexAsPairs():
            result = own(self, **inputs, **given)
        return tuple(result[name] for name in args.outputs)

    model.forward = MethodType(forward, model)
    module: nn.Module = model
    return module


def _take_weights_dtype(part: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    weight = part.weight
    assert isinstance(weight, Tensor)
    return tuple(x.to(weight.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)


def _give_fp32(part: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):  # a router, for example
        return tuple(_give_fp32(part, given, x) for x in output)
    return output.to(torch.float32) if isinstance(output, Tensor) and output.is_floating_point() else output


def _padding_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Return the mask of padding as `[B, 1, 1, N]`, True = keep, in place of a mask of every query and key."""
    return None if attention_mask is None else attention_mask[:, None, None, :]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention as `AttentionInterface` defines it: `[B, H, N, D]` and KV heads → `[B, N, H, D]`.

    Raises:
        UsageError: the layer was not seen when windows were read, or its mask is another than that of padding.
    """
    window = getattr(module, _WINDOW, None)
    if window is None or (attention_mask is not None and tuple(attention_mask.shape[1:3]) != (1, 1)):
        raise UsageError("An attention layer was not seen when the windows were read.")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    dtype = next((part.weight.dtype for part in module.modules() if isinstance(part, nn.Linear)), query.dtype)
    width = value.shape[-1]
    if width < query.shape[-1]:
        value = nn.functional.pad(value, (0, query.shape[-1] - width))
    inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
    sinks = None if s_aux is None else s_aux.to(dtype)
    step = getattr(module, STEP, None)
    if step is not None:
        out = step(*inputs, scale, softcap or 0.0, sinks)
    else:
        mask = None if attention_mask is None else attention_mask.flatten(1)
        out = grouped_attention_op(
            *inputs, window, scale, key_mask=mask, softcap=softcap or 0.0, sinks=sinks, sequence_first=False
        )
    return out.to(query.dtype)[..., :width].transpose(1, 2), None


def parameters(model: nn.Module) -> list[str]:
    """List the arguments that the model's forward takes by name."""
    return list(inspect.signature(type(model).forward).parameters)
