"""LED: its encoder alone, which is Longformer's attention without global tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .....core.errors import UsageError
from ..quirks import Quirks
from .longformer import SlidingChunks, through

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Led(SlidingChunks):
    """The type `led`."""

    attention = "LEDEncoderSelfAttention"
    padded = encoder = "LEDEncoder"
    encoder_tensors: Mapping[str, str] = {r"^(led\.)?encoder\.": "", r"^(led\.)?shared\.": "embed_tokens."}

    @staticmethod
    def whole(own: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        """Compute `LEDEncoder.forward`, without its padding to whole windows."""
        from transformers.models.led.modeling_led import LEDEncoderBaseModelOutput

        hidden = own.layernorm_embedding(own.embed_tokens(input_ids) + own.embed_positions(input_ids.shape))
        return LEDEncoderBaseModelOutput(last_hidden_state=through(own.layers, hidden, attention_mask))

    def positions(self, config: PreTrainedConfig, where: str) -> int:
        """Return the longest sequence: tokens that fill it up to whole windows have positions too."""
        windows = config.attention_window
        widest: int = max(windows) if isinstance(windows, list) else windows
        found: int = config.max_encoder_position_embeddings // widest * widest
        if found < 1:
            raise UsageError(
                f"max_encoder_position_embeddings is {config.max_encoder_position_embeddings}.",
                why=f"transformers' own LED pads every sequence to whole windows, of {widest} tokens.",
            )
        return found


QUIRKS: Quirks = Led()
