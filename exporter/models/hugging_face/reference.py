"""The reference of a Hugging Face model: what transformers itself loads from the user's folder, truly in float64.

It is a load of its own (`weights.original`), or a copy of the user's live model; only casts are applied to it.
Converted with `.double()` alone a model still drops to fp32 in its softmax, norms and rotary embedding, and a padded
batch becomes NaN in eager attention. Under `InFloat64` none of it does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....core.errors import UsageError
from ..family import ModelSpec, State
from ..parts.float64 import Float64State, InFloat64
from . import routing
from .arguments import HuggingFaceArgs, Layer
from .config import broken
from .model_class import named_class
from .module import EAGER, build, load
from .observe import without_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_SEEING = 0.9
_LOGITS, _KEEP = "logits", "logits_to_keep"
# Logits of a sequence in float64, 128 MiB of them, and the fewest positions that have some.
_MOST_LOGITS, _FEWEST_POSITIONS = 1 << 24, 32
# Tokens that show whether a model computes numbers at all.
_FEW = 8
# What rounding leaves between a live model and the same one in fp32, relative; in half precision the rest of types.
_ALIKE = {torch.float32: 1e-3, torch.float64: 1e-3}
_ROUNDED = 0.3


def reference(
    spec: ModelSpec[HuggingFaceArgs],
    state: Float64State,
    inputs: Mapping[str, Tensor],
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute the outputs of the untouched model in float64, at these positions or at all."""
    return _run(spec, state, inputs, positions)[0]


def head_positions(spec: ModelSpec[HuggingFaceArgs]) -> NDArray[np.int64] | None:
    """Return the positions whose logits are compared; None for all.

    All hidden states are computed, but logits of a large vocabulary only at some positions: around the edges of every
    window, at both ends, and evenly between them. Upstream's own forward takes them as `logits_to_keep`.
    """
    args, length = spec.args, spec.sizes.seq_len
    most = max(_FEWEST_POSITIONS, _MOST_LOGITS // max(1, args.vocab_size * spec.sizes.batch))
    kind = named_class(args.architecture, args.config)
    if length <= most or args.outputs != (_LOGITS,) or _KEEP not in inspect.signature(kind.forward).parameters:
        return None
    reaches = {x.backward_reach + 1 for x in (layer.geometry for layer in args.layers) if not x.sees_all}
    edges = [edge + step for edge in sorted(reaches) for step in (-1, 0, 1)][: most // 4]
    chosen = {0, 1, length - 2, length - 1, *(edge for edge in edges if 0 <= edge < length)}
    between = np.linspace(0, length - 1, most - len(chosen)).astype(np.int64)
    return np.unique([*chosen, *between]).astype(np.int64)


def undecided(
    spec: ModelSpec[HuggingFaceArgs], state: Float64State, inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor | None:
    """Return the tokens `[B, N]` whose experts rounding decides in a precision; None in a model without experts.

    Tokens that see one of them through a later layer are returned too, unless less than a tenth would be left.
    """
    args = spec.args
    if not any("expert" in name for name in args.config):
        return None
    batch, length = shape = inputs[args.inputs[0]].shape
    chosen = [
        routing.undecided(x, dtype).reshape(shape) for x in _run(spec, state, inputs)[1] if len(x) == batch * length
    ]
    if not chosen:
        return None
    own = torch.stack(chosen).any(0)
    if len(chosen) != len(args.layers):
        return own
    reached = chosen[0]
    for layer, after in zip(args.layers[1:], chosen[1:], strict=True):
        reached = _seeing(reached, layer) | after
    return reached if reached.double().mean() <= _MOST_SEEING else own


def _seeing(marked: Tensor, layer: Layer) -> Tensor:
    """Return which tokens see a marked one, or are one."""
    length = marked.shape[1]
    intervals = [layer.geometry.receptive_interval(query, length) for query in range(length)]
    first, end = torch.tensor(intervals).unbind(1)
    before = torch.nn.functional.pad(marked.long().cumsum(1), (1, 0))
    return (before[:, end] > before[:, first]) | marked


def _run(
    spec: ModelSpec[HuggingFaceArgs],
    state: Float64State,
    inputs: Mapping[str, Tensor],
    positions: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Compute the outputs, and by how much each choice of experts was decided."""
    args = spec.args
    model: Any = state.original()
    only = {} if positions is None else {_KEEP: positions}
    with torch.no_grad(), InFloat64() as mode:
        result = model(**inputs, **without_cache(model), **only, return_dict=True)
    margins = (routing.margin(scores, chosen) for scores, chosen in mode.choices)
    return tuple(result[name] for name in args.outputs), [x for x in margins if x is not None]


def check_numbers(model: PreTrainedModel, args: HuggingFaceArgs) -> None:
    """Run a model on a few tokens, and refuse one whose configuration makes NaN of finite weights.

    Raises:
        UsageError: its outputs are not finite, or it does not run.
    """
    ids = torch.ones(1, min(_FEW, args.longest), dtype=torch.int64, device=model.device).clamp(max=args.vocab_size - 1)
    try:
        with torch.no_grad():
            found = model(input_ids=ids, **without_cache(model))[args.outputs[0]]
    except Exception as error:  # the configuration decides what goes wrong, and where
        raise broken(args.architecture, error) from error
    _refuse_nan(found, model, args)


def _refuse_nan(found: Tensor, model: nn.Module, args: HuggingFaceArgs) -> None:
    """Refuse outputs that are not finite although the weights are; the names of such weights are told elsewhere.

    Raises:
        UsageError: an output is not finite, and all weights are.
    """
    if not found.isfinite().all() and all(x.isfinite().all() for x in model.parameters()):
        raise UsageError(
            f"This {args.architecture} computes NaN or infinity.",
            why=f"Its {args.outputs[0]} are not finite, and its weights are.",
            fix="Check the numbers in config.json: scales, limits, what is divided by.",
        )


def check_live(model: PreTrainedModel, args: HuggingFaceArgs, state: State) -> None:
    """Refuse a live model that computes something else than its configuration and its weights say.

    Neither config nor weights reveal hooks or patched values.

    Raises:
        UsageError: its outputs differ on random tokens, of which there are more than in a window.
    """
    kind = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(args.vocab_size, (1, min(args.window + 9, args.longest)), generator=generator)
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            found = model(input_ids=ids.to(model.device), **without_cache(model))[args.outputs[0]].cpu().double()
            plain = build(args)
            load(plain, state)
            wanted = plain(input_ids=ids, **without_cache(plain))[args.outputs[0]].double()
    finally:
        for part, training in modes:
            part.training = training
    _refuse_nan(wanted, plain, args)
    off = float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    if not off <= _ALIKE.get(kind, _ROUNDED):
        raise UsageError(
            f"This {args.architecture} computes something else than its configuration and weights say.",
            why=f"On {ids.shape[1]} random tokens its {args.outputs[0]} are off by {off:.2g} of their size.",
            fix="Hooks, and values changed in its modules, are not exported: change its configuration, or its weights.",
        )


def untouched(args: HuggingFaceArgs, original: Callable[[], nn.Module]) -> Callable[..., Tensor]:
    """Return a call of the untouched model in fp32: it takes the file's inputs by name, and returns its first output.

    Given `positions`, it computes these alone.
    """

    def call(positions: Tensor | None = None, **inputs: Tensor) -> Tensor:
        model: Any = original()
        only = {} if positions is None else {_KEEP: positions}
        found: Tensor = model(**inputs, **without_cache(model), **only, return_dict=True)[args.outputs[0]]
        return found

    return call


def copied(model: PreTrainedModel) -> Callable[[], nn.Module]:
    """Return a function that copies the user's live model, on the CPU in fp32: the reference of its file.

    The copy is made when the reference is first computed, from the model as it is then.
    """

    def copy_model() -> nn.Module:
        module: Any = copy.deepcopy(model)
        module.set_experts_implementation(EAGER)  # how PyTorch computes experts; other ways have no float64
        plain: nn.Module = module.to("cpu", torch.float32).eval().requires_grad_(False)
        return plain

    return copy_model
