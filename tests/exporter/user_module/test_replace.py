"""Upstream's layers inside hand-written models: what is replaced, what is left, and that nothing else changes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from local_attention import LocalAttention, LocalMHA, LocalTransformer
from torch import Tensor, nn

from localattn.core.errors import UsageError
from localattn.exporter.user_module.replace import ReplacementReport, replace_local_attention

from ...support.upstream import upstream_class

DIM, HEADS, WINDOW = 16, 2, 4


def mha(**kwargs: Any) -> LocalMHA:
    return LocalMHA(**{"dim": DIM, "window_size": WINDOW, "dim_head": 8, "heads": HEADS} | kwargs)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Mixer(nn.Module):
    """A convolution, a LocalMHA and a matrix."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.attention = nn.Sequential(nn.Identity(), mha(**kwargs))
        self.out = nn.Linear(DIM, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None) -> Tensor:
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.out(x + self.attention[1](x, mask=mask, attn_bias=attn_bias))


class Packed(nn.Module):
    """LocalAttention called with packed heads (3-D), with 4-D and with 5-D."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.attention = LocalAttention(**{"window_size": WINDOW, "dim": 8, "autopad": True} | kwargs)

    def forward(self, x: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None) -> Tensor:
        q = heads_of(x)
        k, v = q.flip(1), q * 2
        out = self.attention(q, k, v, mask=mask, attn_bias=attn_bias)
        packed = [part.flatten(0, 1) for part in (q, k, v)]
        out = out + self.attention(*packed, input_mask=mask, attn_bias=attn_bias).unflatten(0, q.shape[:2])
        if mask is None:
            out = out + self.attention(*(part.unsqueeze(0) for part in (q, k, v)), attn_bias=attn_bias)[0]
        return out.transpose(1, 2).flatten(2)


class Twice(nn.Module):
    """One layer at two paths, called at two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mha(causal=True, use_xpos=True)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x)[:, ::2])


class Untouched(LocalMHA):
    """A subclass that only adds."""

    extra = 1


class Doubled(LocalMHA):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(x, **kwargs)


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in filter(torch.is_floating_point, model.parameters()):
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def replaced(model: nn.Module, *args: Any, dynamic_length: bool = False, **kwargs: Any) -> ReplacementReport:
    return replace_local_attention(model, lambda m: m(*args, **kwargs), dynamic_length=dynamic_length)


def assert_same(model: nn.Module, *args: Any, **kwargs: Any) -> ReplacementReport:
    """Replaced for this length and for an open one, the model answers as it did."""
    randomised(model)
    expected = model(*args, **kwargs)
    state = model.state_dict()
    for dynamic_length in (False, True):
        report = replaced(model, *args, dynamic_length=dynamic_length, **kwargs)
        torch.testing.assert_close(report.module(*args, **kwargs), expected, atol=1e-5, rtol=1e-5)
        assert report.module.state_dict().keys() == state.keys()
    assert not any("exported" in name for name, _ in model.named_modules())
    torch.testing.assert_close(model(*args, **kwargs), expected, atol=0, rtol=0)
    return report


def example(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(length))


OPTIONS: list[dict[str, Any]] = [
    {"causal": True, "prenorm": True},
    {"causal": False},
    {"causal": True, "exact_windowsize": False, "look_backward": 2},
    {"causal": False, "exact_windowsize": False, "qk_rmsnorm": True},
    {"causal": True, "use_xpos": True, "gate_values_per_head": True},
    {"causal": False, "look_backward": 0, "look_forward": 2, "shared_qk": True},
    {"causal": False, "use_rotary_pos_emb": False, "look_backward": 0, "look_forward": 0},
]


@pytest.mark.parametrize("length", [3, 4, 17, 24])
@pytest.mark.parametrize("kwargs", OPTIONS, ids=str)
def test_mha_in_a_model(kwargs: dict[str, Any], length: int) -> None:
    report = assert_same(Mixer(**kwargs), example(length))
    assert [layer.path for layer in report.replaced] == ["attention.1"]
    assert report.replaced[0].class_name == "local_attention.transformer.LocalMHA"
    assert not report.left


@pytest.mark.parametrize("kept", [1.0, 0.75, 0.2], ids=["all", "most", "rows without keys"])
@pytest.mark.parametrize("kwargs", OPTIONS, ids=str)
def test_masks_and_biases(kwargs: dict[str, Any], kept: float) -> None:
    mask = torch.rand(2, 18, generator=torch.Generator().manual_seed(3)) < kept
    mask[1, 9:] = False
    keys = (kwargs.get("look_backward", 1) + 1 + kwargs.get("look_forward", 0 if kwargs["causal"] else 1)) * WINDOW
    bias = torch.randn(HEADS, WINDOW, keys)
    assert_same(Mixer(**kwargs), example(18), mask=mask, attn_bias=bias)
    assert_same(Mixer(**kwargs), example(18), mask=mask[:1])
    assert_same(Mixer(**kwargs), example(18), attn_bias=bias[:1])


@pytest.mark.parametrize(
    "kwargs", [{"causal": True}, {}, {"exact_windowsize": True}, {"scale": 0.3, "dim": None}], ids=str
)
def test_attention_with_any_leading_axes(kwargs: dict[str, Any]) -> None:
    x = example(19)
    keys = (2 if kwargs.get("causal") else 3) * WINDOW
    mask = torch.rand(2, 19, generator=torch.Generator().manual_seed(1)) < 0.6
    for given in ({}, {"mask": mask}, {"attn_bias": torch.randn(HEADS, WINDOW, keys)}):
        assert_same(Packed(**kwargs), x, **given)
    assert_same(Packed(**kwargs), x, mask=mask, attn_bias=torch.randn(1, 1, keys))


def test_whole_transformer_keeps_its_own_forward() -> None:
    class Inside(nn.Module):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.embed = nn.Linear(3, DIM)
            self.transformer = LocalTransformer(
                num_tokens=None, max_seq_len=None, dim=DIM, depth=2, dim_head=8, heads=2, **kwargs
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.transformer(self.embed(x))

    x = torch.randn(2, 13, 3)
    for kwargs in ({}, {"num_residual_streams": 1}, {"use_dynamic_pos_bias": True}, {"causal": False}):
        report = assert_same(Inside(local_attn_window_size=5, **kwargs), x)
        assert [layer.path for layer in report.replaced] == [f"transformer.layers.{n}.0.branch" for n in (0, 1)]


def test_shared_layer_called_twice() -> None:
    report = assert_same(Twice(), example(18))
    assert len(report.replaced) == 1
    assert report.replaced[0].other_paths == ("again",)
    assert report.replaced[0].lengths == (9, 18)


def test_layers_in_any_container() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = nn.ModuleDict({"a": mha()})
            self.listed = [self.known["a"]]  # a plain list: PyTorch does not know what is in it

        def forward(self, x: Tensor) -> Tensor:
            return self.listed[0](x)

    report = assert_same(Holder(), example(9))
    assert report.module.listed[0] is report.module.known["a"]
    assert hasattr(report.module.listed[0], "exported_core")


def test_subclasses() -> None:
    model = nn.Sequential(
        Untouched(dim=DIM, window_size=4, dim_head=8, heads=2), Doubled(dim=DIM, window_size=4, dim_head=8, heads=2)
    )
    report = assert_same(model, example(11))
    assert [layer.path for layer in report.replaced] == ["0", "1.attn_fn"]
    assert isinstance(report.module[0], Untouched)
    assert [(layer.path, "forward of its own" in layer.why) for layer in report.left] == [("1", True)]


@pytest.mark.parametrize(
    ("shape", "heads"), [((1, 2, 12, 12), 2), ((1, 1, 12, 8), 1)], ids=["wider values", "one head of keys"]
)
def test_keys_and_values_of_another_shape_stay_upstreams(shape: tuple[int, ...], heads: int) -> None:
    attention = LocalAttention(4, dim=8, autopad=True)
    q, k, v = torch.randn(1, 2, 12, 8), torch.randn(1, heads, 12, 8), torch.randn(shape)
    if heads == 1:  # upstream's product repeats them, where no other axis is in front
        q, k, v = (x[0] for x in (q, k, v))
    report = assert_same(attention, q, k, v)
    assert not report.replaced and "of the shapes" in report.left[0].why


def test_parts_that_the_user_changed_stay_in_use() -> None:
    model = mha(prenorm=True)
    model.norm = nn.RMSNorm(DIM)
    model.to_out = nn.Sequential(model.to_out, nn.Linear(DIM, DIM))
    model.to_qkv = nn.utils.parametrizations.weight_norm(model.to_qkv)
    model.attn_fn.scale = torch.tensor(0.7)
    assert_same(model, example(10))


def test_hooks_stay() -> None:
    model = mha()
    model.register_forward_hook(lambda module, args, output: output * 3)
    assert_same(model, example(10))


def test_the_cache_is_upstreams() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = mha(causal=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.attention(x, return_cache=True)

    assert_same(Cached(), example(10))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m.attn_fn, "dropout", nn.ReLU()), "dropout is a ReLU"),
        (lambda m: setattr(m.attn_fn.rel_pos, "forward", lambda x: x), "SinusoidalEmbeddings"),
        (lambda m: setattr(m, "forward", lambda x: x), "forward of its own"),
        (lambda m: m.attn_fn.register_forward_hook(lambda *x: None), "hooks"),
        (lambda m: m.attn_fn.dropout.register_forward_hook(lambda *x: 2 * x[2]), "hooks"),
        (lambda m: m.attn_fn.rel_pos.register_forward_hook(lambda *x: (2 * x[2][0], x[2][1])), "hooks"),
        (lambda m: setattr(m.attn_fn, "look_forward", -1), "look_forward"),
    ],
)
def test_what_upstream_does_not_build_is_left(change: Callable[[nn.Module], None], why: str) -> None:
    model = mha()
    change(model)

    def run(m: nn.Module) -> None:  # the change may have broken it: the call is on record all the same
        with suppress(Exception):
            m(example(8))

    left = replace_local_attention(model, run).left
    assert any(layer.path == "" and why in layer.why for layer in left), left


def test_a_layer_that_is_not_called_is_left() -> None:
    model = nn.ModuleList([mha(), mha()])
    report = replace_local_attention(model, lambda m: m[0](example(8)))
    assert [layer.path for layer in report.replaced] == ["0"]
    assert {layer.path for layer in report.left} == {"1", "1.attn_fn"}
    assert all("does not call" in layer.why for layer in report.left)


def test_a_window_size_of_its_own_is_left() -> None:
    model = LocalAttention(4, dim=8, use_xpos=True)
    q = torch.randn(1, 16, 8)
    report = replace_local_attention(model, lambda m: m(q, q, q, window_size=8))
    assert not report.replaced
    assert "window_size" in report.left[0].why


@pytest.mark.parametrize("kind", ["LocalMHA", "LocalAttention"])
def test_zeta(kind: str) -> None:
    if kind == "LocalMHA":
        model = upstream_class("zeta.LocalMHA")(dim=DIM, window_size=4, dim_head=8, heads=2, prenorm=True)
        report = assert_same(nn.Sequential(model), example(14))
    else:
        model = upstream_class("zeta.LocalAttention")(4, dim=8, autopad=True)
        q = torch.randn(2, 3, 14, 8)
        report = assert_same(model, q, q, q)
    assert report.replaced[0].class_name.startswith("zeta.nn.attention")


def labml_class() -> type[nn.Module]:
    """labml's class under its own name; the package itself needs dozens of others."""
    found = importlib.util.find_spec("labml_nn")
    if found is None or found.origin is None:
        pytest.skip("labml-nn is not installed")
    path = Path(found.origin).parent / "transformers/aft/__init__.py"
    spec = importlib.util.spec_from_file_location("labml_nn.transformers.aft", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AFTLocal


class AFT(nn.Module):
    """labml's layer, batch first, with a mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.layer = labml_class()(DIM, 24, 5)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.layer(query=x, key=x, value=x, mask=self.mask).transpose(0, 1)


@pytest.mark.parametrize("kind", ["none", "causal", "keys", "full"])
def test_aft_local(kind: str) -> None:
    length, generator = 17, torch.Generator().manual_seed(1)
    mask = torch.ones(length, length, 1, dtype=torch.bool)
    if kind == "causal":
        mask = torch.ones(length, length).tril().bool()[:, :, None]
    elif kind == "keys":
        mask = (torch.rand(1, length, 1, generator=generator) < 0.7) | (torch.arange(length) == 0)[None, :, None]
    elif kind == "full":
        mask = (torch.rand(length, length, 1, generator=generator) < 0.7) | torch.eye(length).bool()[:, :, None]
    model = randomised(AFT(mask))
    x = example(length)
    report = replaced(model, x)
    assert [layer.path for layer in report.replaced] == ["layer"]
    torch.testing.assert_close(report.module(x), model(x), atol=1e-5, rtol=1e-5)
    assert "dynamic length" in replaced(model, x, dynamic_length=True).left[0].why


class Padded(nn.Module):
    """AFT-local whose mask hides tokens 0, which random tokens of a large vocabulary need not hold."""

    def __init__(self, causal: bool, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, DIM)
        self.layer = labml_class()(DIM, 24, 5)
        self.causal, self.how = causal, how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(0, 1)
        length = tokens.shape[1]
        mask = (tokens != 0).t()[None]
        if self.how == "written":
            mask = torch.ones(1, length, 1, dtype=torch.bool)
            mask[:, :, 0] = tokens != 0
        elif self.how == "counted":
            mask = (torch.arange(length) < int((tokens != 0).sum()))[None, :, None]
        elif self.how == "expanded":
            mask = mask.expand(length, -1, -1)
        if self.causal:
            mask = mask & torch.ones(length, length).tril().bool()[:, :, None]
        return self.layer(query=x, key=x, value=x, mask=mask).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("how", ["computed", "written", "counted", "expanded"])
def test_a_mask_that_depends_on_the_inputs_is_not_built_in(how: str, causal: bool) -> None:
    model = randomised(Padded(causal, how))
    tokens = torch.arange(1, 18)[None]
    report = replaced(model, tokens)
    assert report.module.layer.exported_mask == ("full" if causal else "keys")
    padded = torch.cat((tokens[:, :12], torch.zeros(1, 5, dtype=torch.int64)), dim=1)
    torch.testing.assert_close(report.module(padded), model(padded), atol=1e-5, rtol=1e-5)


def test_a_module_in_double_precision_runs_in_fp32() -> None:
    model = randomised(mha()).double()
    report = replaced(model, example(9))
    expected = model(example(9).double()).float()
    torch.testing.assert_close(report.module(example(9)), expected, atol=1e-5, rtol=1e-5)


def test_modules_that_cannot_run_in_fp32_are_told_why() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = mha().bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x.bfloat16()).float()

    with pytest.raises(UsageError, match="must not cast to another type"):
        replaced(Casts(), example(9))
    with pytest.raises(UsageError, match="has no weights"):
        replaced(mha().to("meta"), example(9))


def test_a_failing_example_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="fails on the example inputs"):
        replaced(mha(), torch.randn(2, 8, 3))
