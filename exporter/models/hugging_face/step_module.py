"""A Hugging Face decoder a few tokens at a time: upstream's own module, whose attention continues from rings of keys.

Nothing of the model is written again. It runs on the new tokens without a cache of its own; what its attention layers
are given are the keys and values of these tokens alone. `StepState`, a part of the model, adds those of earlier calls.

- A layer with a window has a ring of as many slots as a query sees keys, one without a window as many as there are
  positions. A layer that takes the keys of another one reads that one's ring.
- Rotary embedding is read from tables that upstream's own module computes in float64 at export.
- With several sequences, each ring has a row of biases next to it that hide padding. Positions are counted with the
  padding, as upstream's forward counts them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....core.error_texts import argument
from ....core.errors import UsageError
from ....core.geometry import WindowGeometry
from ....core.nodes.attention import OUTSIDE_SCORE
from ....core.nodes.step import StepAttributes, ring_slots
from ..family import ModelSpec
from ..forms import StepCache, cache_pairs
from ..parts.float64 import InFloat64
from ..parts.step_attention_op import step_attention_op
from ..parts.step_rotary import rows_of
from ..parts.step_tables import StepTableBuilder
from .arguments import HuggingFaceArgs, Layer
from .module import MASK, STEP, exportable, rotary_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The number of positions of a step file, if the user gives none and the model has no fewer.
_POSITIONS = 4096


def step_arguments(args: HuggingFaceArgs, batch: int, max_length: int | None) -> HuggingFaceArgs:
    """Return the arguments of a step file: its positions, and the mask of padding if there are several sequences.

    Raises:
        UsageError: the model passes more than keys from token to token, or has not so many positions.
    """
    cannot = f"{args.architecture} cannot run step by step."
    whole = f"Export whole sequences: {argument('mode', 'full')}."
    others = _other_layers(args)
    if others:
        why = f"It has layers of the kind {', '.join(others)}, whose state no step file keeps yet."
        raise UsageError(cannot, why=why, fix=whole)
    if any(layer.chunk for layer in args.layers):
        why = "Its chunks begin anew at fixed positions, and a ring forgets one key at a time."
        raise UsageError(cannot, why=why, fix=whole)
    if not args.per_token or any(not layer.head_dim for layer in args.layers):
        raise UsageError(cannot, why="Its first output has no row for each token.")
    length = min(args.longest, _POSITIONS) if max_length is None else max_length
    if not 1 <= length <= args.longest:
        raise UsageError(
            f"{argument('seq_len', length)} does not fit.", why=f"{args.architecture} has {args.longest} positions."
        )
    names = args.inputs if batch > 1 else tuple(name for name in args.inputs if name != MASK)
    return args.model_copy(update={"inputs": names, "max_length": length})


def _other_layers(args: HuggingFaceArgs) -> list[str]:
    """List the kinds of layers that pass more from token to token than keys and values."""
    nested = args.config.get("text_config")
    config = nested if isinstance(nested, dict) else args.config
    kinds: set[str] = set()
    for name in ("layer_types", "block_types"):
        listed = config.get(name)
        kinds |= {str(kind) for kind in listed} if isinstance(listed, list | tuple) else set()
    # A linear attention sums up what it has seen in a state of its own.
    return sorted(kind for kind in kinds if not kind.endswith("attention") or kind == "linear_attention")


def ring_of(args: HuggingFaceArgs, layer: Layer) -> WindowGeometry:
    """Return the window that a layer's ring holds: its own, or all positions."""
    geometry = layer.geometry
    if not geometry.sees_all:
        return geometry
    assert args.max_length is not None
    return WindowGeometry.reaching(args.max_length - 1, 0)


def step_caches(spec: ModelSpec[HuggingFaceArgs]) -> list[StepCache]:
    """List the rings of keys and values of every layer that has its own, then the biases that hide padding."""
    args = spec.args
    batch = spec.sizes.batch
    found: list[StepCache] = []
    for index, layer in _owners(args):
        shape = (batch, layer.kv_heads, ring_slots(ring_of(args, layer)), layer.head_dim)
        found += [(f"{part}_cache.{index}", shape, "float") for part in ("key", "value")]
    if MASK in args.inputs:
        found += [(f"mask_cache.{slots}", (batch, slots), "float32") for slots in _rings(args)]
    return found


def _owners(args: HuggingFaceArgs) -> list[tuple[int, Layer]]:
    return [(index, layer) for index, layer in enumerate(args.layers) if layer.shares is None]


def _rings(args: HuggingFaceArgs) -> list[int]:
    """List the different numbers of slots, in the order of layers."""
    return list(dict.fromkeys(ring_slots(ring_of(args, layer)) for layer in args.layers))


def step_module(spec: ModelSpec[HuggingFaceArgs], chunk: int) -> nn.Module:
    """Build the model for calls of `chunk` tokens.

    It takes the data inputs, the position and the caches, and returns the output and the next caches.
    """
    args = spec.args
    model: Any = exportable(spec)
    state = StepState(args, chunk, model)
    model.localattn_steps = state
    for layer in args.layers:
        setattr(model.get_submodule(layer.path), STEP, state.attend)
    own = model.forward

    def forward(self: Any, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given = dict(zip(args.inputs, data, strict=True))
        mask = given.pop(MASK, None)
        positions = state.begin(position, given["input_ids"].shape[0], mask, caches)
        output = own(**given, position_ids=positions.unsqueeze(0))
        return output[0], *state.end()

    model.forward = MethodType(forward, model)
    module: nn.Module = model
    return module


class StepState(nn.Module):
    """The rings of one call, and the tables that follow from its position.

    Args:
        args: arguments of a step file.
        chunk: tokens per call.
        model: the model that it will be a part of.
    """

    row: Tensor

    def __init__(self, args: HuggingFaceArgs, chunk: int, model: PreTrainedModel) -> None:
        super().__init__()
        assert args.max_length is not None
        self.args, self.chunk = args, chunk
        self.rings_of_layers = [(ring_of(args, layer), layer.kv_heads) for layer in args.layers]
        self.builder_of = {
            (window, kv_heads): StepTableBuilder(StepAttributes(window, 1.0), kv_heads, 1, chunk, args.max_length)
            for window, kv_heads in dict.fromkeys(self.rings_of_layers)
        }
        self.builders = nn.ModuleList(self.builder_of.values())
        owners = [(module, kind) for module in rotary_modules(model) for kind in _kinds(module)]
        tables = [RotaryTable(module, kind, args.max_length) for module, kind in owners]
        self.rotary = nn.ModuleList(tables)
        for table in tables:
            table.install(self)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the rows of a call."""
        self.register_buffer("row", torch.arange(self.chunk), persistent=False)

    def begin(self, position: Tensor, batch: int, mask: Tensor | None, caches: Sequence[Tensor]) -> Tensor:
        """Take the state of a call, and return its positions `[C]`.

        Args:
            position: int64 `[1]`.
            batch: sequences.
            mask: int64 `[B, C]`, 1 = keep, or None.
            caches: as `step_caches` lists them.
        """
        # What fills a chunk up before position 0 is hidden from the rest; it takes the first row of every table.
        self.positions = position if self.chunk == 1 else (position + self.row).clamp_min(0)
        owners = [index for index, _ in _owners(self.args)]
        count = 2 * len(owners)
        self.rings = dict(zip(owners, cache_pairs(caches[:count]), strict=True))
        self.following: list[Tensor] = []
        self.turn = 0
        self.views = {ring: builder(position, batch, None) for ring, builder in self.builder_of.items()}
        self.hidden: dict[int, Tensor] = {}
        if mask is not None:
            new = torch.where(mask != 0, 0.0, OUTSIDE_SCORE)
            for slots, old in zip(_rings(self.args), caches[count:], strict=True):
                self._hide(slots, old, new, position)
        return self.positions

    def _hide(self, slots: int, old: Tensor, new: Tensor, position: Tensor) -> None:
        """Add the biases of padding to every view of a ring, `old [B, R]` and `new [B, C]`, and keep the next ones."""
        for key, view in self.views.items():
            if ring_slots(key[0]) != slots:
                continue
            if self.chunk == 1:
                ring = torch.where(self.builder_of[key].ring == position % slots, new, old)
                self.hidden[slots] = ring
            else:
                ring = torch.cat((old, new), dim=1)
                self.hidden[slots] = ring[:, view.write_index]
            self.views[key] = replace(view, score_bias=view.score_bias + ring[:, None, None, :])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        """Compute the attention of the next layer; `[B, H, C, D]` and KV heads → `[B, H, C, D]`."""
        index, self.turn = self.turn, self.turn + 1
        shares, ring = self.args.layers[index].shares, self.rings_of_layers[index]
        attributes = StepAttributes(ring[0], scale, softcap=softcap)
        caches = self.rings[index if shares is None else shares]
        out, *following = step_attention_op(query, key, value, caches, self.views[ring], attributes, sinks)
        if shares is None:
            self.following += following
        return out

    def end(self) -> list[Tensor]:
        """Return the next caches."""
        if self.turn != len(self.args.layers):
            raise UsageError("An attention layer was not seen when the windows were read.")
        return [*self.following, *self.hidden.values()]


class RotaryTable(nn.Module):
    """Cosines and sines of every position, as a rotary module of upstream computes them in float64.

    Args:
        module: upstream's module.
        kind: the type of layer that it is called for; None where it makes no difference.
        length: number of positions.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, module: nn.Module, kind: str | None, length: int) -> None:
        super().__init__()
        self._owner, self.kind, self.length = [module], kind, length  # in a list: it is no part of this one
        self._own: Callable[..., tuple[Tensor, Tensor]] = type(module).forward

    def install(self, state: StepState) -> None:
        """Read the tables wherever upstream's module is called."""
        module: Any = self._owner[0]
        tables: dict[str | None, RotaryTable] = module.__dict__.setdefault("localattn_tables", {})
        tables[self.kind] = self

        def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
            cosine, sine = tables[layer_type].rows(state.positions)
            return cosine.to(x.dtype), sine.to(x.dtype)

        module.forward = forward

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the tables; halves that are equal are kept once.

        Raises:
            UsageError: the rotation of a position depends on the length of the sequence.
        """
        whole = self._computed(self.length)
        few = min(2, self.length)  # a rotation by other frequencies shows at position 1
        if not all(torch.equal(a[:few], b) for a, b in zip(whole, self._computed(few), strict=True)):
            raise UsageError(
                f"The rotary embedding changes within {self.length} positions.",
                why="Keys in a cache cannot be rotated again when a sequence becomes longer.",
                fix=f"Give a shorter {argument('seq_len')}: as many as the model was first trained with.",
            )
        for name, table in zip(("cosine", "sine"), whole, strict=True):
            first, second = table.chunk(2, dim=-1)
            self.register_buffer(name, (first if torch.equal(first, second) else table).contiguous(), persistent=False)
        self.width = whole[0].shape[-1]

    def _computed(self, length: int) -> list[Tensor]:
        kind = () if self.kind is None else (self.kind,)
        with InFloat64():
            found = self._own(self._owner[0], torch.zeros(1, dtype=torch.float64), torch.arange(length)[None], *kind)
        return [table[0].float() for table in found]

    def rows(self, positions: Tensor) -> list[Tensor]:
        """Return cosines and sines of positions `[C]`, each `[1, C, D]`."""
        found = [rows_of(table, positions).unsqueeze(0) for table in (self.cosine, self.sine)]
        return [x if x.shape[-1] == self.width else torch.cat((x, x), dim=-1) for x in found]


def _kinds(module: nn.Module) -> list[str | None]:
    """List the types of layers that a rotary module is called for."""
    if "layer_type" not in inspect.signature(type(module).forward).parameters:
        return [None]
    names = [name.removesuffix("_inv_freq") for name, _ in module.named_buffers(recurse=False)]
    return [name for name in names if not name.endswith("_original")]
