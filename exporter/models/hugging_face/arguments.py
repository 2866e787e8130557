"""Define the arguments of a Hugging Face model: its architecture and configuration, and what was read off its masks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ....core.geometry import WindowGeometry
from ..arguments import Arguments, Count, Flag, Size


class Layer(BaseModel):
    """One attention layer, as the model's own mask shows it.

    Args:
        path: path of the module.
        back: positions that a query sees before itself; None for all.
        ahead: positions that it sees after itself; None for all.
        chunk: size of the blocks that the sequence is cut into, each of which sees only itself; 0 without.
        kv_heads: heads of keys; 0 where an older file does not say.
        head_dim: width of a head of queries and keys, and of values where they are not narrower; 0 likewise.
        shares: index of the call whose keys and values it takes; None if it has its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    back: Count | None
    ahead: Count | None
    chunk: Count = 0
    kv_heads: Count = 0
    head_dim: Count = 0
    shares: Count | None = None

    @property
    def geometry(self) -> WindowGeometry:
        """The window of the layer."""
        if self.chunk:
            return WindowGeometry(self.chunk, 0, 0, causal=self.ahead == 0)
        if self.back is None:
            return WindowGeometry.all_keys(causal=self.ahead == 0)
        assert self.ahead is not None
        return WindowGeometry.reaching(self.back, self.ahead)


class HuggingFaceArgs(Arguments):
    """What makes the model, and what its file takes and gives.

    Args:
        architecture: name of the class in transformers.
        config: its configuration, as `config.json` has it.
        inputs: the file's inputs.
        outputs: the file's outputs.
        per_token: the first output has a row for each token.
        layers: every call of an attention layer, in order.
        vocab_size: number of tokens.
        longest: number of positions that the configuration states.
        max_length: positions of a step file; None for whole sequences.
    """

    architecture: str
    config: dict[str, Any]
    inputs: Annotated[tuple[str, ...], Field(min_length=1)]
    outputs: Annotated[tuple[str, ...], Field(min_length=1)]
    per_token: Flag
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    vocab_size: Size
    longest: Size
    max_length: Size | None = None

    @property
    def depth(self) -> int:
        """Number of attention layers."""
        return len(self.layers)

    def geometry(self) -> WindowGeometry:
        """Return the widest window of its layers, those that see every key aside."""
        local = [layer.geometry for layer in self.layers if not layer.geometry.sees_all]
        return max(local, key=lambda window: window.keys_per_window)

    @property
    def window(self) -> int:
        """Tokens that the widest window spans."""
        widest = self.geometry()
        if not widest.exact_windowsize:
            return widest.window_size
        return widest.backward_reach + 1 + widest.forward_reach

    def describe(self) -> str:
        """Describe the windows of all layers in words."""
        counted: dict[str, int] = {}
        for layer in self.layers:
            counted[words(layer)] = counted.get(words(layer), 0) + 1
        return ", ".join(f"{what} ({count} layer{'s' * (count > 1)})" for what, count in counted.items())


def words(layer: Layer) -> str:
    """Describe the window of a layer in words."""
    if layer.chunk:
        return f"{'causal ' * (layer.ahead == 0)}chunks of {layer.chunk}"
    if layer.back is None:
        return "all keys before" if layer.ahead == 0 else "all keys"
    if layer.ahead == 0:
        return f"{layer.back} back"
    return f"±{layer.back}" if layer.back == layer.ahead else f"{layer.back} back, {layer.ahead} ahead"
