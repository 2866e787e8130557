"""Read what every attention layer sees off the masks that transformers itself builds.

The argument `sliding_window` cannot be trusted: it means the reach, the reach and one, or another number, and some
configurations rewrite it. So the model runs with an implementation of attention that looks at its mask and computes
nothing, on the meta device, so that this costs as much for a large model as for a small one. It runs twice, at two
lengths over every window that the configuration may mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....core.errors import UsageError
from .arguments import Layer, words
from .config import grows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "localattn_observe"
# Entries of configurations that state a window, or its size in tokens.
_WINDOWS = ("sliding_window", "local_attention", "attention_window_size", "attention_chunk_size", "sliding_window_size")
# A mask of this many positions takes 1 GiB.
_LONGEST = 1 << 15


@dataclass
class Seen:
    """One call of an attention layer.

    Args:
        path: path of the layer.
        layer: what it sees; None if that is no window.
        why: why it is none.
        local: the layer was given a window, whatever it means.
    """

    path: str
    layer: Layer | None = None
    why: str = ""
    local: bool = False


@dataclass
class Observation:
    """One run of a model.

    Args:
        length: of its sequence.
        seen: calls of attention layers, in order.
        outputs: shapes of the outputs, by name.
    """

    length: int
    seen: list[Seen] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)


class _Masks:
    """Masks as transformers builds them, on the CPU, each read once."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # so that no other mask gets the same id
        self._why: dict[int, str] = {}
        self._read: dict[int, Reach | str] = {}

    def build(self, *args: Any, **given: Any) -> Tensor:
        """Build the mask of a layer without padding; takes what `AttentionMaskInterface` passes."""
        from transformers.masking_utils import sdpa_mask

        given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        given |= {"device": "cpu", "attention_mask": None}
        try:
            mask = sdpa_mask(*args, **given)
            assert isinstance(mask, Tensor)
            why = ""
        except Exception as error:  # a mask that depends on inputs, which have no values here
            mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
            why = f"its mask depends on more than positions ({type(error).__name__})"
        self._kept.append(mask)
        self._why[id(mask)] = why
        return mask

    def reach(self, mask: Tensor) -> Reach | str:
        """Return what a mask shows, or why it is no window."""
        if self._why.get(id(mask)) or mask.device.type == "meta":
            return self._why.get(id(mask)) or "its mask is not built by transformers' own functions"
        if id(mask) not in self._read:
            self._kept.append(mask)
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            self._read[id(mask)] = read_reach(visible[0, 0].numpy())
        return self._read[id(mask)]


@dataclass(frozen=True)
class Reach:
    """What a mask shows: positions seen back and ahead (None: all), or the size of its chunks."""

    back: int | None
    ahead: int | None
    chunk: int = 0


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
        return Reach(None if back == length - 1 else back, None if ahead == length - 1 else ahead)
    chunk = back + 1
    if chunk < length and np.array_equal(first, position // chunk * chunk):
        if np.array_equal(last, position):
            return Reach(None, 0, chunk)
        if np.array_equal(last, np.minimum(first + chunk, length) - 1):
            return Reach(None, None, chunk)
    return f"its reach differs from query to query (up to {back} back and {ahead} ahead)"


def scale_nothing(model: nn.Module) -> bool:
    """Let rotary modules that look at the values of positions keep the frequencies that they begin with.

    Masks do not hang on angles, and on the meta device there are no values to look at.

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
        UsageError: a layer has something else than a window, no layer has a window, or one that does not end.
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
    refused = [f"{seen.path}: {seen.why}" for seen in (*run.seen, *again.seen) if seen.why]
    if refused:
        raise UsageError(
            f"A layer of {type(model).__name__} has no window.", why="; ".join(dict.fromkeys(refused[:3])) + "."
        )
    layers = [seen.layer for seen in run.seen if seen.layer is not None]
    for seen, other in zip(run.seen, again.seen, strict=True):
        if seen.layer != other.layer:
            raise UsageError(
                f"{seen.path} has no window.", why=f"What it sees changes with the length, from {length} on."
            )
        if seen.local and seen.layer is not None and seen.layer.back is None and not seen.layer.chunk:
            raise UsageError(
                f"The window of {seen.path} cannot be seen.",
                why=f"A sequence of {length} tokens fits into it.",
                fix="Check the window in config.json.",
            )
    if all(layer.back is None and not layer.chunk for layer in layers):
        raise UsageError(
            f"This {type(model).__name__} has no sliding window.",
            why=f"Its {len(layers)} attention layers see {words(layers[0])}.",
            fix="If it should have one, check config.json: use_sliding_window, layer_types.",
        )
    _check_shared(layers)
    return layers, run


def _check_shared(layers: list[Layer]) -> None:
    """Refuse a layer that is called twice with two windows."""
    known: dict[str, Layer] = {}
    for layer in layers:
        other = known.setdefault(layer.path, layer)
        if (other.back, other.ahead, other.chunk) != (layer.back, layer.ahead, layer.chunk):
            raise UsageError(f"{layer.path} has no window.", why="It is called twice, with two masks.")


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
    found, masks = Observation(length), _Masks()
    inputs = {name: torch.ones(1, length, dtype=torch.int64, device=model.device) for name in names}
    paths = {id(module): path for path, module in model.named_modules()}
    keys: list[Tensor] = []  # kept, so that no other tensor is mistaken for one of them

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any, **given: Any
    ) -> tuple[Tensor, None]:
        seen = Seen(paths.get(id(module), "?"), local=given.get("sliding_window") is not None)
        # A layer that takes the keys of another one is given the same tensor.
        shares = next((index for index, other in enumerate(keys) if other is key), None)
        own: dict[str, Any] = {"kv_heads": key.shape[1], "head_dim": query.shape[-1], "shares": shares}
        keys.append(key)
        found.seen.append(seen)
        if query.shape[2] != key.shape[2]:
            seen.why = "it has other keys than its own sequence's"
        elif attention_mask is None:
            causal = given.get("is_causal")
            causal = getattr(module, "is_causal", False) if causal is None else causal
            seen.layer = Layer(path=seen.path, back=None, ahead=0 if causal else None, **own)
        else:
            reach = masks.reach(attention_mask)
            if isinstance(reach, str):
                seen.why = reach
            else:
                window: dict[str, Any] = {"back": reach.back, "ahead": reach.ahead, "chunk": reach.chunk}
                seen.layer = Layer(path=seen.path, **window, **own)
        batch, heads, tokens = query.shape[:3]
        return query.new_zeros((batch, tokens, heads, value.shape[-1])), None

    with implementation(model, _NAME, attention, masks.build), torch.no_grad():
        try:
            result = model(**inputs, **without_cache(model))
        except UsageError:
            raise
        except Exception as error:
            raise does_not_run(model, error) from error
    found.outputs = {name: tuple(x.shape) for name, x in result.items() if isinstance(x, Tensor)}
    return found


def does_not_run(model: PreTrainedModel, error: Exception) -> UsageError:
    """Make the error for a model that raised one of its own."""
    return UsageError(
        f"{type(model).__name__} does not run.",
        why=f"{type(error).__name__}: {' '.join(str(error).split())[:250]}",
        fix="Check config.json.",
    )


def without_cache(model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments that tell a model to keep no cache; none for a model that has no such argument."""
    return {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}


@contextmanager
def implementation(
    model: PreTrainedModel, name: str, attention: Callable[..., Any], mask: Callable[..., Any]
) -> Iterator[None]:
    """Let a model compute its attention and masks by these functions while the context is open."""
    before = model.config._attn_implementation
    install(model, name, attention, mask)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def install(model: PreTrainedModel, name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Let a model compute its attention and masks by these functions from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
