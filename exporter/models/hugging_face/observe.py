"""Read what every attention layer sees off the masks that transformers itself builds.

The argument `sliding_window` cannot be trusted: it means the reach, the reach and one, or another number, and some
configurations rewrite it. So the model runs with an implementation of attention that looks at its mask and computes
nothing, on the meta device, so that this costs as much for a large model as for a small one. It runs twice, on two
sequences that are longer than any window that the configuration may mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....core.errors import UsageError
from .arguments import Layer, words
from .config import grows, raised

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "localattn_observe"
# Entries of configurations that state a window, or its size in tokens.
_WINDOWS = ("sliding_window", "local_attention", "attention_window_size", "attention_chunk_size", "sliding_window_size")
# A mask of this many positions takes 1 GiB.
_LONGEST = 1 << 15


class Seen(NamedTuple):
    """One call of an attention layer.

    Args:
        path: path of the layer.
        layer: what it sees, or why that is no window.
        local: the layer was given a window, whatever it means.
    """

    path: str
    layer: Layer | str
    local: bool


class Observation(NamedTuple):
    """One run of a model.

    Args:
        length: of its sequence.
        outputs: shapes of the outputs, by name.
        seen: calls of attention layers, in order.
    """

    length: int
    outputs: dict[str, tuple[int, ...]]
    seen: Sequence[Seen] = ()


class Reach(NamedTuple):
    """What a mask shows: positions seen back and ahead (None: all), or the size of its chunks."""

    back: int | None
    ahead: int | None
    chunk: int = 0


class _Masks:
    """Masks as transformers builds them, on the CPU, each read once."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # so that no other mask gets the same id
        self._read: dict[int, Reach | str] = {}

    def build(self, *args: Any, **given: Any) -> Tensor:
        """Build the mask of a layer without padding; takes what `AttentionMaskInterface` passes."""
        from transformers.masking_utils import sdpa_mask

        given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        given |= {"device": "cpu", "attention_mask": None}
        try:
            mask = sdpa_mask(*args, **given)
            assert isinstance(mask, Tensor)
        except Exception as error:  # a mask that depends on inputs, which have no values here
            mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
            self._read[id(mask)] = f"its mask depends on more than positions ({type(error).__name__})"
        self._kept.append(mask)
        return mask

    def reach(self, mask: Tensor) -> Reach | str:
        """Return what a mask shows, or why it is no window."""
        if mask.device.type == "meta":
            return "its mask is not built by transformers' own functions"
        if id(mask) not in self._read:
            self._kept.append(mask)
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            self._read[id(mask)] = read_reach(visible[0, 0].numpy())
        return self._read[id(mask)]


def read_reach(visible: NDArray[np.bool_]) -> Reach | str:
    """Return the window of a mask `[N, N]`, True = visible, or why it has none."""
    length = len(visible)
    position = np.arange(length)
    count = visible.sum(axis=1)
    if not count.all():
        return "a query sees no key"
    first, last = visible.argmax(axis=1), length - 1 - visible[:, ::-1].argmax(axis=1)
    if not np.array_equal(last - first + 1, count):
        return "the keys that a query sees are not next to each other"
    back, ahead = int((position - first).max()), int((last - position).max())
    if np.array_equal(first, np.maximum(position - back, 0)) and np.array_equal(
        last, np.minimum(position + ahead, length - 1)
    ):
        reach = Reach(None if back == length - 1 else back, None if ahead == length - 1 else ahead)
        one_sided = (reach.back is None) != (reach.ahead is None) and reach.ahead != 0
        return "it ends to one side only" if one_sided else reach
    chunk = back + 1
    if chunk < length and np.array_equal(first, position // chunk * chunk):
        if np.array_equal(last, position):
            return Reach(None, 0, chunk)
        if np.array_equal(last, np.minimum(first + chunk, length) - 1):
            return Reach(None, None, chunk)
    return f"its reach differs from query to query (up to {back} back and {ahead} ahead)"


def scale_nothing(model: nn.Module) -> bool:
    """Let rotary modules that look at the values of positions keep the frequencies that they begin with.

    Masks do not depend on angles, and on the meta device there are no values to look at.

    Returns:
        Whether there was such a module.
    """
    found = False
    for module in model.modules():
        owner: Any = module
        kind = getattr(owner, "rope_type", None)
        kinds = kind if isinstance(kind, dict) else {"": kind}
        fixed = {name: "default" if grows(one) else one for name, one in kinds.items()}
        if fixed != kinds:
            found = True
            owner.rope_type = fixed if isinstance(kind, dict) else fixed[""]
    return found


def read_layers(model: PreTrainedModel, names: Sequence[str]) -> tuple[list[Layer], Observation]:
    """Return what every attention layer of a model sees, and the run in which it was seen.

    Args:
        model: the model, on the meta device or any other.
        names: its inputs, int64 `[B, N]`.

    Raises:
        UsageError: a layer has something else than a window, no layer has a window, or one that does not end; or the
            calls of layers depend on the length.
    """
    length = 2 * max((*_stated(model.config), 16)) + 3
    if length > _LONGEST:
        raise UsageError(
            f"The configuration states a window of {(length - 3) // 2} tokens.",
            why=f"Windows are read off the model's own masks, here up to {_LONGEST // 2} tokens.",
        )
    scale_nothing(model)
    run, again = (observe(model, names, n) for n in (length, length + 7))
    if not run.seen:
        raise UsageError(
            f"No attention layer of {type(model).__name__} can be exported.",
            why="None goes through transformers' AttentionInterface: the model has attention code of its own.",
        )
    refused = [f"{seen.path}: {seen.layer}" for seen in (*run.seen, *again.seen) if isinstance(seen.layer, str)]
    if refused:
        raise UsageError(
            f"A layer of {type(model).__name__} has no window.", why="; ".join(dict.fromkeys(refused[:3])) + "."
        )
    if [seen.path for seen in run.seen] != [seen.path for seen in again.seen]:
        raise UsageError(
            f"{type(model).__name__} cannot be exported.",
            why=f"Its attention layers are called in another order, or more often, from {length} tokens on.",
        )
    layers = [seen.layer for seen in run.seen if isinstance(seen.layer, Layer)]
    known: dict[str, Layer] = {}
    for seen, layer, other in zip(run.seen, layers, again.seen, strict=True):
        if layer != other.layer:
            raise UsageError(
                f"{seen.path} has no window.", why=f"What it sees changes with the length, from {length} on."
            )
        if seen.local and layer.geometry.sees_all:
            raise UsageError(
                f"The window of {seen.path} cannot be seen.",
                why=f"A sequence of {length} tokens fits into it.",
                fix="Check the window in config.json.",
            )
        if known.setdefault(seen.path, layer).geometry != layer.geometry:
            raise UsageError(f"{seen.path} has no window.", why="It is called twice, with two masks.")
    if all(layer.geometry.sees_all for layer in layers):
        raise UsageError(
            f"This {type(model).__name__} has no sliding window.",
            why=f"Its {len(layers)} attention layers see {words(layers[0])}.",
            fix="If it should have one, check config.json: use_sliding_window, layer_types.",
        )
    return layers, run


def _stated(config: Any) -> Iterator[int]:
    """Yield the numbers that a configuration, or one inside it, may mean as a window."""
    values = config.to_dict()
    tables = [values, *(value for value in values.values() if isinstance(value, dict))]
    for table in tables:
        for name in _WINDOWS:
            found = table.get(name)
            numbers = found if isinstance(found, list | tuple) else [found]
            yield from (n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n > 0)


def observe(model: PreTrainedModel, names: Sequence[str], length: int) -> Observation:
    """Run a model once, and note what each of its attention layers sees.

    Raises:
        UsageError: the model does not run on these inputs.
    """
    found: list[Seen] = []
    masks = _Masks()
    paths = {id(module): path for path, module in model.named_modules()}
    keys: list[Tensor] = []  # kept, so that no other tensor is mistaken for one of them

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any, **given: Any
    ) -> tuple[Tensor, None]:
        path = paths.get(id(module), "?")
        if query.shape[2] != key.shape[2]:
            reach: Reach | str = "it has other keys than its own sequence's"
        elif attention_mask is None:
            causal = given.get("is_causal")
            causal = getattr(module, "is_causal", False) if causal is None else causal
            reach = Reach(None, 0 if causal else None)
        else:
            reach = masks.reach(attention_mask)
        layer: Layer | str
        if isinstance(reach, str):
            layer = reach
        else:
            # A layer that takes the keys of another one is given the same tensor.
            shares = next((index for index, other in enumerate(keys) if other is key), None)
            sizes: dict[str, Any] = {"kv_heads": key.shape[1], "head_dim": query.shape[-1], "shares": shares}
            layer = Layer(path=path, **reach._asdict(), **sizes)
        keys.append(key)
        found.append(Seen(path, layer, local=given.get("sliding_window") is not None))
        batch, heads, tokens = query.shape[:3]
        return query.new_zeros((batch, tokens, heads, value.shape[-1])), None

    before = model.config._attn_implementation
    install(model, _NAME, attention, masks.build)
    try:
        return Observation(length, output_shapes(model, names, length), found)
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def output_shapes(model: PreTrainedModel, names: Sequence[str], length: int) -> dict[str, tuple[int, ...]]:
    """Run a model on one sequence, and return the shapes of its outputs by name.

    Raises:
        UsageError: the model does not run on these inputs.
    """
    inputs = {name: torch.ones(1, length, dtype=torch.int64, device=model.device) for name in names}
    try:
        result = model(**inputs, **without_cache(model))
    except UsageError:
        raise
    except Exception as error:  # the configuration decides what goes wrong, and where
        raise UsageError(
            f"{type(model).__name__} does not run.", why=raised(error), fix="Check config.json."
        ) from error
    return {name: tuple(x.shape) for name, x in result.items() if isinstance(x, Tensor)}


def without_cache(model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments that tell a model to keep no cache; none for a model that has no such argument."""
    return {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}


def install(model: PreTrainedModel, name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Let a model compute its attention and masks by these functions from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
