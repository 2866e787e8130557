"""What upstream's own modules save is what we expect, and tells how they were built."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.config import RawConfig, load_config, parse_config, resolve_class
from localattn.exporter.checkpoint.infer_config import canonical_state, gather
from localattn.exporter.checkpoint.infer_config import infer_config as completed
from localattn.exporter.checkpoint.load import find_config, load_state
from localattn.exporter.models.family import expected_shapes
from localattn.exporter.models.local_transformer.family import LOCAL_TRANSFORMER
from localattn.exporter.models.registry import CLASSES

from ...support.upstream import parse_args

torch = pytest.importorskip("torch")
local_attention = pytest.importorskip("local_attention")

TRANSFORMER = {"num_tokens": 11, "max_seq_len": 24, "dim": 20, "depth": 2, "local_attn_window_size": 4}
TRANSFORMERS = [
    {},
    {"dim_head": 6, "heads": 3},
    {"num_tokens": None},
    {"num_residual_streams": 1},
    {"num_residual_streams": 2, "depth": 1},
    {"num_residual_streams": 7, "depth": 3, "dim": 9},
    {"use_dynamic_pos_bias": True, "heads": 3},
    {"use_dynamic_pos_bias": True, "dim_head": 5, "dim": 13, "num_residual_streams": 1},
    {"qk_rmsnorm": True, "qk_scale": 5, "dim_head": 10},
    {"gate_values_per_head": True, "heads": 1},
    {"qk_rmsnorm": True, "gate_values_per_head": True, "use_dynamic_pos_bias": True, "heads": 2},
    {"ff_mult": 1},
    {"ff_mult": 2.7, "dim": 50},
    {"ff_mult": 8 / 3},
    {"use_xpos": True, "causal": False, "look_backward": 2, "shared_qk": True, "exact_windowsize": False},
]
MHA = {"dim": 20, "window_size": 4}
MHAS = [
    dict(zip(("prenorm", "qk_rmsnorm", "use_rotary_pos_emb", "dim_head", "heads"), values, strict=True))
    for values in itertools.product((False, True), (False, True), (False, True), (6, 64), (1, 3))
]
GATED = [{**options, "gate_values_per_head": True} for options in MHAS[::3]]
ATTENTIONS = [
    {},
    {"dim": 8},
    {"dim": 8, "use_rotary_pos_emb": False},
    {"rel_pos_emb_config": [6, 2]},
    {"dim": 8, "use_xpos": True, "causal": True},
]


@pytest.fixture(scope="session")
def zeta():
    """zeta's two modules. Importing the package itself needs dozens of others."""
    pytest.importorskip("local_attention")
    root = next((Path(p) / "zeta" for p in sys.path if (Path(p) / "zeta/nn").is_dir()), None)
    if root is None:
        pytest.skip("zetascale is not installed")
    before = dict(sys.modules)
    for name in ("zeta", "zeta.nn", "zeta.nn.attention", "zeta.nn.embeddings", "zeta.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    helpers = types.ModuleType("zeta.utils.main")
    helpers.exists = lambda value: value is not None
    helpers.default = lambda value, other: other if value is None else value
    helpers.l2norm = helpers.look_around = helpers.max_neg_values = helpers.pad_to_multiple = None
    sys.modules["zeta.utils.main"] = helpers
    attention = importlib.import_module("zeta.nn.attention.local_attention").LocalAttention
    mha = importlib.import_module("zeta.nn.attention.local_attention_mha").LocalMHA
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] == "zeta":
            del sys.modules[name]
    return types.SimpleNamespace(LocalAttention=attention, LocalMHA=mha)


def infer_config(*sources):
    """The configuration, from a state and what else is known."""
    return completed(gather(*sources))


def shapes_of(module) -> dict:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def build(class_name: str, kwargs: dict):
    return getattr(local_attention, class_name)(**kwargs)


CASES = [
    *(("LocalTransformer", {**TRANSFORMER, **options}) for options in TRANSFORMERS),
    *(("LocalMHA", {**MHA, **options}) for options in MHAS + GATED),
    *(("LocalAttention", {"window_size": 4, **options}) for options in ATTENTIONS),
]


@pytest.mark.parametrize(("class_name", "kwargs"), CASES)
def test_shapes_are_upstreams(class_name, kwargs):
    name = f"local_attention.{class_name}"
    assert expected_shapes(CLASSES[name].family, parse_args(name, kwargs)) == shapes_of(build(class_name, kwargs))


@pytest.mark.parametrize(("class_name", "kwargs"), CASES)
def test_a_full_config_is_kept(class_name, kwargs):
    state = build(class_name, kwargs).state_dict()
    config = parse_config({"class": class_name, "kwargs": kwargs, "hyper_connections": "0.3.2"})
    resolved = infer_config(state, config)
    assert resolved.args == parse_args(class_name, kwargs)
    assert resolved.hyper_connections == "0.3.2"
    assert (resolved.missing, resolved.unexpected) == ([], [])
    assert not set(resolved.inferred) & set(kwargs)
    assert resolved.state.keys() == state.keys()
    resolved.check_keys()


# What leaves no trace in the weights.
SILENT = {
    *("window_size", "local_attn_window_size", "causal", "exact_windowsize", "look_backward", "look_forward"),
    *("shared_qk", "use_xpos", "xpos_scale_base", "qk_scale"),
}


@pytest.mark.parametrize(("class_name", "kwargs"), CASES)
def test_the_weights_tell_the_rest(class_name, kwargs):
    given = {name: value for name, value in kwargs.items() if name in SILENT}
    hidden = class_name == "LocalMHA" and not (
        kwargs["use_rotary_pos_emb"] or kwargs["qk_rmsnorm"] or kwargs.get("gate_values_per_head")
    )
    if hidden:
        with pytest.raises(UsageError, match="needs heads"):
            infer_config(build(class_name, kwargs).state_dict(), None, given)
        given["heads"] = kwargs["heads"]
    resolved = infer_config(build(class_name, kwargs).state_dict(), None, given)
    wanted = parse_args(class_name, kwargs)
    assert resolved.class_name == f"local_attention.{class_name}"
    for name in type(wanted).model_fields:
        found, expected = getattr(resolved.args, name), getattr(wanted, name)
        if name == "ff_mult":  # many give the same width
            found, expected = resolved.args.ff_inner, wanted.ff_inner
        elif name == "max_seq_len" and wanted.num_tokens is None:
            expected = None
        elif class_name == "LocalAttention" and name in ("dim", "rel_pos_emb_config", "use_rotary_pos_emb"):
            found, expected = resolved.args.rotary_dim, wanted.rotary_dim
        assert found == expected, name
    assert (resolved.missing, resolved.unexpected) == ([], [])
    assert set(resolved.inferred).isdisjoint(given)


def test_zeta(zeta):
    for options in MHAS:
        kwargs = {**MHA, **options}
        module = zeta.LocalMHA(**kwargs)
        assert expected_shapes(CLASSES["zeta.LocalMHA"].family, parse_args("zeta.LocalMHA", kwargs)) == shapes_of(
            module
        )
        config = parse_config({"class": "zeta.LocalMHA", "kwargs": {"window_size": 4, "heads": options["heads"]}})
        resolved = infer_config(module.state_dict(), config)
        assert resolved.class_name == "zeta.LocalMHA"
        assert resolved.args == parse_args("zeta.LocalMHA", kwargs)
    for options in ATTENTIONS:
        kwargs = {"window_size": 4, **options}
        shapes = expected_shapes(CLASSES["zeta.LocalAttention"].family, parse_args("zeta.LocalAttention", kwargs))
        assert shapes == shapes_of(zeta.LocalAttention(**kwargs))


def test_zeta_has_no_gates():
    state = build("LocalMHA", {**MHA, "gate_values_per_head": True}).state_dict()
    resolved = infer_config(state, RawConfig("zeta.LocalMHA"), {"window_size": 4})
    assert resolved.unexpected == ["to_v_gate.0.weight", "to_v_gate.0.bias"]
    with pytest.raises(UsageError, match=r"2 tensors: to_v_gate\.0\.weight"):
        resolved.check_keys()


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 48, 64, 100, 511])
def test_some_ff_mult_gives_every_width(dim):
    kwargs = {**TRANSFORMER, "dim": dim, "depth": 1, "num_residual_streams": 1}
    state = build("LocalTransformer", kwargs).state_dict()
    for inner in (1, 2, dim, dim + 1, 3 * dim - 1, 8 * dim + 5):
        state["layers.0.1.branch.1.weight"] = torch.empty(2 * inner, dim)
        state["layers.0.1.branch.4.weight"] = torch.empty(dim, inner)
        assert infer_config(state, None, {"local_attn_window_size": 4}).args.ff_inner == inner


def test_round_multipliers_come_back():
    for mult in (1, 2, 2.5, 3, 4, 5.25, 8):
        state = build("LocalTransformer", {**TRANSFORMER, "dim": 64, "ff_mult": mult}).state_dict()
        assert infer_config(state, None, {"local_attn_window_size": 4}).args.ff_mult == mult


def test_the_window_is_never_guessed():
    for class_name, kwargs in CASES[:1] + CASES[-1:]:
        window = "local_attn_window_size" if class_name == "LocalTransformer" else "window_size"
        state = build(class_name, kwargs).state_dict()
        with pytest.raises(UsageError, match=f"needs {window}") as caught:
            infer_config(state, None, {"causal": True})
        assert "--write-config" in caught.value.fix


def test_a_config_means_upstreams_defaults_and_says_so():
    kwargs = {**TRANSFORMER, "local_attn_window_size": 512}
    state = build("LocalTransformer", kwargs).state_dict()
    resolved = infer_config(state, parse_config({"class": "LocalTransformer"}))
    assert resolved.args.local_attn_window_size == 512
    (note,) = [note for note in resolved.notes if "defaults" in note]
    for part in ("window_size = 512", "causal = True", "exact_windowsize = True", "look_forward = 0"):
        assert part in note
    assert any("hyper_connections" in note for note in resolved.notes)


def test_default_heads_only_where_they_fit():
    options = {**MHA, "use_rotary_pos_emb": False}
    config = parse_config({"class": "LocalMHA", "kwargs": {"window_size": 4}})
    resolved = infer_config(build("LocalMHA", options).state_dict(), config)
    assert (resolved.args.heads, resolved.args.dim_head) == (8, 64)
    assert any("heads = 8" in note for note in resolved.notes)
    with pytest.raises(UsageError, match="needs heads"):
        infer_config(build("LocalMHA", {**options, "heads": 4}).state_dict(), config)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ({"heads": 4}, ["heads is given as 4", "to_qkv.weight: found [1536, 20], expected [768, 20]"]),
        ({"dim_head": 32}, ["dim_head is given as 32", "inv_freq: found [32], expected [16]"]),
        ({"dim": 21}, ["found [1536, 20], expected [1536, 21]"]),
        ({"depth": 3}, ["depth is given as 3", "layers.1 is the last layer"]),
        ({"depth": 1}, ["layers.1.0.branch.to_qkv.weight: found [1536, 20], expected absent"]),
        ({"num_tokens": 12}, ["token_emb.weight: found [11, 20], expected [12, 20]"]),
        ({"max_seq_len": 25}, ["pos_emb.weight: found [24, 20], expected [25, 20]"]),
        ({"ff_mult": 3}, ["layers.0.1.branch.4.weight: found [20, 53], expected [20, 40]"]),
        ({"num_residual_streams": 1}, ["static_beta: found [4], expected absent"]),
        ({"qk_rmsnorm": True}, ["q_scale: found absent, expected [64]"]),
        ({"use_dynamic_pos_bias": True}, ["dynamic_pos_bias.mlp.0.weight: found absent, expected [10, 1]"]),
    ],
)
def test_contradictions_name_the_tensor(override, parts):
    state = build("LocalTransformer", TRANSFORMER).state_dict()
    with pytest.raises(UsageError) as caught:
        infer_config(state, None, {"local_attn_window_size": 4, **override})
    for part in parts:
        assert part in str(caught.value)
    with pytest.raises(UsageError, match=r"the class local_attention\.LocalMHA, .* to a LocalTransformer"):
        infer_config(state, RawConfig("LocalMHA"), {"local_attn_window_size": 4})


def test_rotary_off_contradicts_frequencies():
    for class_name, kwargs in (("LocalMHA", MHA), ("LocalAttention", {"window_size": 4, "dim": 8})):
        with pytest.raises(UsageError, match="use_rotary_pos_emb is given as False"):
            infer_config(build(class_name, kwargs).state_dict(), None, {"window_size": 4, "use_rotary_pos_emb": False})


def test_tensors_that_do_not_fit_each_other():
    state = build("LocalTransformer", TRANSFORMER).state_dict()
    state["layers.1.1.branch.0.bias"] = torch.zeros(3)
    with pytest.raises(UsageError, match=r"layers\.1\.1\.branch\.0\.bias: found \[3\], expected \[20\]"):
        infer_config(state, None, {"local_attn_window_size": 4})


def test_missing_and_unexpected_are_listed_and_bounded():
    state = build("LocalTransformer", {**TRANSFORMER, "depth": 4}).state_dict()
    removed = [name for name in state if name.startswith("layers.2.") and "inv_freq" not in name]
    for name in removed:
        del state[name]
    state["extra"] = torch.ones(1)
    resolved = infer_config(state, None, {"local_attn_window_size": 4})
    assert sorted(resolved.missing) == sorted(removed)
    assert resolved.unexpected == ["extra"]
    with pytest.raises(UsageError, match=f"lacks {len(removed)} tensors.*and {len(removed) - 10} more"):
        resolved.check_keys()


def without_frequencies(module) -> dict:
    return {name: tensor for name, tensor in module.state_dict().items() if "inv_freq" not in name}


def test_absent_frequencies_have_a_formula():
    state = without_frequencies(build("LocalTransformer", TRANSFORMER))
    resolved = infer_config(state, None, {"local_attn_window_size": 4, "heads": 8})
    assert (resolved.args.rotary_dim, resolved.missing) == (64, [])
    assert any("10000^" in note for note in resolved.notes)
    state = without_frequencies(build("LocalMHA", MHA))
    known = {"window_size": 4, "heads": 8}
    assert infer_config(state, None, {**known, "use_rotary_pos_emb": True}).args.rotary_dim == 64
    off = infer_config(state, None, known)
    assert off.args.rotary_dim is None
    assert any("rotary is off" in note for note in off.notes)
    assert infer_config({}, None, {"window_size": 4, "dim": 8}).args.rotary_dim == 8


def test_names_from_before_1_10():
    # Those releases had plain residuals, and exactly these names (checked with 1.9.15).
    new = build("LocalTransformer", {**TRANSFORMER, "num_residual_streams": 1}).state_dict()
    old = {name.replace(".branch.", "."): tensor for name, tensor in new.items()}
    assert old.keys() != new.keys()
    resolved = infer_config(old, None, {"local_attn_window_size": 4})
    assert resolved.state.keys() == new.keys()
    assert all(resolved.state[name] is tensor for name, tensor in zip(new, old.values(), strict=True))
    assert (resolved.missing, resolved.unexpected) == ([], [])
    assert any("1.10" in note for note in resolved.notes)
    assert canonical_state(new) == (dict(new), [])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"global_layers.0.branch.weight": (2,)}, "global attention layers"),
        ({"encoder.weight": (4, 4), "encoder.bias": (4,)}, "no supported class"),
        ({"layers.0.0.branch.norm.weight": (4,)}, "no layers.0.0.branch.to_qkv.weight"),
        ({"layers.1.0.branch.to_qkv.weight": (6, 4)}, "no layer 0"),
        ({"layers.999999.0.branch.to_qkv.weight": (6, 4)}, "no layer 0"),
        ({"to_qkv.weight": (6,)}, r"to_qkv.weight is \[6\]"),
        ({"to_qkv.weight": (7, 4)}, "thrice"),
        ({"to_qkv.weight": (0, 4)}, "thrice"),
        ({"to_qkv.weight": (6, 4), "q_scale": (3,)}, "does not divide"),
        ({"to_qkv.weight": (6, 4), "q_scale": ()}, r"q_scale is \[\]"),
        ({"rel_pos.inv_freq": (2, 2)}, r"rel_pos.inv_freq is \[2, 2\]"),
        ({"token_emb.weight": (4, 4)}, "no layer"),
    ],
)
def test_foreign_states(shapes, message):
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    window = {"local_attn_window_size": 4} if any(name[:6] in ("layers", "token_") for name in state) else {}
    with pytest.raises(UsageError, match=message):
        infer_config(state, None, window or {"window_size": 4})


def test_overrides_win_over_the_config():
    state = build("LocalTransformer", TRANSFORMER).state_dict()
    config = parse_config(
        {"class": "LocalTransformer", "kwargs": {"local_attn_window_size": 4}, "hyper_connections": "0.4.11"}
    )
    resolved = infer_config(state, config, {"local_attn_window_size": 8})
    assert (resolved.args.local_attn_window_size, resolved.hyper_connections) == (8, "0.4.11")
    with pytest.raises(UsageError, match="hyper_connections is"):
        infer_config(state, replace(config, hyper_connections="new"))
    with pytest.raises(UsageError, match="no argument 'windw'"):
        infer_config(state, config, {"windw": 8})


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_from_file_to_arguments(tmp_path, suffix):
    save_file = pytest.importorskip("safetensors.torch").save_file
    kwargs = {**TRANSFORMER, "gate_values_per_head": True}
    state = build("LocalTransformer", kwargs).state_dict()
    path = tmp_path / f"w{suffix}"
    if suffix == ".pt":
        torch.save({"model": {f"module.{name}": tensor.half() for name, tensor in state.items()}}, path)
    else:
        save_file({name: tensor.bfloat16() for name, tensor in state.items()}, path)
    (tmp_path / "w.toml").write_text('class = "LocalTransformer"\nkwargs = {local_attn_window_size = 4}\n')
    resolved = infer_config(load_state(path).state, load_config(find_config(path)))
    assert resolved.args == parse_args("LocalTransformer", kwargs)
    local_attention.LocalTransformer(**kwargs).load_state_dict(resolved.state)


def test_the_real_checkpoint():
    path = Path(__file__).parents[4] / "shared/checkpoints/pystdlib_w128.pt"
    if not path.exists():
        pytest.skip("shared checkpoint not here")
    config = load_config(find_config(path))
    state = load_state(path).state
    shown = infer_config(state, None, {"local_attn_window_size": 128})
    resolved = infer_config(state, config)
    assert shown.args == resolved.args == parse_args(config.class_name, config.kwargs)
    shown.check_keys()
    assert resolve_class(shown.class_name).family is LOCAL_TRANSFORMER
