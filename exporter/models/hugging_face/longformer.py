"""Longformer and LED's encoder without global tokens: each layer is a window of `attention_window / 2` to both sides.

Their attention is code of their own, which cuts the sequence into chunks and pads it to whole windows. That code is
replaced by the attention of `module.py`; embeddings, feed-forward layers and heads stay upstream's. Without
`global_attention_mask` upstream computes the same, except in classes that make tokens global themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ....core.errors import UsageError
from .arguments import Layer
from .observe import Observation, output_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# In their configurations.
MODEL_TYPES = ("longformer", "led")
# Classes of layers that compute attention.
_ATTENTION = ("LongformerSelfAttention", "LEDEncoderSelfAttention")
# Classes whose forward makes tokens global, and which ones.
_GLOBAL = {
    "LongformerForSequenceClassification": "the first token",
    "LongformerForQuestionAnswering": "the tokens of the question",
    "LongformerForMultipleChoice": "the tokens of the question",
}
# Tokens that show the shapes of outputs.
_FEW = 8
NOTE = "no token is global: the file computes what upstream does without global_attention_mask"


def read_layers(model: PreTrainedModel, names: Sequence[str]) -> tuple[list[Layer], Observation]:
    """Return the windows of all layers, and a run of the model, whose attention is replaced for good.

    Args:
        model: the model, on the meta device or any other.
        names: its inputs, int64 `[B, N]`.

    Raises:
        UsageError: the model makes tokens global, or has sizes that upstream cannot compute.
    """
    name = type(model).__name__
    if name in _GLOBAL:
        raise UsageError(
            f"{name} has global attention.",
            why=f"It makes {_GLOBAL[name]} global: they see every token, and every token sees them.",
            fix="Without global tokens there are feature-extraction, fill-mask and token-classification.",
        )
    narrow = next((path for path, part in _attention(model) if part.one_sided_attn_window_size < 2), None)
    if narrow is not None:
        raise UsageError(
            f"The attention_window of {narrow} is 2.",
            why="transformers' own Longformer computes none below 4: there is nothing to compare with.",
        )
    chunk, widest = model.config.chunk_size_feed_forward, max(model.config.attention_window)
    if model.config.model_type == "longformer" and chunk and widest % chunk:
        raise UsageError(
            f"chunk_size_feed_forward is {chunk}.",
            why=f"transformers' own Longformer takes one that divides its widest window, {widest}.",
            fix="0 computes the same.",
        )

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2), None

    replace_code(model, attend)
    layers = []
    for path, part in _attention(model):
        reach = part.one_sided_attn_window_size
        layers.append(Layer(path=path, back=reach, ahead=reach, kv_heads=part.num_heads, head_dim=part.head_dim))
    return layers, Observation(_FEW, output_shapes(model, names, _FEW))


def positions(config: Any) -> int:
    """Return the length of the longest sequence that upstream computes.

    Longformer counts positions from that of padding, and leaves those before it out. LED has positions for the tokens
    that it adds up to whole windows too.

    Raises:
        UsageError: there is none.
    """
    if config.model_type == "longformer":
        found: int = config.max_position_embeddings - (config.pad_token_id or 0) - 1
        return found
    windows = config.attention_window
    widest = max(windows) if isinstance(windows, list) else windows
    found = config.max_encoder_position_embeddings // widest * widest
    if found < 1:
        raise UsageError(
            f"max_encoder_position_embeddings is {config.max_encoder_position_embeddings}.",
            why=f"transformers' own LED pads every sequence to whole windows, of {widest} tokens.",
        )
    return found


def replace_code(model: PreTrainedModel, attend: Callable[..., tuple[Tensor, None]]) -> None:
    """Let a model compute its attention by a function as `AttentionInterface` defines it, for any length."""
    for _, part in _attention(model):
        part.forward = partial(_attend, part, attend)
    for part in model.modules():
        own: Any = part
        if type(own).__name__ in _BASES:
            own.forward = partial(_BASES[type(own).__name__], own)
        elif type(own).__name__ == "LongformerLayer":
            own.chunk_size_feed_forward = 0  # the same for every token, and no length has to be a multiple


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the function that computes a model with its code replaced, `self` first: its class's own for most."""
    return _BASES.get(type(model).__name__, type(model).forward)


def _attention(model: nn.Module) -> list[tuple[str, Any]]:
    return [(path, part) for path, part in model.named_modules() if type(part).__name__ in _ATTENTION]


def _attend(
    own: Any,
    attend: Callable[..., tuple[Tensor, None]],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor]:
    """Compute the forward of one of `_ATTENTION`, `[B, N, H·D]`, with a mask `[B, 1, 1, N]` or none."""
    batch, length, width = hidden_states.shape
    heads = (batch, length, own.num_heads, own.head_dim)
    query, key, value = (part(hidden_states).view(heads).transpose(1, 2) for part in (own.query, own.key, own.value))
    out, _weights = attend(own, query, key, value, attention_mask, scaling=own.head_dim**-0.5)
    return (out.reshape(batch, length, width),)


def _longformer(
    own: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> Any:
    """Compute `LongformerModel.forward`, without its padding to whole windows."""
    from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling

    hidden = own.embeddings(input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids)
    hidden = _through(own.encoder.layer, hidden, attention_mask)
    pooled = None if own.pooler is None else own.pooler(hidden)
    return LongformerBaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


def _led(own: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
    """Compute `LEDEncoder.forward`, without its padding to whole windows."""
    from transformers.models.led.modeling_led import LEDEncoderBaseModelOutput

    hidden = own.layernorm_embedding(own.embed_tokens(input_ids) + own.embed_positions(input_ids.shape))
    return LEDEncoderBaseModelOutput(last_hidden_state=_through(own.layers, hidden, attention_mask))


def _through(layers: Iterable[Any], hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    mask = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
    for layer in layers:
        hidden = layer(hidden, attention_mask=mask)[0]
    return hidden


# Class whose forward pads to whole windows → what computes the same without.
_BASES: Mapping[str, Callable[..., Any]] = {"LongformerModel": _longformer, "LEDEncoder": _led}
