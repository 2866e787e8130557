"""The constructor arguments of the supported classes, with upstream's names, defaults and resolution.

Upstream resolves its defaults in several places (`None` means 0 or 1 or `True` or half a window, and
`**kwargs` travel through two constructors). This file is the only one here that does: everything else
asks `geometry()`, `rotary_dim`, `xpos_base`, `score_scale`, `attention_args()` and `mha_args()`.
Source: local-attention 1.11.2; zetascale 2.8.8 has the same arguments.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from ...core.errors import UsageError
from ...core.geometry import WindowGeometry

# Far above any real model, and low enough that every product of two of them fits an int64.
_LARGEST = 2**30

Size = Annotated[int, Field(strict=True, ge=1, le=_LARGEST)]
Count = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
# A bound on depth keeps a typing error from building a table of a billion layers.
Depth = Annotated[int, Field(strict=True, ge=1, le=4096)]
Integer = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Factor = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=_LARGEST)]
Probability = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
OldRotaryConfig = Annotated[tuple[Size, ...], Field(min_length=1)]

_Self = TypeVar("_Self", bound="Arguments")


class Arguments(BaseModel):
    """Base of the argument models: frozen, no unknown names, no guessing of types.

    Raises:
        UsageError: an unknown name, a missing one, a value of the wrong type or outside its range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls: type[_Self], data: Any, handler: ModelWrapValidatorHandler[_Self]) -> _Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise _explained(cls, error) from error


def feed_forward_width(dim: int, mult: float) -> int:
    """Width of the feed-forward's value half, and of its gate half."""
    return int(dim * mult * 2 / 3)


class LocalAttentionArgs(Arguments):
    """Arguments of `LocalAttention`; `dim` is the width of one head and only turns rotary on."""

    window_size: Size
    causal: Flag = False
    look_backward: Count = 1
    look_forward: Count | None = None
    dropout: Probability = 0.0
    shared_qk: Flag = False
    rel_pos_emb_config: OldRotaryConfig | None = None
    dim: Size | None = None
    autopad: Flag = False
    exact_windowsize: Flag = False
    scale: Real | None = None
    use_rotary_pos_emb: Flag = True
    use_xpos: Flag = False
    xpos_scale_base: Real | None = None

    @model_validator(mode="after")
    def _check(self) -> LocalAttentionArgs:
        self.geometry()
        if self.rotary_dim is not None and self.rotary_dim % 2:
            raise UsageError(
                f"The rotary width is {self.rotary_dim}, an odd number.",
                why="Rotary embeddings turn channels in pairs.",
                fix="Give an even head width, or use_rotary_pos_emb = false.",
            )
        if self.xpos_base == 0:
            raise UsageError(
                f"use_xpos has a scale base of 0 (window_size {self.window_size}).",
                why="The base is xpos_scale_base or window_size // 2; divided by 0, every output is NaN.",
                fix="Set xpos_scale_base to the value the model was trained with, or use_xpos to false.",
            )
        return self

    def geometry(self) -> WindowGeometry:
        """The window; `look_forward` left out means 0 if causal, else 1."""
        forward = self.look_forward
        if forward is None:
            forward = 0 if self.causal else 1
        return WindowGeometry(
            window_size=self.window_size,
            look_backward=self.look_backward,
            look_forward=forward,
            causal=self.causal,
            exact_windowsize=self.exact_windowsize,
        )

    @property
    def rotary_dim(self) -> int | None:
        """Channels the rotary embedding turns (the whole head), or None without rotary."""
        if not self.use_rotary_pos_emb:
            return None
        # The deprecated argument wins over `dim` upstream.
        return self.rel_pos_emb_config[0] if self.rel_pos_emb_config else self.dim

    @property
    def xpos_base(self) -> float | None:
        """The base of xpos' exponents, or None where xpos has no effect (off, or no rotary)."""
        if not self.use_xpos or self.rotary_dim is None:
            return None
        return self.window_size // 2 if self.xpos_scale_base is None else self.xpos_scale_base

    def score_scale(self, head_dim: int) -> float:
        """What q is multiplied by, for heads `head_dim` wide."""
        return head_dim**-0.5 if self.scale is None else self.scale


class LocalMHAArgs(Arguments):
    """Arguments of `LocalMHA`, with those it passes through to `LocalAttention`."""

    dim: Size
    window_size: Size
    dim_head: Size = 64
    heads: Size = 8
    dropout: Probability = 0.0
    causal: Flag = False
    prenorm: Flag = False
    qk_rmsnorm: Flag = False
    qk_scale: Real = 8.0
    use_xpos: Flag = False
    xpos_scale_base: Real | None = None
    exact_windowsize: Flag | None = None
    gate_values_per_head: Flag = False
    look_backward: Count = 1
    look_forward: Count | None = None
    shared_qk: Flag = False
    rel_pos_emb_config: OldRotaryConfig | None = None
    use_rotary_pos_emb: Flag = True

    @model_validator(mode="after")
    def _check(self) -> LocalMHAArgs:
        if self.rotary_dim not in (None, self.dim_head):
            raise UsageError(
                f"rel_pos_emb_config turns {self.rotary_dim} channels of heads {self.dim_head} wide.",
                why="local-attention turns whole heads and fails on any other width.",
                fix="Leave the deprecated rel_pos_emb_config out.",
            )
        return self

    def attention_args(self) -> LocalAttentionArgs:
        """The arguments of the `LocalAttention` inside."""
        return LocalAttentionArgs(
            dim=self.dim_head,
            window_size=self.window_size,
            causal=self.causal,
            autopad=True,
            scale=self.qk_scale if self.qk_rmsnorm else None,
            exact_windowsize=True if self.exact_windowsize is None else self.exact_windowsize,
            use_xpos=self.use_xpos,
            xpos_scale_base=self.xpos_scale_base,
            look_backward=self.look_backward,
            look_forward=self.look_forward,
            shared_qk=self.shared_qk,
            rel_pos_emb_config=self.rel_pos_emb_config,
            use_rotary_pos_emb=self.use_rotary_pos_emb,
        )

    def geometry(self) -> WindowGeometry:
        """The window; exact unless `exact_windowsize` is false."""
        return self.attention_args().geometry()

    @property
    def inner_dim(self) -> int:
        """Width of q, of k and of v over all heads."""
        return self.heads * self.dim_head

    @property
    def rotary_dim(self) -> int | None:
        """Channels of a head the rotary embedding turns, or None without rotary."""
        return self.attention_args().rotary_dim

    @property
    def xpos_base(self) -> float | None:
        """The base of xpos' exponents, or None where xpos has no effect."""
        return self.attention_args().xpos_base

    @property
    def score_scale(self) -> float:
        """What q is multiplied by: `qk_scale` with `qk_rmsnorm`, else `dim_head ** -0.5`."""
        return self.attention_args().score_scale(self.dim_head)


class LocalTransformerArgs(Arguments):
    """Arguments of `LocalTransformer`, with those it passes through to `LocalMHA`.

    `num_tokens` None means embeddings in and embeddings out; only then may `max_seq_len` be None.
    """

    num_tokens: Size | None
    max_seq_len: Size | None
    dim: Size
    depth: Depth
    causal: Flag = True
    local_attn_window_size: Size = 512
    dim_head: Size = 64
    heads: Size = 8
    ff_mult: Factor = 4.0
    attn_dropout: Probability = 0.0
    ff_dropout: Probability = 0.0
    ignore_index: Integer = -1
    use_xpos: Flag = False
    xpos_scale_base: Real | None = None
    use_dynamic_pos_bias: Flag = False
    # Without a global layer it has no effect; upstream only checks its range.
    layers_insert_global_attn: tuple[Size, ...] | None = None
    num_residual_streams: Size = 4
    qk_rmsnorm: Flag = False
    qk_scale: Real = 8.0
    exact_windowsize: Flag | None = None
    gate_values_per_head: Flag = False
    look_backward: Count = 1
    look_forward: Count | None = None
    shared_qk: Flag = False
    rel_pos_emb_config: OldRotaryConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> LocalTransformerArgs:
        if self.num_tokens is not None and self.max_seq_len is None:
            raise UsageError(
                "max_seq_len is missing.",
                why="A model with token embeddings has that many position embeddings.",
                fix="Give max_seq_len, or num_tokens = null for a model without embeddings.",
            )
        if any(layer > self.depth for layer in self.layers_insert_global_attn or ()):
            raise UsageError(f"layers_insert_global_attn names a layer beyond depth {self.depth}.")
        if self.ff_inner < 1:
            raise UsageError(
                f"ff_mult {self.ff_mult} leaves the feed-forward no channels.",
                why=f"Its width is int({self.dim} * {self.ff_mult} * 2 / 3) = 0.",
            )
        self._check_position_bias(self.geometry())
        return self

    def _check_position_bias(self, geometry: WindowGeometry) -> None:
        window = self.local_attn_window_size
        if self.use_dynamic_pos_bias and geometry.keys_per_window != 2 * window:
            raise UsageError(
                f"use_dynamic_pos_bias with {geometry.look_backward} windows back and {geometry.look_forward} forward.",
                why=f"The bias covers 2 windows ({2 * window} keys); this window gathers "
                f"{geometry.keys_per_window}, and local-attention itself fails.",
                fix="Set look_backward + look_forward to 1 (non-causal: look_forward = 0).",
            )

    def mha_args(self) -> LocalMHAArgs:
        """The arguments of the `LocalMHA` in every layer."""
        return LocalMHAArgs(
            dim=self.dim,
            dim_head=self.dim_head,
            heads=self.heads,
            dropout=self.attn_dropout,
            causal=self.causal,
            window_size=self.local_attn_window_size,
            use_xpos=self.use_xpos,
            xpos_scale_base=self.xpos_scale_base,
            # The position bias replaces rotary.
            use_rotary_pos_emb=not self.use_dynamic_pos_bias,
            prenorm=True,
            qk_rmsnorm=self.qk_rmsnorm,
            qk_scale=self.qk_scale,
            exact_windowsize=self.exact_windowsize,
            gate_values_per_head=self.gate_values_per_head,
            look_backward=self.look_backward,
            look_forward=self.look_forward,
            shared_qk=self.shared_qk,
            rel_pos_emb_config=self.rel_pos_emb_config,
        )

    def geometry(self) -> WindowGeometry:
        """The window of every layer."""
        return self.mha_args().geometry()

    @property
    def ff_inner(self) -> int:
        """Width of the feed-forward's value half, and of its gate half."""
        return feed_forward_width(self.dim, self.ff_mult)

    @property
    def position_bias_dim(self) -> int:
        """Hidden width of the dynamic position bias."""
        return self.dim // 2

    @property
    def rotary_dim(self) -> int | None:
        """Channels of a head the rotary embedding turns, or None without rotary."""
        return self.mha_args().rotary_dim

    @property
    def xpos_base(self) -> float | None:
        """The base of xpos' exponents, or None where xpos has no effect."""
        return self.mha_args().xpos_base

    @property
    def score_scale(self) -> float:
        """What q is multiplied by."""
        return self.mha_args().score_scale


# It looks at a few entries and levels only: YAML aliases can make a list of billions.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 60


def shown(value: object, limit: int = 60) -> str:
    """A value as it can be put on one line of an error, whatever it is."""
    try:
        text = "null" if value is None else _SHORT.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a nest of thousands of lists
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def close_match(name: str, known: Iterable[str]) -> str:
    """A fix line naming the known name that `name` was probably meant to be, or listing all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.6)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(names)}."


def _explained(arguments: type[BaseModel], error: ValidationError) -> UsageError:
    """Pydantic's findings as one line: the first, and how many more there are."""
    findings: list[Mapping[str, Any]] = list(error.errors(include_url=False, include_context=False))
    # A misspelt name often shows up twice, as an unknown name and as a missing one: the former says more.
    findings.sort(key=lambda finding: finding["type"] != "extra_forbidden")
    first = findings[0]
    name = ".".join(str(part) for part in first["loc"]) or "the arguments"
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    owner = arguments.__name__.removesuffix("Args")
    if first["type"] == "extra_forbidden":
        fix = close_match(name, arguments.model_fields)
        return UsageError(f"{owner} has no argument {shown(name)}{more}.", fix=fix)
    if first["type"] == "missing":
        return UsageError(f"{owner} needs {name}{more}.", fix=f"Give {name}.")
    return UsageError(f"{owner}: {name} is {shown(first['input'])}{more}.", why=f"{first['msg']}.")
