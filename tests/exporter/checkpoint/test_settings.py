"""What a training checkpoint says of its model itself is read, used with its source, and never against the rest."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.describe import describe_checkpoint
from localattn.exporter.checkpoint.load import load_state
from localattn.exporter.checkpoint.open_checkpoint import OpenedCheckpoint, open_checkpoint
from localattn.exporter.options import ShapeRequest

torch = pytest.importorskip("torch")
local_attention = pytest.importorskip("local_attention")

KWARGS = {"num_tokens": 11, "max_seq_len": 24, "dim": 20, "depth": 1, "heads": 2, "dim_head": 8}
WINDOW = "local_attn_window_size"


@dataclass
class ModelConfig:
    """What a script turns into a table before it saves it."""

    local_attn_window_size: int = 4
    look_backward: int = 2


@pytest.fixture(scope="module")
def state() -> dict:
    return local_attention.LocalTransformer(**KWARGS, local_attn_window_size=4).state_dict()


def saved(folder: Path, content: object, **options: object) -> Path:
    path = folder / "model.pt"
    torch.save(content, path, **options)
    return path


def opened(folder: Path, state: dict, **entries: object) -> OpenedCheckpoint:
    return open_checkpoint(saved(folder, {"state_dict": state, **entries}))


@pytest.mark.parametrize(
    ("entries", "source"),
    [
        ({"hyper_parameters": {WINDOW: 4, "lr": 1e-3, "batch_size": 8}}, "hyper_parameters"),
        ({"hyper_parameters": {"window_size": 4}}, "hyper_parameters.window_size"),
        ({"hyper_parameters": {"model": {"window_size": 4}}}, "hyper_parameters.model.window_size"),
        ({"hyper_parameters": {"model.window_size": 4}}, "hyper_parameters.model.window_size"),
        ({"hyper_parameters": {"model/attn-window-size": 4}}, "hyper_parameters.model.attn-window-size"),
        ({"hparams": {"attention": {"local_attn_window_size": 4}}}, "hparams.attention"),
        ({"args": argparse.Namespace(local_attn_window_size=4, data_dir="/data", amp=True)}, "args"),
        ({"args": argparse.Namespace(model=argparse.Namespace(window_size=4))}, "args.model.window_size"),
        ({"config": {"model": {"_target_": "x.Y", "model_window_size": 4}}}, "config.model.model_window_size"),
        ({"config": {"class": "LocalTransformer", "kwargs": {WINDOW: 4}}}, "config.kwargs"),
        ({"model_args": asdict(ModelConfig())}, "model_args"),
        ({"model_config": {WINDOW: 4}, "epoch": 3}, "model_config"),
        ({"args": {WINDOW: 4}, "hyper_parameters": {WINDOW: 4, "data": {"window_size": 99}}}, "hyper_parameters"),
    ],
)
@pytest.mark.parametrize("zip_format", [True, False])
def test_settings_are_used_and_their_source_is_named(tmp_path, state, entries, source, zip_format):
    path = saved(tmp_path, {"state_dict": state, **entries}, _use_new_zipfile_serialization=zip_format)
    found = open_checkpoint(path)
    assert found.resolved.args.local_attn_window_size == 4
    (note,) = (note for note in found.notes if WINDOW in note and "from the checkpoint's" in note)
    assert note.endswith(f"from the checkpoint's {source}") and f"{WINDOW} 4" in note
    description = describe_checkpoint(path)
    assert description["given"][WINDOW]["value"] == 4 and source in description["given"][WINDOW]["from"]
    assert description["needed"] == "" and description["windows"]


def test_settings_around_the_weights_or_beside_their_tensors(tmp_path, state):
    for content in ({"checkpoint": {"model": state, "args": {WINDOW: 4}}}, {**state, "config": {WINDOW: 4}}):
        found = open_checkpoint(saved(tmp_path, content))
        assert found.resolved.args.local_attn_window_size == 4
        assert not any("ignored" in note for note in found.notes)


def test_more_than_the_window(tmp_path, state):
    settings = {
        **asdict(ModelConfig()),
        "causal": False,
        "use_xpos": True,
        "hyper_connections": "0.3.2",
        "dropout": 0.5,
    }
    found = opened(tmp_path, state, hyper_parameters=settings).resolved
    geometry = found.args.geometry()
    assert (geometry.window_size, geometry.look_backward, geometry.look_forward, geometry.causal) == (4, 2, 1, False)
    assert found.args.use_xpos and found.hyper_connections == "0.3.2"
    found = opened(tmp_path, state, hyper_parameters={**settings, "hyper_connections": "latest"}).resolved
    assert found.hyper_connections is None and "not a release" in found.own.unused[0].why_unused


@pytest.mark.parametrize(
    ("settings", "shown", "why"),
    [
        ({"data": {"window_size": 4}}, "hyper_parameters.data.window_size", "data may describe"),
        ({"optimizer": {"init_args": {WINDOW: 4}}}, f"hyper_parameters.optimizer.init_args.{WINDOW}", "optimizer may"),
        ({WINDOW: 4, "model": {WINDOW: 8}}, f"hyper_parameters.{WINDOW}", "two values"),
        ({"window_size": 4, "attn_window_size": 8}, "hyper_parameters.window_size", "two values"),
        ({WINDOW: "4"}, f"hyper_parameters.{WINDOW}", "valid integer"),
        ({WINDOW: -4}, f"hyper_parameters.{WINDOW}", "greater than"),
        ({WINDOW: True}, f"hyper_parameters.{WINDOW}", "valid integer"),
    ],
)
def test_what_is_ambiguous_is_shown_and_not_used(tmp_path, state, settings, shown, why):
    path = saved(tmp_path, {"state_dict": state, "hyper_parameters": settings})
    with pytest.raises(UsageError, match=f"needs {WINDOW}"):
        open_checkpoint(path)
    found = {entry["from"]: entry for entry in describe_checkpoint(path)["unused"]}
    assert why in found[shown]["why"] and found[shown]["name"] == WINDOW


def test_names_that_only_look_alike_yield(tmp_path, state):
    found = opened(tmp_path, state, args={WINDOW: 4, "window_size": 9, "attn_dim": 99, "model_heads": 2}).resolved
    assert found.args.local_attn_window_size == 4 and found.args.dim == 20
    unused = {setting.source: setting.why_unused for setting in found.own.unused}
    assert unused == {"args.window_size": f"args.{WINDOW} says 4", "args.attn_dim": "the weights show 20"}


def test_a_null_says_nothing(tmp_path, state):
    found = opened(tmp_path, state, args={WINDOW: 4, "look_forward": None, "dim": None})
    assert found.resolved.args.look_forward is None and found.resolved.args.dim == 20


@pytest.mark.parametrize(
    ("config", "entries", "said"),
    [
        ({WINDOW: 8}, {"args": {WINDOW: 4}}, ["8 in model.json", f"4 in the checkpoint's args.{WINDOW}"]),
        ({WINDOW: 8}, {"args": {"window_size": 4}}, ["8 in model.json", "4 in the checkpoint's args.window_size"]),
        ({WINDOW: 4, "causal": True}, {"hparams": {"causal": False}}, ["True in model.json", "hparams.causal"]),
        (
            {},
            {"args": {WINDOW: 4}, "config": {WINDOW: 8}},
            [f"args.{WINDOW}", f"8 in the checkpoint's config.{WINDOW}"],
        ),
        ({}, {"args": {WINDOW: 4}, "config": {"window_size": 8}}, ["4 in", "8 in the checkpoint's config.window_size"]),
        ({}, {"args": {WINDOW: 4, "dim": 32}}, ["32 in the checkpoint's args.dim", "20 from the weights"]),
        ({"dim": 48}, {"args": {WINDOW: 4, "dim": 32}}, ["48 in model.json", "32 in", "20 from the weights"]),
        ({"dim": 32}, {"args": {WINDOW: 4, "dim": 32}}, ["32 in model.json", "args.dim", "20 from the weights"]),
        ({}, {"args": {WINDOW: 4, "heads": 3}}, ["3 in the checkpoint's args.heads", "2 from the weights"]),
    ],
)
def test_a_contradiction_names_all(tmp_path, monkeypatch, state, config, entries, said):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, {"model": state, **entries})
    if config:
        Path("model.json").write_text(json.dumps({"kwargs": config}))
    with pytest.raises(UsageError) as caught:
        open_checkpoint(Path("model.pt"))
    assert all(part in caught.value.what for part in said), caught.value.what
    assert describe_checkpoint(Path("model.pt"))["needed"].startswith(caught.value.what)


def test_the_class_is_read_and_may_not_contradict(tmp_path):
    state = local_attention.LocalMHA(dim=20, heads=2, dim_head=8, window_size=4).state_dict()
    content = {"model": state, "config": {"_target_": "zeta.nn.LocalMHA", "window_size": 4}}
    assert open_checkpoint(saved(tmp_path, content)).resolved.class_name == "zeta.LocalMHA"
    (tmp_path / "model.json").write_text('{"class": "local_attention.LocalMHA"}')
    with pytest.raises(UsageError, match=r"class is 'local_attention.LocalMHA' in .*model.json and 'zeta.LocalMHA' in"):
        open_checkpoint(tmp_path / "model.pt")
    (tmp_path / "model.json").unlink()
    content["config"]["_target_"] = "LocalTransformer"
    with pytest.raises(UsageError, match=r"config\._target_ gives the class .*LocalTransformer, but the"):
        open_checkpoint(saved(tmp_path, content))


def test_heads_that_do_not_fit_are_blamed_on_their_source(tmp_path):
    module = local_attention.LocalMHA(dim=20, heads=2, dim_head=8, window_size=4, use_rotary_pos_emb=False)
    content = {"model": module.state_dict(), "args": {"window_size": 4, "heads": 5}}
    with pytest.raises(UsageError, match="heads = 5 does not divide") as caught:
        open_checkpoint(saved(tmp_path, content))
    assert "args.heads" in caught.value.why
    assert open_checkpoint(tmp_path / "model.pt", shapes=ShapeRequest(heads=2)).resolved.args.dim_head == 8


def test_hostile_settings_end(tmp_path, state):
    loop: dict = {WINDOW: 4, "x" * 10_000: 1, 3: 4}
    loop["model"] = loop
    wide = {f"k{i}": {f"k{j}": j for j in range(100)} for i in range(300)}
    deep: dict = {}
    for _ in range(200):
        deep = {"model": deep}
    found = opened(tmp_path, state, hyper_parameters=loop, args=wide, config=deep)
    assert found.resolved.args.local_attn_window_size == 4


def test_a_namespace_is_data(tmp_path):
    """Its attributes are what the file says, and none of them is called."""
    namespace = argparse.Namespace(window_size=4)
    namespace.__dict__["_get_kwargs"] = "not a method"
    loaded = load_state(saved(tmp_path, {"model": {"rel_pos.inv_freq": torch.ones(4)}, "args": namespace}))
    assert vars(loaded.settings["args"])["window_size"] == 4
    assert open_checkpoint(tmp_path / "model.pt").resolved.args.window_size == 4
