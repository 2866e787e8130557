"""Configs and argument models against upstream's constructors, and every way a config can be wrong."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.exporter.checkpoint.config import adds_residual_only, load_config, parse_config, resolve_class
from localattn.exporter.models.local_attention.arguments import LocalAttentionArgs
from localattn.exporter.models.local_mha.arguments import LocalMHAArgs
from localattn.exporter.models.local_transformer.arguments import LocalTransformerArgs
from localattn.exporter.models.registry import CLASSES

from ...support.upstream import parse_args

TRANSFORMER = {"num_tokens": 16, "max_seq_len": 32, "dim": 8, "depth": 1, "local_attn_window_size": 4}
MHA = {"dim": 8, "window_size": 4}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (LocalAttentionArgs, "LocalAttention"),
        (LocalMHAArgs, "LocalMHA"),
        (LocalTransformerArgs, "LocalTransformer"),
    ],
)
def test_names_and_defaults_are_upstreams(model, name):
    local_attention = pytest.importorskip("local_attention")
    parameters = inspect.signature(getattr(local_attention, name).__init__).parameters
    for parameter in list(parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD or parameter.name == "global_attn_layer":
            continue
        field = model.model_fields[parameter.name]
        if parameter.default is parameter.empty:
            assert field.is_required(), parameter.name
        else:
            assert field.default == parameter.default, parameter.name


def test_attention_geometry_resolves_look_forward():
    assert LocalAttentionArgs(window_size=4).geometry() == WindowGeometry(4, 1, 1)
    assert LocalAttentionArgs(window_size=4, causal=True).geometry() == WindowGeometry(4, 1, 0, True)
    assert LocalAttentionArgs(window_size=4, look_forward=0).geometry() == WindowGeometry(4, 1, 0)


def test_nested_defaults_match_the_modules_upstream_builds():
    local_attention = pytest.importorskip("local_attention")
    for extra in (
        {},
        {"causal": False},
        {"exact_windowsize": False, "look_backward": 2},
        {"qk_rmsnorm": True, "qk_scale": 5},
        {"use_xpos": True},
        {"use_xpos": True, "xpos_scale_base": 7},
        {"use_dynamic_pos_bias": True},
        {"shared_qk": True, "dim_head": 6, "heads": 3},
        {"attn_dropout": 0.25},
    ):
        args = LocalTransformerArgs(**TRANSFORMER, **extra)
        mha = local_attention.LocalTransformer(**TRANSFORMER, **extra).layers[0][0].branch
        ours, theirs = args.mha_args().attention_args(), mha.attn_fn
        geometry = args.geometry()
        for name in ("window_size", "causal", "look_backward", "look_forward", "exact_windowsize"):
            assert getattr(geometry, name) == getattr(theirs, name), (extra, name)
        for name in ("scale", "autopad", "shared_qk", "use_xpos"):
            assert getattr(ours, name) == getattr(theirs, name), (extra, name)
        assert (args.rotary_dim is None) == (theirs.rel_pos is None), extra
        if theirs.rel_pos is not None:
            assert args.rotary_dim == 2 * len(theirs.rel_pos.inv_freq)
            assert ours.xpos_base == (theirs.rel_pos.scale_base if args.use_xpos else None)
        assert args.mha_args().prenorm == (mha.norm is not None)


def test_score_scale():
    assert LocalMHAArgs(**MHA, dim_head=16).attention_args().score_scale(16) == 0.25
    assert LocalMHAArgs(**MHA, qk_rmsnorm=True).attention_args().score_scale(64) == 8
    assert LocalMHAArgs(**MHA, qk_scale=5).attention_args().score_scale(64) == 64**-0.5  # ignored without qk_rmsnorm
    assert LocalAttentionArgs(window_size=4, scale=0.0).score_scale(16) == 0


def test_old_rotary_argument_wins_over_dim():
    assert LocalAttentionArgs(window_size=4, dim=8, rel_pos_emb_config=[6, 2]).rotary_dim == 6
    assert LocalAttentionArgs(window_size=4, dim=8, use_rotary_pos_emb=False).rotary_dim is None


def test_xpos_base_zero_is_refused_only_where_it_counts():
    with pytest.raises(UsageError, match="scale base of 0"):
        LocalAttentionArgs(window_size=1, dim=4, use_xpos=True)
    with pytest.raises(UsageError, match="scale base of 0"):
        parse_args("LocalTransformer", {**TRANSFORMER, "local_attn_window_size": 1, "use_xpos": True})
    assert LocalAttentionArgs(window_size=1, use_xpos=True).xpos_base is None
    assert LocalAttentionArgs(window_size=1, dim=4, use_xpos=True, xpos_scale_base=3).xpos_base == 3


@pytest.mark.parametrize(
    ("class_name", "kwargs", "message"),
    [
        ("LocalMHA", {**MHA, "window_size": 0}, "window_size is 0"),
        ("LocalMHA", {**MHA, "heads": -1}, "heads is -1"),
        ("LocalMHA", {**MHA, "dim": 0}, "dim is 0"),
        ("LocalMHA", {**MHA, "dim": 8.0}, "dim is 8.0"),
        ("LocalMHA", {**MHA, "dim": True}, "dim is True"),
        ("LocalMHA", {**MHA, "dim": "8"}, "dim is '8'"),
        ("LocalMHA", {**MHA, "dim": 10**5000}, "very large"),
        ("LocalMHA", {**MHA, "qk_scale": float("nan")}, "qk_scale is nan"),
        ("LocalMHA", {**MHA, "qk_scale": 10**400}, "qk_scale is 1000"),
        ("LocalMHA", {**MHA, "causal": True, "look_forward": 1}, "look_forward is 1"),
        ("LocalMHA", {**MHA, "causal": 1}, "causal is 1"),
        ("LocalMHA", {**MHA, "dim_head": 5}, "odd"),
        ("LocalMHA", {**MHA, "rel_pos_emb_config": [32]}, "32 channels"),
        ("LocalMHA", {**MHA, "rel_pos_emb_config": []}, "rel_pos_emb_config is"),
        ("LocalMHA", {**MHA, "head": 4}, "no argument 'head'"),
        ("LocalMHA", {"dim": 8}, "needs window_size"),
        ("LocalMHA", {**MHA, "autopad": True}, "autopad cannot be set"),
        ("LocalMHA", {**MHA, "scale": 1.0}, "scale cannot be set"),
        ("zeta.LocalMHA", {**MHA, "gate_values_per_head": True}, "zeta's LocalMHA has no value gates"),
        ("LocalTransformer", {**TRANSFORMER, "global_attn_layer": "x"}, "torch module"),
        ("LocalTransformer", {**TRANSFORMER, "window_size": 4}, "local_attn_window_size"),
        ("LocalTransformer", {**TRANSFORMER, "prenorm": True}, "prenorm"),
        ("LocalTransformer", {**TRANSFORMER, "depth": 10**6}, "depth is 1000000"),
        ("LocalTransformer", {**TRANSFORMER, "depth": 0}, "depth is 0"),
        ("LocalTransformer", {**TRANSFORMER, "ff_mult": 0.01}, "no channels"),
        ("LocalTransformer", {**TRANSFORMER, "ff_mult": float("inf")}, "ff_mult is inf"),
        ("LocalTransformer", {**TRANSFORMER, "max_seq_len": None}, "max_seq_len"),
        ("LocalTransformer", {**TRANSFORMER, "layers_insert_global_attn": [2]}, "beyond depth"),
        ("LocalTransformer", {**TRANSFORMER, "use_dynamic_pos_bias": True, "causal": False}, "2 windows"),
        ("LocalTransformer", {**TRANSFORMER, "use_dynamic_pos_bias": True, "look_backward": 2}, "2 windows"),
    ],
)
def test_wrong_arguments_are_named(class_name, kwargs, message):
    with pytest.raises(UsageError) as caught:
        parse_args(class_name, kwargs)
    assert message in str(caught.value)
    assert all(len(line) < 300 for line in str(caught.value).splitlines())
    assert caught.value.exit_code == 2


def test_direct_construction_raises_the_same_error():
    with pytest.raises(UsageError, match=r"Did you mean window_size\?"):
        LocalAttentionArgs(windowsize=4)


def test_position_bias_fits_two_windows_either_way():
    args = parse_args(
        "LocalTransformer", {**TRANSFORMER, "use_dynamic_pos_bias": True, "causal": False, "look_forward": 0}
    )
    assert args.rotary_dim is None
    parse_args("LocalTransformer", {**TRANSFORMER, "use_dynamic_pos_bias": True, "causal": False, "look_backward": 0})


def test_unsupported_arguments_that_ask_for_nothing_are_dropped():
    args = parse_args("LocalTransformer", {**TRANSFORMER, "global_attn_layer": None})
    assert args == LocalTransformerArgs(**TRANSFORMER)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("LocalMHA", "local_attention.LocalMHA"),
        ("local_attention.transformer.LocalTransformer", "local_attention.LocalTransformer"),
        ("local-attention.LocalAttention", "local_attention.LocalAttention"),
        ("zeta.nn.LocalAttention", "zeta.LocalAttention"),
        ("zeta.nn.attention.local_attention_mha.LocalMHA", "zeta.LocalMHA"),
        *((name, name) for name in CLASSES),
    ],
)
def test_class_aliases(alias, name):
    assert resolve_class(alias).name == name


@pytest.mark.parametrize("name", ["LocalTransformr", "zeta.LocalTransformer", "torch.nn.Linear", "", ".", 3, None])
def test_unknown_classes_list_the_known_ones(name):
    with pytest.raises(UsageError) as caught:
        resolve_class(name)
    assert "local_attention.LocalTransformer" in str(caught.value)


def test_unknown_class_suggests_a_close_one():
    with pytest.raises(UsageError, match=r"Did you mean local_attention\.LocalTransformer"):
        resolve_class("LocalTransformr")


DOCUMENT = {
    "class": "local_attention.LocalMHA",
    "kwargs": {"dim": 8, "window_size": 4, "causal": True, "qk_scale": 5.5},
    "hyper_connections": "0.4.11",
    "about": {"anything": [1, {"at": "all"}]},
}
TOML = """
class = "local_attention.LocalMHA"
hyper_connections = "0.4.11"
about = {anything = 1}
[kwargs]
dim = 8
window_size = 4
causal = true
qk_scale = 5.5
"""
YAML = """
class: local_attention.LocalMHA
hyper_connections: 0.4.11
kwargs: {dim: 8, window_size: 4, causal: true, qk_scale: 5.5}
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", json.dumps(DOCUMENT)),
        ("c.JSON", "\ufeff" + json.dumps(DOCUMENT)),
        ("c.toml", TOML),
        ("c.yaml", YAML),
        ("c.yml", YAML),
    ],
)
def test_every_format_holds_the_same(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    config = load_config(path)
    assert config.class_name == DOCUMENT["class"]
    assert dict(config.kwargs) == DOCUMENT["kwargs"]
    assert config.hyper_connections == "0.4.11"
    assert config.source == str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.json", b"{"),
        ("c.json", b""),
        ("c.json", b"[" * 100_000),
        ("c.json", b'{"kwargs": {"dim": ' + b"9" * 10_000 + b"}}"),
        ("c.json", b"\xff\xfe\x00"),
        ("c.json", b"[1]"),
        ("c.json", b'{"kwargs": [1]}'),
        ("c.json", b'{"dim": 8}'),
        ("c.json", b'{"class": 3}'),
        ("c.json", b'{"class": "LocalMHA", "kwargs": {"hads": 8}}'),
        ("c.json", b'{"hyper_connections": "newest"}'),
        ("c.json", b'{"hyper_connections": 0.4}'),
        ("c.json", b" " * (1 << 20) + b"{}"),
        ("c.toml", b"class = "),
        ("c.yaml", b"a: [1"),
        ("c.yaml", b"!!python/object/apply:os.system ['true']"),
        ("c.yaml", b"a: &a [*a]"),
        ("c.yaml", b"? [a, b]\n: c"),
        ("c.yaml", b"kwargs: {? {a: b} : c}"),
        ("c.yaml", b"a: !!int [1]"),
        ("c.yaml", b"a: !!float {b: 1}"),
        ("c.txt", b"{}"),
        ("c", b"{}"),
    ],
)
def test_broken_files_end_in_a_usage_error(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.json", '{"class": "LocalMHA", "class": "LocalAttention"}', "'class' is given twice"),
        ("c.json", '{"kwargs": {"dim": 8, "window_size": 4, "window_size": 8}}', "'window_size' is given twice"),
        ("c.toml", "[kwargs]\nwindow_size = 4\nwindow_size = 8\n", "overwrite"),
        ("c.toml", "[kwargs]\nwindow_size = 4\n[kwargs]\ndim = 8\n", "twice"),
        ("c.yaml", "kwargs:\n  window_size: 4\n  window_size: 8\n", "'window_size' is given twice (line 3)"),
        ("c.yaml", "kwargs: {window_size: 4, 'window_size': 8}\n", "'window_size' is given twice"),
        ("c.yml", "kwargs: {dim: 8}\nkwargs: {window_size: 4}\n", "'kwargs' is given twice"),
        ("c.yaml", "kwargs: {window_size: 0100}\n", "'0100' (line 1) is an octal number"),
        ("c.yaml", "kwargs:\n  window_size: -010\n", "'-010' (line 2) is an octal number"),
        ("c.yaml", "kwargs: {window_size: 1:30}\n", "'1:30' (line 1) is a sexagesimal"),
        ("c.yaml", "kwargs: {qk_scale: 1:30.5}\n", "'1:30.5' (line 1) is a sexagesimal"),
    ],
)
def test_what_a_library_would_read_otherwise_is_an_error(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert f"{path} is not valid" in caught.value.what and said in caught.value.why, caught.value


def test_other_numbers_of_yaml_are_what_they_seem(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("about: [0, -0, 0x10, 0b11, 1_000, 0.5, '010', '1:30', 2024-01-01]\nkwargs: {window_size: 10}\n")
    assert load_config(path).kwargs == {"window_size": 10}


def test_yaml_alias_bomb_is_reported_in_short_time(tmp_path):
    levels = ["l0: &l0 [x, x]"] + [f"l{i}: &l{i} [*l{i - 1}, *l{i - 1}, *l{i - 1}]" for i in range(1, 40)]
    path = tmp_path / "c.yaml"
    path.write_text("\n".join([*levels, "class: *l39"]))
    with pytest.raises(UsageError):
        load_config(path)
    path.write_text("about:\n" + "\n".join(f"  {level}" for level in levels) + "\nclass: *l39\n")
    with pytest.raises(UsageError, match="The class is"):
        load_config(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UsageError, match="Cannot read"):
        load_config(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UsageError, match="Cannot read"):
        load_config(tmp_path / "folder.json")


def test_an_empty_config_is_allowed():
    config = parse_config({})
    assert (config.class_name, dict(config.kwargs), config.hyper_connections) == (None, {}, None)


@pytest.mark.parametrize(
    ("version", "old"),
    [
        (None, False),
        ("0.4.11", False),
        ("0.3.10", False),
        ("0.3.9", True),
        ("0.3", True),
        ("v0.1.15", True),
        ("0.3.10.post1", False),
        ("1", False),
        ("0.3.9+cu12", True),
    ],
)
def test_hyper_connection_releases(version, old):
    assert adds_residual_only(version) is old


@pytest.mark.parametrize(
    "version",
    ["", "newest", "0..3", "-1.2", 4, 0.4, True, pytest.param(10**5000, id="huge"), ["0.4"], "1." * 50],
)
def test_invalid_versions(version):
    with pytest.raises(UsageError, match="hyper_connections is"):
        adds_residual_only(version)


@pytest.mark.parametrize(
    ("class_name", "kwargs"),
    [
        ("LocalTransformer", TRANSFORMER),
        ("zeta.LocalMHA", MHA),
        ("LocalAttention", {"window_size": 4, "dim": 8}),
    ],
)
def test_full_documents_round_trip(class_name, kwargs):
    entry = resolve_class(class_name)
    args = parse_args(class_name, kwargs)
    # An argument the class itself lacks (zeta's value gates) is off, and does not belong in its config.
    kwargs = args.model_dump(mode="json", exclude=set(entry.unsupported))
    text = json.dumps({"class": entry.name, "kwargs": kwargs, "hyper_connections": "0.3.9"})
    config = parse_config(json.loads(text))
    assert parse_args(config.class_name, config.kwargs) == args
    assert config.hyper_connections == "0.3.9"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = SCALARS | st.integers(1, 9) | st.lists(SCALARS, max_size=3)
NAMES = st.sampled_from(sorted({*LocalTransformerArgs.model_fields, *LocalAttentionArgs.model_fields, "x"}))


# The machine may be busy: no time limits.
@settings(max_examples=60)
@given(st.sampled_from(sorted(CLASSES)), st.dictionaries(NAMES, VALUES, max_size=8))
def test_any_arguments_give_a_model_or_a_usage_error(class_name, kwargs):
    try:
        args = parse_args(class_name, {**TRANSFORMER, **kwargs} if "Transformer" in class_name else kwargs)
    except UsageError as error:
        assert error.what and "\n" not in error.what
    else:
        assert args.geometry().window_size >= 1


def test_the_real_config():
    path = Path(__file__).parents[4] / "shared/checkpoints/pystdlib_w128.json"
    if not path.exists():
        pytest.skip("shared checkpoint not here")
    config = load_config(path)
    args = parse_args(config.class_name, config.kwargs)
    assert args.geometry() == WindowGeometry(128, 1, 0, True, True)
    assert args.ff_inner == 682
