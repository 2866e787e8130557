"""Longformer without global tokens: each layer is a window of `attention_window / 2` to both sides.

Its attention is code of its own, which cuts the sequence into chunks and pads it to whole windows. That code is
replaced by the attention of `module.py`; embeddings, feed-forward layers and heads stay upstream's. Without
`global_attention_mask` upstream computes the same, except in classes that make tokens global themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .....core.errors import UsageError
from ..arguments import Layer
from ..observe import Observation, output_shapes
from ..quirks import Attend, Quirks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Tokens that show the shapes of outputs.
_FEW = 8
# Classes whose forward makes tokens global, and which ones.
_GLOBAL = {
    "LongformerForSequenceClassification": "the first token",
    "LongformerForQuestionAnswering": "the tokens of the question",
    "LongformerForMultipleChoice": "the tokens of the question",
}


class SlidingChunks(Quirks, ABC):
    """A type with Longformer's attention, whose windows are attributes of its layers.

    Attributes:
        attention: class of the layers that compute attention.
        padded: class whose forward pads to whole windows.
    """

    attention: str
    padded: str
    windows_shown_by = "layers"
    notes = ("no token is global: the file computes what upstream does without global_attention_mask",)

    @staticmethod
    @abstractmethod
    def whole(own: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **given: Any) -> Any:
        """Compute the forward of the class `padded`, without its padding."""

    def refuse(self, model: PreTrainedModel) -> None:
        """Refuse a window that upstream cannot compute."""
        narrow = next((path for path, part in self._layers(model) if part.one_sided_attn_window_size < 2), None)
        if narrow is not None:
            raise UsageError(
                f"The attention_window of {narrow} is 2.",
                why="transformers' own Longformer computes none below 4: there is nothing to compare with.",
            )

    def read_layers(self, model: PreTrainedModel, names: Sequence[str]) -> tuple[list[Layer], Observation]:
        """Return the windows of all layers, and a run of the model, whose attention is replaced for good."""

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            return query.transpose(1, 2), None

        self.replace_attention(model, attend)
        layers = []
        for path, part in self._layers(model):
            reach = part.one_sided_attn_window_size
            layers.append(Layer(path=path, back=reach, ahead=reach, kv_heads=part.num_heads, head_dim=part.head_dim))
        return layers, Observation(_FEW, output_shapes(model, names, _FEW))

    def replace_attention(self, model: PreTrainedModel, attend: Attend) -> None:
        """Let a model compute its attention by a function, for any length."""
        for _, part in self._layers(model):
            part.forward = partial(_attend, part, attend)
        for part in model.modules():
            if type(part).__name__ == self.padded:
                part.forward = partial(self.whole, part)  # type: ignore[method-assign]

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """Return the function that computes the model, without padding."""
        return self.whole if type(model).__name__ == self.padded else super().forward_of(model)

    def _layers(self, model: nn.Module) -> list[tuple[str, Any]]:
        return [(path, part) for path, part in model.named_modules() if type(part).__name__ == self.attention]


def _attend(
    own: Any, attend: Attend, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor]:
    """Compute the forward of a layer of attention, `[B, N, H·D]`, with a mask `[B, 1, 1, N]` or none."""
    batch, length, width = hidden_states.shape
    heads = (batch, length, own.num_heads, own.head_dim)
    query, key, value = (part(hidden_states).view(heads).transpose(1, 2) for part in (own.query, own.key, own.value))
    out, _weights = attend(own, query, key, value, attention_mask, scaling=own.head_dim**-0.5)
    return (out.reshape(batch, length, width),)


def through(layers: Iterable[Any], hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Compute layers one after another, with a mask `[B, N]` or none."""
    mask = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
    for layer in layers:
        hidden = layer(hidden, attention_mask=mask)[0]
    return hidden


class Longformer(SlidingChunks):
    """The type `longformer`."""

    attention = "LongformerSelfAttention"
    padded = "LongformerModel"

    @staticmethod
    def whole(
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
        hidden = through(own.encoder.layer, hidden, attention_mask)
        pooled = None if own.pooler is None else own.pooler(hidden)
        return LongformerBaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def refuse(self, model: PreTrainedModel) -> None:
        """Refuse global tokens, and sizes that upstream cannot compute."""
        name = type(model).__name__
        if name in _GLOBAL:
            raise UsageError(
                f"{name} has global attention.",
                why=f"It makes {_GLOBAL[name]} global: they see every token, and every token sees them.",
                fix="Without global tokens there are feature-extraction, fill-mask and token-classification.",
            )
        super().refuse(model)
        chunk, widest = model.config.chunk_size_feed_forward, max(model.config.attention_window)
        if chunk and widest % chunk:
            raise UsageError(
                f"chunk_size_feed_forward is {chunk}.",
                why=f"transformers' own Longformer takes one that divides its widest window, {widest}.",
                fix="0 computes the same.",
            )

    def positions(self, config: PreTrainedConfig, where: str) -> int:
        """Return the longest sequence: positions are counted from that of padding, and those before it left out."""
        found: int = config.max_position_embeddings - (config.pad_token_id or 0) - 1
        return found

    def replace_attention(self, model: PreTrainedModel, attend: Attend) -> None:
        """Let a model compute its attention by a function, for any length."""
        super().replace_attention(model, attend)
        for part in model.modules():
            layer: Any = part
            if type(layer).__name__ == "LongformerLayer":
                layer.chunk_size_feed_forward = 0  # the same for every token, and no length has to be a multiple

    def tensors_without_effect(self, class_name: str) -> tuple[str, ...]:
        """Return the pooler of hidden states, which a folder saved by another class lacks."""
        return ("pooler.",) if class_name == self.padded else ()


QUIRKS: Quirks = Longformer()
