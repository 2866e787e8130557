"""A family of models, whole and small: what `localattn export` needs to know of a class that it has never seen.

Its models lie in a folder, as those of Hugging Face do: a configuration and weights. They take token ids and a mask
of padding, give two outputs, and their files leave batch and length open. The reference is the untouched model itself
in float64. A real family is a folder in `exporter/models/`, with these parts in files of their own, and a row of
`registry.py`; `tests/exporter/models/test_toy_family.py` takes this one through `localattn export`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.storage.reading import read_plain
from localattn.exporter.models.arguments import Arguments, Size
from localattn.exporter.models.family import Inputs, ModelSpec, UpstreamClass, sequence_length
from localattn.exporter.models.forms import FolderContents, FolderFamily, FolderRequest
from localattn.exporter.models.parts.attention_op import windowed_attention_op
from localattn.exporter.models.parts.float64 import Float64State
from localattn.exporter.options import ShapeRequest, Sizes


class TaggerArgs(Arguments):
    """The arguments of upstream's class, as its `config.json` has them."""

    vocab_size: Size
    width: Size
    heads: Size
    window: Size
    max_length: Size

    def geometry(self) -> WindowGeometry:
        """A token sees itself and the `window` tokens before it."""
        return WindowGeometry(self.window, look_backward=1, causal=True, exact_windowsize=True)


class Tagger(nn.Module):
    """Upstream's class: one layer of attention over token ids, with its hidden states as a second output."""

    def __init__(self, args: TaggerArgs) -> None:
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(args.vocab_size, args.width)
        self.query, self.key, self.value = (nn.Linear(args.width, args.width) for _ in range(3))
        self.tag = nn.Linear(args.width, args.vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Both int64 `[B, N]`, mask 1 = keep → logits `[B, N, vocab_size]`, hidden `[B, N, width]`."""
        x = self.embed(input_ids)
        heads = (part(x).unflatten(-1, (self.args.heads, -1)) for part in (self.query, self.key, self.value))
        hidden = x + self.attend(*heads, attention_mask != 0).flatten(-2)
        return self.tag(hidden), hidden

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        """Dense attention, `[B, N, H, D]`; a row that sees no token gives zeros."""
        position = torch.arange(q.shape[1])
        distance = position[:, None] - position
        visible = (distance >= 0) & (distance <= self.args.window) & kept[:, None, None, :]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).nan_to_num()
        return torch.einsum("bhij,bjhd->bihd", weights, v)


class ExportableTagger(Tagger):
    """The same with its attention as one node."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        """Windowed attention, `[B, N, H, D]`."""
        return windowed_attention_op(q, k, v, self.args.geometry(), q.shape[-1] ** -0.5, key_mask=kept)


def _config(folder: Path) -> dict[str, object]:
    try:
        found = json.loads(read_plain(folder / "config.json", 1 << 20))
    except (OSError, ValueError, UsageError):  # none, or none of ours
        return {}
    return found if isinstance(found, dict) else {}


class ToyFamily(FolderFamily[TaggerArgs]):
    """Taggers in a folder."""

    name = "toy"
    arguments = TaggerArgs
    classes = (UpstreamClass("toy.Tagger"),)
    window_argument = "window"
    tokens = ("input_ids",)
    dynamic = ("batch", "seq")
    folder_of = 'a toy has "model_type": "toy" in config.json'

    def sizes(self, args: TaggerArgs, request: ShapeRequest) -> Sizes:
        """Take the longest sequence, if no length is given."""
        length = sequence_length(request, args.max_length)
        return Sizes(length, request.batch, args.heads, args.width // args.heads, mask=False, attn_bias=False)

    def inputs(self, args: TaggerArgs, sizes: Sizes) -> Inputs:
        """Token ids and a mask of padding, each `[B, N]`."""
        return dict.fromkeys(("input_ids", "attention_mask"), ("int64", (sizes.batch, sizes.seq_len)))

    def outputs(self, args: TaggerArgs) -> tuple[str, ...]:
        """Both that the model returns."""
        return ("logits", "hidden")

    def token_limit(self, args: TaggerArgs) -> int:
        """Ids are below the size of the vocabulary."""
        return args.vocab_size

    def module(self, spec: ModelSpec[TaggerArgs]) -> nn.Module:
        """What is traced."""
        return ExportableTagger(spec.args)

    def reference(
        self, spec: ModelSpec[TaggerArgs], state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run the untouched model in float64."""
        outputs: tuple[Tensor, ...] = state.module(lambda: Tagger(spec.args))(**inputs)
        return outputs

    def recognises_folder(self, folder: Path) -> bool:
        """Look at the configuration."""
        return _config(folder).get("model_type") == "toy"

    def files(self, folder: Path) -> list[Path]:
        """Configuration and weights."""
        return [folder / "config.json", folder / "model.safetensors"]

    def read(self, folder: Path, request: FolderRequest) -> FolderContents:
        """Read both files; nothing in them runs."""
        from safetensors.torch import load_file

        config = _config(folder)
        arguments = {name: config[name] for name in TaggerArgs.model_fields if name in config}
        return FolderContents("toy.Tagger", arguments, load_file(folder / "model.safetensors"))


TOY = ToyFamily()
