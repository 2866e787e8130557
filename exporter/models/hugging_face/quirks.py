"""Define what may differ between types of Hugging Face models: the base class of the files in `types/`.

The methods of this class serve every type whose layers compute their attention through transformers'
`AttentionInterface`, and whose configuration means what its names say. A type that differs has a file in `types/`,
with a subclass that overrides what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ....core.error_texts import shown
from ....core.errors import UsageError
from .arguments import Layer
from .changed_meaning import ChangedMeaning
from .observe import Observation, read_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Computes attention as `AttentionInterface` of transformers defines it.
Attend = Callable[..., tuple[Tensor, None]]
# Positions where the configuration states none, and the most of any.
_POSITIONS, _MOST_POSITIONS = 8192, 1 << 30


class Quirks:
    """How models of one type are read and exported. A type without a file in `types/` uses this class itself.

    Attributes:
        encoder: name of the encoder's class, if it is exported alone because the type has a decoder too; else "".
        encoder_tensors: patterns of the encoder's tensors in a folder of the whole model → their names in the encoder.
        windows_shown_by: the part of the model that shows its windows, in words.
        notes: what a user of the file should know, one line each.
        changed_meanings: fields of config.json that an older transformers wrote in another sense.
    """

    encoder: str = ""
    encoder_tensors: Mapping[str, str] = {}
    windows_shown_by: str = "masks"
    notes: tuple[str, ...] = ()
    changed_meanings: tuple[ChangedMeaning, ...] = ()

    def refuse(self, model: PreTrainedModel) -> None:
        """Refuse a model that cannot be exported for a reason that only this type has.

        Args:
            model: the model, on the meta device or any other.

        Raises:
            UsageError: the reason.
        """

    def read_layers(self, model: PreTrainedModel, names: Sequence[str]) -> tuple[list[Layer], Observation]:
        """Return the windows of all layers, and a run of the model, which is not used afterwards.

        Args:
            model: the model, on the meta device or any other.
            names: its inputs, int64 `[B, N]`.

        Raises:
            UsageError: a layer has something else than a window.
        """
        return read_layers(model, names)

    def positions(self, config: PreTrainedConfig, where: str) -> int:
        """Return the length of the longest sequence that the model computes.

        Args:
            config: its configuration.
            where: the folder's name, for errors.

        Raises:
            UsageError: there is no such length.
        """
        stated = getattr(config.get_text_config(), "max_position_embeddings", None)
        if stated is None:
            return _POSITIONS
        if not isinstance(stated, int) or not 1 <= stated <= _MOST_POSITIONS:
            why = f"It is from 1 to {_MOST_POSITIONS:,}."
            raise UsageError(f"{where}: max_position_embeddings is {shown(stated)}.", why=why)
        return stated

    def replace_attention(self, model: PreTrainedModel, attend: Attend) -> None:
        """Let layers whose attention does not go through `AttentionInterface` call `attend`, in place."""

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """Return the function that computes the model, `self` first: the forward of its class."""
        return type(model).forward

    def tensors_without_effect(self, class_name: str) -> tuple[str, ...]:
        """Return prefixes of tensors of a class that no output of its file depends on, and that a folder may lack."""
        return ()
